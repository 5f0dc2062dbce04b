"""The images of a report: selection, thumbnails and heat maps."""

from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from PIL import Image

from mldec.build import data_from_settings
from mldec.checkpoint import load_model
from mldec.data.labels import from_dense
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, ImageFiles, StoredImages
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.tools.report import examples as module
from mldec.tools.report.examples import (
    IMAGES_PER_KIND,
    SIDE,
    Example,
    add_heat_maps,
    make_thumbnail,
    select_examples,
)
from mldec.tools.report.statistics import Predictions


def test_examples_have_the_highest_confidence_of_the_weakest_classes(monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 2, (200, 4)).astype(np.int8)
    logits = (rng.normal(size=labels.shape) + 3 * labels).astype(np.float32)
    labels[:20] = np.where(labels[:20] >= 0, 1 - labels[:20], -1)  # wrong labels
    predictions = Predictions(logits, labels, exclusive=False, logit_threshold=0.5)

    monkeypatch.setattr(module, "MAX_CLASSES", 2)
    examples = select_examples(predictions, np.array([0.9, 0.2, np.nan, 0.3]))
    assert {example.class_index for example in examples} == {1, 3}
    for k in (1, 3):
        decided = logits[:, k] > 0.5
        kinds = {
            "right": (decided & (labels[:, k] == 1), -logits[:, k]),
            "wrong": (decided & (labels[:, k] == 0), -logits[:, k]),
            "missed": (~decided & (labels[:, k] == 1), logits[:, k]),
        }
        for kind, (mask, order) in kinds.items():
            rows = [one.row for one in examples if (one.class_index, one.kind) == (k, kind)]
            best = sorted(np.flatnonzero(mask), key=lambda row, order=order: order[row])
            assert rows == best[:IMAGES_PER_KIND]
    for example in examples:
        score = predictions.probabilities(logits[example.row, example.class_index])
        assert example.score == pytest.approx(float(score))


@pytest.mark.parametrize(("crop", "size"), [(None, (SIDE, SIDE // 2)), (0.5, (64, 64))])
def test_thumbnail_shows_the_model_input(tmp_path, crop, size):
    # Three stripes of 400 x 200 pixels: red, green and blue.
    pixels = np.zeros((200, 400, 3), np.uint8)
    for third in range(3):
        pixels[:, 400 * third // 3 : 400 * (third + 1) // 3, third] = 255
    Image.fromarray(pixels).save(tmp_path / "0.png")
    storage = ImageFiles(tmp_path, np.array([b"0.png"]))
    labels = from_dense(np.array([[1, 0]], np.int8))
    transform = EvalTransform(image_size=64, crop=crop)
    dataset = StoredImages(storage, labels, ("a", "b"), transform)

    thumbnail = make_thumbnail(dataset, 0, ["a"])
    assert (Path(thumbnail.name).name, thumbnail.labels) == ("0.png", ["a"])
    with Image.open(urlopen(thumbnail.url)) as image:
        assert (image.format, image.size) == ("JPEG", size)
        green = np.asarray(image)[..., 1].min()
    assert (green > 190) == (crop is not None)


def test_heat_map_is_of_the_class_of_its_example(digits_run):
    loaded = load_model(digits_run, plugins=["patches"])
    setup = open_for_evaluation(loaded, EvalOptions(checkpoint="x", settings=["device=cpu"]))
    data = data_from_settings(["data=digits", "data.val_images=40"])[1]
    backwards = Classes(loaded.classes.names[::-1])
    reversed_data = replace(data, load_val=lambda: replace(data.val, classes=backwards))
    setup = replace(setup, data=data, device=torch.device("cpu"))

    rows = [3, 17, 39]
    indices = np.arange(40)[::-1]
    examples = [Example(row % 10, "right", row, 0.5) for row in rows]
    explained, note = add_heat_maps(examples, setup, indices)
    assert note.startswith("Heat maps: ")

    # The same classes with other class indices have the same heat maps.
    mirrored = [replace(example, class_index=9 - example.class_index) for example in examples]
    others, _ = add_heat_maps(mirrored, replace(setup, data=reversed_data), indices)
    for example, other in zip(explained, others, strict=True):
        assert (example.heat.dtype, example.heat.max()) == (np.uint8, 255)
        assert np.array_equal(example.heat, other.heat)
    assert not np.array_equal(explained[0].heat, explained[1].heat)
