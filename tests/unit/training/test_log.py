"""The log of a run: metrics.jsonl, train.log, TensorBoard and wandb."""

import importlib.util
import json
import logging
import math
import textwrap
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import yaml
from support import QUICK
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.util.tensor_util import make_ndarray

from mldec.checkpoint.state import Best
from mldec.config.compose import flat
from mldec.errors import DataError
from mldec.training.log import RunLog, read_progress

# The thread of TensorBoard prints a traceback for a full disk.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def line(step):
    return json.dumps({"step": step, "epoch": 0, "time": 0.5, "loss": step / 10}) + "\n"


def tensorboard(folder, sizes=None):
    """Read the events of a run. A size of 0 keeps all events of a kind."""
    events = EventAccumulator(str(folder / "tensorboard"), sizes)
    events.Reload()
    return events


WHOLE = [line(step) for step in range(1, 7)]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ("".join(WHOLE), WHOLE[:4]),
        ("".join(WHOLE[:4]) + WHOLE[4][:9], WHOLE[:4]),
        ("".join(WHOLE[:3]) + WHOLE[3][:9], WHOLE[:3]),  # cut in a line
        (None, []),
    ],
)
def test_resume_truncates_log_to_lines_of_checkpoint(content, kept, tmp_path):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    log = RunLog(tmp_path, step=4, lines=4)
    log.scalars(5, 0, {"val/x": math.nan})
    log.close()

    written = path.read_text().splitlines(keepends=True)
    assert (written[:-1], log.lines) == (kept, len(kept))
    assert json.loads(written[-1])["val/x"] is None, "JSON has no NaN"


def test_clock_continues_after_resume(tmp_path):
    for step, seconds in ((1, 20_000), (2, 1_000), (3, 4_000)):
        started = time.monotonic() - seconds
        with closing(RunLog(tmp_path, step=step - 1, lines=step - 1, started=started)) as log:
            log.scalars(step, 0, {"val/x": 1.0 / step})
    progress = read_progress(tmp_path / "metrics.jsonl")
    assert progress.seconds == pytest.approx(25_000, abs=600)
    assert progress.best.seconds == pytest.approx(20_000, abs=600)


def test_best_evaluation_of_equal_ones_has_lowest_loss_or_is_latest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    losses = {1: (2.0, 3.0), 2: (4.0, 1.0), 3: (2.0, 1.5)}
    with closing(RunLog(tmp_path)) as log:
        for epoch, (average, raw) in losses.items():
            values = {"val/x": 5.0, "val_raw/x": 5.0, "val/loss": average, "val_raw/loss": raw}
            log.scalars(epoch, epoch, values)
        best = read_progress(path).best
        assert (best.epoch, best.weights, best.loss) == (2, "raw", 1.0)

        log.scalars(4, 4, {"val/x": 5.0, "val_raw/x": 5.0})
        best = read_progress(path).best
        assert (best.epoch, best.weights, best.loss) == (4, "ema", None)
        log.scalars(5, 5, {"val/x": math.nan, "val_raw/x": 4.0})
        assert read_progress(path).best == best


def test_earlier_messages_come_first(tmp_path):
    messages = logging.getLogger("mldec")
    records = []
    for text in "ab":
        records.append(messages.makeRecord("mldec", logging.INFO, "f", 1, text, (), None))
    with closing(RunLog(tmp_path, earlier=records)):
        messages.warning("c")
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line[-1] for line in lines] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "tensorboard"])
def test_full_disk_names_file(name, tmp_path):
    path = tmp_path / name
    if name == "train.log":
        path.symlink_to("/dev/full")
    with closing(RunLog(tmp_path)) as log:
        log.scalars(1, 0, {"loss": 0.5})
        if name == "tensorboard":
            [path] = path.iterdir()
        path.unlink()
        path.symlink_to("/dev/full")

        def write():
            log.scalars(2, 0, {"loss": 0.5})
            logging.getLogger("mldec").warning("one line")

        with pytest.raises(DataError, match=name):
            write()


