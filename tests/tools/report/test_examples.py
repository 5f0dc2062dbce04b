"""The images of a report: selection, thumbnails and heat maps."""

from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

from mldec.checkpoint import load_model
from mldec.data.labels import from_dense
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, ImageFiles, StoredImages, fixed_sample
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.tools.heat_maps import Explainer
from mldec.tools.report import examples as module
from mldec.tools.report.examples import (
    IMAGES_PER_KIND,
    PICTURE_SIDE,
    THUMBNAIL_SIDE,
    Decision,
    Example,
    add_heat_maps,
    find_confusions,
    list_decisions,
    make_photos,
    select_examples,
    small_image,
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


def test_decisions_are_labels_and_predictions():
    labels = np.array([[1, 0, 1, -1, 0, 1]], np.int8)
    logits = np.array([[3.0, 2.0, -4.0, 1.0, -1.0, 0.2]], np.float32)
    predictions = Predictions(logits, labels, exclusive=False, logit_threshold=0.5)
    expected = [(0, "right"), (1, "wrong"), (3, "unknown"), (5, "missed"), (2, "missed")]
    decisions = list_decisions(predictions, 0)
    assert [decision[:2] for decision in decisions] == expected
    scores = 1 / (1 + np.exp(-logits[0, [0, 1, 3, 5, 2]]))
    assert [decision.score for decision in decisions] == pytest.approx(scores.tolist(), abs=1e-4)

    # Only the class with the highest score is predicted.
    exclusive = Predictions(logits, np.array([[0, 1, 0, 0, 0, 0]], np.int8), True, None)
    decisions = list_decisions(exclusive, 0)
    assert [decision[:2] for decision in decisions] == [(0, "wrong"), (1, "missed")]


def test_confusions_are_the_most_common_pairs_of_errors():
    def image(missed, wrong):
        scores = [(index, "missed", 0.1) for index in missed]
        scores += [(index, "wrong", score) for index, score in wrong]
        return [Decision(9, "right", 0.9)] + [Decision(*values) for values in scores]

    decisions = [image([0], [(1, 0.6 + 0.05 * number)]) for number in range(8)]
    decisions += [image([], [])] * 20
    decisions += [image([2], []) for _ in range(5)]
    decisions += [image([], [(3, 0.7)]) for _ in range(4)]
    decisions += [image([0, 2], [(1, 0.99)])] * 2
    confusions = find_confusions(decisions)
    pairs = [(one.missed, one.predicted, one.images) for one in confusions]
    assert pairs == [(0, 1, 10), (2, None, 5), (None, 3, 4), (2, 1, 2)]

    # The predictions with the highest scores are first.
    assert confusions[0].rows == [37, 38, 7, 6, 5, 4]


def stripes(folder, count=1, size=(400, 200)):
    """Return a function that makes a data set of images with a red, a green and a blue stripe."""
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    for third in range(3):
        pixels[:, width * third // 3 : width * (third + 1) // 3, third] = 255
    names = [f"{number}.png".encode() for number in range(count)]
    for name in names:
        Image.fromarray(pixels).save(folder / name.decode())
    storage = ImageFiles(folder, np.array(names))
    labels = from_dense(np.array([[1, 0]] * count, np.int8))

    def make(**transform):
        view = EvalTransform(image_size=64, **transform)
        return StoredImages(storage, labels, ("a", "b"), view)

    return make


@pytest.mark.parametrize(
    ("crop", "size"), [(None, (THUMBNAIL_SIDE, THUMBNAIL_SIDE // 2)), (0.5, (64, 64))]
)
def test_small_image_is_the_model_input(tmp_path, crop, size):
    dataset = stripes(tmp_path)(crop=crop)
    image = small_image(dataset, 0, THUMBNAIL_SIDE)
    assert image.size == size
    assert (np.asarray(image)[..., 1].min() > 190) == (crop is not None)


def test_gallery_is_a_sample_of_many_images(tmp_path, monkeypatch):
    dataset = stripes(tmp_path, count=12)(crop=None)
    indices = np.arange(12)[::-1]
    decisions = [[Decision(0, "right", row / 12)] for row in range(12)]
    photos, gallery = make_photos(dataset, indices, decisions, {3})
    assert gallery == sorted(photos) == list(range(12))
    assert [row for row, photo in photos.items() if photo.picture] == [3]
    assert photos[4].decisions == decisions[4]
    assert photos[4].is_file
    assert Path(photos[4].name) == tmp_path / "7.png"
    for address, side in ((photos[3].thumbnail, THUMBNAIL_SIDE), (photos[3].picture, PICTURE_SIDE)):
        with Image.open(urlopen(address)) as image:
            assert image.size == (side, side // 2)

    monkeypatch.setattr(module, "MAX_GALLERY_BYTES", 5.5 * len(photos[0].thumbnail))
    photos, gallery = make_photos(dataset, indices, decisions, {3})
    assert len(gallery) == 5
    assert photos.keys() == {3, *gallery}
    monkeypatch.setattr(module, "MAX_GALLERY", 2)
    assert len(make_photos(dataset, indices, decisions, set())[1]) == 2


def test_heat_maps_of_a_batch_equal_those_of_single_images(digits_run, monkeypatch):
    loaded = load_model(digits_run, plugins=["patches"])
    words = ["device=cpu", "data.val_images=40"]
    setup = open_for_evaluation(loaded, EvalOptions(checkpoint="x", settings=words))
    # The data has the classes of the model in another order.
    backwards = replace(setup.data.val, classes=Classes(loaded.classes.names[::-1]))
    setup = replace(setup, data=replace(setup.data, load_val=lambda: backwards))
    indices = np.arange(40)[::-1]
    # Images have between one and five classes, in the order of the classes.
    examples = [Example(k, "right", row, 0.5) for k in range(5) for row in range(k, 40, 3)]
    loads = []

    def sample(dataset, index):
        loads.append(index)
        return fixed_sample(dataset, index)

    monkeypatch.setattr(module, "fixed_sample", sample)
    explained, note = add_heat_maps(examples, setup, setup.data.val.dataset, indices)
    assert note.startswith("Heat maps: ")
    assert [replace(one, heat=None) for one in explained] == examples
    assert len(loads) == len({example.row for example in examples})

    explainer = Explainer(loaded.model, setup.data.transform.image_size)
    for example in explained[::7]:
        image, _ = fixed_sample(setup.data.val.dataset, int(indices[example.row]))
        [[heat]] = explainer.maps(image[None], [[9 - example.class_index]])
        expected = 255 * heat / heat.max()
        assert example.heat.dtype == np.uint8
        np.testing.assert_allclose(example.heat, expected, atol=0.51)
