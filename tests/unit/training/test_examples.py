"""Pictures of the best evaluation."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

from mldec.data.labels import from_dense
from mldec.data.loader import Batch
from mldec.data.types import Classes, ImageFiles, Split, StoredImages
from mldec.evaluation.output import Results
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.runtime import distributed
from mldec.training.examples import COLUMNS, LINE, SIDE, TOP, ExampleImages, weakest_curves

NAMES = ("cat", "dog", "owl", "猫")
HEIGHT = SIDE + LINE * (1 + TOP)


def results(evaluator):
    metrics = evaluator.compute()
    predictions = getattr(evaluator, "predictions", None)
    return Results(metrics, evaluator.per_class(), 4, [], None, predictions)


def test_curves_are_of_classes_with_lowest_ap_and_annotated_images():
    generator = np.random.default_rng(0)
    targets = generator.integers(-1, 2, (60, 13))
    targets[:, 4] = 0  # a class without positives has no curve
    logits = generator.normal(size=(60, 13)) + 2 * (targets == 1)
    names = tuple(f"class {index}" for index in range(13))
    expected = {}
    for name, labels, scores in zip(names, targets.T, logits.T, strict=True):
        if name != "class 4":
            known = labels >= 0
            expected[name] = average_precision_score(labels[known], scores[known])

    evaluator = PartialLabelEvaluator(13)
    for rows in (slice(0, 25), slice(25, 60)):
        evaluator.update(torch.tensor(logits[rows]), torch.tensor(targets[rows]))
    curves = weakest_curves(results(evaluator), names)

    assert list(curves) == sorted(expected, key=expected.__getitem__)[:10]
    for name, (labels, scores) in curves.items():
        assert average_precision_score(labels, scores) == pytest.approx(expected[name])
        assert 0 < scores.min() < scores.max() < 1


def test_single_label_data_has_no_curves():
    evaluator = SingleLabelEvaluator(4)
    evaluator.update(torch.eye(4), torch.eye(4))
    assert weakest_curves(results(evaluator), NAMES) == {}


def photos(folder, *, exclusive=False):
    """Return a split of six photos of one color each. The photo 2 is missing."""
    labels = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, -1]] * 2, np.int8)
    for index in range(6):
        if index != 2:
            Image.new("RGB", (40, 20), (40 * index, 0, 255)).save(folder / f"{index}.png")
    files = ImageFiles(folder, np.array([f"{index}.png" for index in range(6)], np.bytes_))
    images = StoredImages(files, from_dense(labels), NAMES)
    return Split(images, Classes(NAMES, exclusive=exclusive)), torch.from_numpy(labels)


def batch(labels, *indices):
    return Batch(torch.zeros(len(indices)), labels[list(indices)], torch.tensor(indices))


def test_grid_shows_evenly_spaced_images_with_labels_and_predictions(tmp_path):
    split, labels = photos(tmp_path)
    logits = torch.tensor([[2.0, -1.0, 0.0, 1.0]])
    examples = ExampleImages(split, 3)
    # Two models have other logits.
    for index in range(6):
        examples.update(batch(labels, index), [logits, -logits])

    examples.gather()
    grid, text = examples.draw(0)
    assert grid.shape == (HEIGHT, COLUMNS * SIDE, 3)
    for tile, blue in enumerate((0, None, 200)):
        color = grid[SIDE // 4, tile * SIDE + SIDE // 2].tolist()
        assert color == ([255, 255, 255] if blue is None else [blue, 0, 255])
    lines = text.splitlines()
    assert lines[0] == f"{tmp_path}/0.png: cat; predictions 0.88 cat, 0.73 猫, 0.50 owl"
    assert lines[1:] == [
        f"{tmp_path}/2.png: owl; predictions 0.88 cat, 0.73 猫, 0.50 owl",
        f"{tmp_path}/5.png: owl; predictions 0.88 cat, 0.73 猫, 0.50 owl",
    ]
    # The first prediction is green if its class is present, and red if it is absent.
    for tile, is_present in enumerate((True, False, False)):
        line = grid[SIDE + LINE : SIDE + 2 * LINE, tile * SIDE : (tile + 1) * SIDE]
        red, green, _ = line.mean((0, 1))
        assert (green > red) == is_present

    assert "0.73 dog" in examples.draw(1)[1]


def test_all_ranks_contribute_images(tmp_path, monkeypatch):
    split, labels = photos(tmp_path, exclusive=True)
    logits = torch.tensor([[2.0, -1.0, 0.0, 1.0]])
    ranks = []
    for indices in ((1, 3, 5), (0, 2, 4)):
        examples = ExampleImages(split, 16)
        examples.update(batch(labels, *indices), [logits.expand(3, 4)])
        ranks.append(examples)

    monkeypatch.setattr(distributed, "gather", lambda value: [each.examples for each in ranks])
    ranks[0].gather()
    grid, text = ranks[0].draw(0)
    assert grid.shape[0] == 2 * HEIGHT
    assert [line[: line.index(":")][-5] for line in text.splitlines()] == [*"012345"]
    # The scores of single-label data are probabilities of the softmax.
    assert text.count("0.64 cat") == 6
