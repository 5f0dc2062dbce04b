"""Event files, read back with TensorBoard's own readers."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.pr_curve.metadata import PLUGIN_NAME, parse_plugin_metadata
from tensorboard.util.tensor_util import make_ndarray

from mldec.errors import DataError
from mldec.training.details import Curve, Details, Histogram
from mldec.training.event_file import EventFile

PLUGINS = ("scalars", "histograms", "images", PLUGIN_NAME)
CURVE = Curve(*(np.linspace(start, start + 1, 101) for start in range(6)))
HISTOGRAM = Histogram(np.array([2, 0, 5]), np.array([-1.0, 0.0, 0.5, 2.0]), -0.75, 1.5, 4.0, 9.0)
PIXELS = np.tile(np.linspace(0, 255, 60).astype(np.uint8)[:, None], (40, 1, 3)).reshape(40, 60, 3)
DETAILS = Details(
    scalars={"val_AP/a/b": 12.5},
    histograms={"val_logits/positives": HISTOGRAM},
    curves={"val_pr/micro": CURVE},
    images={"val_images": Image.fromarray(PIXELS)},
)


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(
        str(folder), size_guidance={"images": 0, "histograms": 0, "tensors": 0}
    )
    return events.Reload()


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    file = EventFile(tmp_path, purge_step=1)
    file.add(6, {"loss": 0.25})
    file.add_details(7, DETAILS)
    events = read(tmp_path)
    tags = events.Tags()
    assert sorted(tags["scalars"]) == ["loss", "val_AP/a/b"]

    (scalar,) = events.Scalars("val_AP/a/b")
    assert (scalar.step, scalar.value) == (7, 12.5)

    (histogram,) = events.Histograms("val_logits/positives")
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (
        -0.75,
        1.5,
        7,
        4.0,
        9.0,
    )
    assert (value.bucket, value.bucket_limit) == ([2, 0, 5], [0.0, 0.5, 2.0])

    (image,) = events.Images("val_images")
    assert (image.step, image.width, image.height) == (7, 60, 40)
    decoded = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)), dtype=float)
    assert np.abs(decoded - PIXELS).mean() < 3


def test_curves_have_the_form_of_tensorboards_plugin(tmp_path: Path) -> None:
    EventFile(tmp_path, purge_step=1).add_details(7, DETAILS)
    events = read(tmp_path)
    assert events.PluginTagToContent(PLUGIN_NAME).keys() == {"val_pr/micro"}
    content = events.PluginTagToContent(PLUGIN_NAME)["val_pr/micro"]
    assert parse_plugin_metadata(content).num_thresholds == 101
    (tensor,) = events.Tensors("val_pr/micro")
    assert tensor.step == 7
    assert np.allclose(make_ndarray(tensor.tensor_proto), np.stack(CURVE))


def test_a_new_start_drops_later_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, steps in enumerate(((2, 4), (3, 5))):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        file = EventFile(tmp_path, purge_step=steps[0])
        for step in steps:
            file.add_details(step, DETAILS)

    # What TensorBoard shows; it keeps everything as tensors.
    shown = plugin_event_accumulator.EventAccumulator(
        str(tmp_path), size_guidance={}, tensor_size_guidance=dict.fromkeys(PLUGINS, 0)
    )
    shown.Reload()
    for tag in ("val_images", "val_logits/positives", "val_pr/micro", "val_AP/a/b"):
        assert [event.step for event in shown.Tensors(tag)] == [2, 3, 5], tag


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    file = EventFile(tmp_path, purge_step=1)
    file.path.unlink()
    file.path.symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"cannot write .*tfevents.*No space left on device"):
        file.add_details(1, DETAILS)