def test_train_log_escapes_undecodable_names(tmp_path):
    log = RunLog(tmp_path)
    logging.getLogger("mldec").warning("Stra\u00dfe \u65e5 \udcff.png")
    log.close()
    logging.getLogger("mldec").warning("after the run")
    text = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert text.endswith("] Stra\u00dfe \u65e5 \\udcff.png\n")
    assert text.count("\n") == 1


def test_tensorboard_drops_steps_that_resume_repeats(tmp_path, monkeypatch):
    for finished, steps in ((0, (2, 4)), (2, (3, 5))):
        # The name of an event file contains the second of its start.
        monkeypatch.setattr(time, "time", lambda seconds=1_000 + finished: seconds)
        log = RunLog(tmp_path, step=finished)
        for step in steps:
            log.scalars(step, 0, {"train/loss": 10.0 + step})
        log.close()

    events = tensorboard(tmp_path)
    loss = events.Scalars("main/train_loss")
    assert [(event.step, event.value) for event in loss] == [(2, 12), (3, 13), (5, 15)]


def test_tensorboard_shows_main_numbers_first(digits_run):
    events = tensorboard(digits_run)
    # TensorBoard sorts groups and tags by name.
    tags = sorted(events.Tags()["scalars"])
    assert tags.pop(0) == "main/best_mAP"
    expected = ["train_images_per_second", "train_loss", "train_lr", "val_loss", "val_mAP"]
    assert tags[:5] == [f"main/{name}" for name in expected]

    lines = (digits_run / "metrics.jsonl").read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line)} - {"step", "epoch", "time"}
    assert keys == {tag.removeprefix("main/").replace("_", "/", 1) for tag in tags[:5]} | set(
        tags[5:]
    )


def test_tensorboard_has_settings_best_value_and_pictures_of_best(digits_run):
    events = tensorboard(digits_run, {"tensors": 0, "images": 0})
    best = read_progress(digits_run / "metrics.jsonl").best
    step = 4 * best.epoch
    newest = events.Scalars("main/best_mAP")[-1]
    assert (newest.step, newest.value) == (step, pytest.approx(best.value))

    def text(tag):
        event = events.Tensors(f"{tag}/text_summary")[-1]
        return event.step, textwrap.dedent(event.tensor_proto.string_val[0].decode())

    config = yaml.safe_load((digits_run / "config.yaml").read_text())
    assert yaml.safe_load(text("config")[1]) == config
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert settings.keys() == flat(config).keys()
    assert settings["optim.lr"].number_value == config["optim"]["lr"]
    values = [settings[key].string_value for key in ("loss._target_", "train.tf32", "init")]
    assert values == [config["loss"]["_target_"], "false", "null"]

    # 40 validation images, of which 16 are shown, and ten classes.
    image = events.Images("validation images")[-1]
    assert (image.step, image.width) == (step, 640)
    assert text("validation images")[0] == step
    assert text("validation images")[1].count("\n") == 15
    curves = [tag for tag in events.Tags()["tensors"] if tag.startswith("weakest classes/")]
    assert len(curves) == 10
    for tag in curves:
        curve = events.Tensors(tag)[-1]
        assert curve.step == step
        # Rows: true positives, false positives, true and false negatives, precision, recall.
        hits, false_alarms, *_ = make_ndarray(curve.tensor_proto)[:, 0]
        assert hits + false_alarms == 40, "all images have at least the lowest threshold"


def test_pictures_are_rate_limited_and_written_at_the_end(tmp_path):
    drawn = []

    def draw(board, step):
        drawn.append(step)
        board.add_image("image", np.zeros((3, 8, 8), np.uint8), step)

    with closing(RunLog(tmp_path)) as log:
        for step in (1, 2, 3):
            best = Best("mAP", 10.0 * step)
            log.best(step, best, partial(draw, step=step))
        assert drawn == [1]
    assert drawn == [1, 3]

    events = tensorboard(tmp_path)
    assert [event.step for event in events.Images("image")] == [1, 3]
    assert [event.value for event in events.Scalars("main/best_mAP")] == [10, 20, 30]


def test_missing_wandb_raises_before_run(cli, monkeypatch, here):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "log.wandb" in cli.fault("train", *QUICK, "log.wandb=true")
    assert not list(here.rglob("*.pt"))
