"""The images that a report shows: which ones, small copies, and heat maps."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mldec.build import data_from_settings
from mldec.checkpoint import load_model
from mldec.data.labels import from_dense
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, ImageFiles, Split, StoredImages
from mldec.evaluators.label_errors import rank
from mldec.tools.report import examples as module
from mldec.tools.report.examples import (
    PER_KIND,
    SIDE,
    Example,
    album,
    classes_with_images,
    surest_examples,
    suspected_labels,
    thumbnail,
    with_heat,
)
from mldec.tools.report.statistics import Answers


def made(images=200, classes=4):
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 2, (images, classes)).astype(np.int8)
    logits = (rng.normal(size=labels.shape) + 3 * labels).astype(np.float32)
    labels[:20] = np.where(labels[:20] >= 0, 1 - labels[:20], -1)  # wrong ones
    return Answers(logits=logits, labels=labels, exclusive=False, lowest=0.5)


def test_the_surest_images_of_each_kind_are_chosen():
    answers = made()
    picks = surest_examples(answers, np.array([1, 3]))
    assert {pick.class_index for pick in picks} == {1, 3}
    for k in (1, 3):
        logits, labels = answers.logits[:, k], answers.labels[:, k]
        kinds = {
            "right": ((logits > 0.5) & (labels == 1), -logits),
            "wrong": ((logits > 0.5) & (labels == 0), -logits),
            "missed": ((logits <= 0.5) & (labels == 1), logits),
        }
        for kind, (chosen, order) in kinds.items():
            rows = [pick.row for pick in picks if (pick.class_index, pick.kind) == (k, kind)]
            best = sorted(np.flatnonzero(chosen), key=lambda row, order=order: order[row])
            assert rows == best[:PER_KIND]
    for pick in picks:
        score = answers.probabilities(answers.logits[pick.row, pick.class_index])
        assert pick.score == pytest.approx(float(score))


def test_of_many_classes_some_from_the_best_to_the_worst_are_chosen():
    precision = np.random.default_rng(0).permutation(np.linspace(0, 1, 1_000))
    precision[::10] = np.nan
    chosen = classes_with_images(precision, most=50)
    assert len(chosen) == 50 == len(set(chosen.tolist()))
    assert np.array_equal(chosen, np.sort(chosen))
    values = np.sort(precision[chosen])
    assert (values[0], values[-1]) == (np.nanmin(precision), np.nanmax(precision))
    assert np.diff(values) == pytest.approx(np.full(49, 1 / 49), abs=0.02)

    assert classes_with_images(np.array([np.nan, 0.2, np.nan]), most=2).tolist() == [1]
    assert classes_with_images(np.array([np.nan, 0.2]), most=2).tolist() == [0, 1]


def test_suspected_labels_are_those_of_the_ranking(monkeypatch):
    answers = made()
    classes = np.array([0, 2])
    ranking = rank(answers.logits[:, classes], answers.labels[:, classes])
    pairs = [
        (int(classes[k]), int(image), bool(present))
        for image, k, present, suspected in zip(
            ranking.images, ranking.classes, ranking.present, ranking.suspected, strict=True
        )
        if suspected
    ]

    found = suspected_labels(answers, classes)
    assert [(label.class_index, label.row, label.present) for label in found] == pairs
    assert len(pairs) > 8

    monkeypatch.setattr(module, "MOST_SUSPECTS", 8)
    fewer = suspected_labels(answers, classes)
    assert sum(label.present for label in fewer) == 4 == sum(not label.present for label in fewer)


LABELS = np.array([[1, 0], [1, 1], [-1, 0]], np.int8)


def stored(folder, **settings):
    """Return three stripes of 400 x 200 pixels: red, green and blue thirds from left to right."""
    pixels = np.zeros((200, 400, 3), np.uint8)
    for third in range(3):
        pixels[:, 400 * third // 3 : 400 * (third + 1) // 3, third] = 255
    for number in range(3):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    files = np.array([b"0.png", b"1.png", b"2.png"])
    transform, names = EvalTransform(image_size=64, **settings), ("a", "b")
    storage = ImageFiles(folder, files, "see")
    return Split(StoredImages(storage, from_dense(LABELS), names, transform), Classes(names))


def test_a_small_copy_shows_what_the_model_sees(tmp_path):
    assert thumbnail(stored(tmp_path).dataset, 0).size == (SIDE, SIDE // 2)

    shown = thumbnail(stored(tmp_path, crop=0.5).dataset, 0)
    assert shown.size == (64, 64)
    assert np.asarray(shown)[..., 1].min() > 200  # the green third alone


@pytest.mark.parametrize(("budget", "count"), [(1, 1), (10_000, 2)])
def test_each_image_is_in_the_album_once_while_there_is_room(tmp_path, budget, count):
    pictures = album(stored(tmp_path), np.array([0, 2]), LABELS[[0, 2]], [1, 0, 1], budget)
    names = [(row, Path(picture.name).name) for row, picture in pictures.items()]
    assert names == [(1, "2.png"), (0, "0.png")][:count]
    assert pictures[1].labels == ()
    with Image.open(io.BytesIO(pictures[1].jpeg)) as image:
        assert (image.format, image.size) == ("JPEG", (SIDE, SIDE // 2))


def test_each_example_has_a_map_of_its_class_whatever_its_batch(digits_run):
    loaded = load_model(digits_run, plugins=["patches"])
    data = data_from_settings(["data=digits", "data.val_images=40"])[1]
    in_reverse = replace(data, load_val=lambda: replace(split, classes=backwards))
    split, backwards = data.val, Classes(loaded.classes.names[::-1])

    rows = np.random.default_rng(0).permutation(40)
    chosen = [Example(int(row) % 10, "right", int(row), 0.5) for row in rows]
    cpu = torch.device("cpu")
    explained, method = with_heat(chosen, np.arange(40), loaded, data, cpu)
    assert method
    for place in (0, 17, 39):
        [alone], _ = with_heat([chosen[place]], np.arange(40), loaded, data, cpu)
        mirrored = replace(chosen[place], class_index=9 - chosen[place].class_index)
        [other], _ = with_heat([mirrored], np.arange(40), loaded, in_reverse, cpu)
        for one in (alone, other):
            # Equal but for the rounding of batches.
            assert np.abs(explained[place].heat.astype(int) - one.heat).max() <= 1
    for example in explained:
        assert (example.heat.dtype, example.heat.max()) == (np.uint8, 255)
