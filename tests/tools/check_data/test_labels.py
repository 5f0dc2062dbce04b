"""Statistics and faults of labels, against plain loops."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from mldec.check_data import examine as label_checks
from mldec.check_data.examine import co_occurrence, label_faults, split_statistics
from mldec.data.table import Labels, from_dense, from_single
from mldec.data.types import Classes, Split

NAMES = ("thing 0", "thing 1", "thing 2")
DENSE = np.array([[1, 0, -1], [0, 0, 0], [1, 1, 0], [-1, 0, 0]], np.int8)


class Named:
    def __init__(self, labels: Labels) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"image {index}"


@pytest.mark.parametrize(
    ("labels", "exclusive", "fault"),
    [
        (from_dense(np.array([[1, 0, -1]], np.int8)), False, None),
        (
            from_dense(np.array([[1, 0, 0], [0, 2, 0]], np.int8)),
            False,
            "1 labels out of range, the first of image 1",
        ),
        (from_single(np.array([0, 2, 3]), 3), True, "1 labels out of range, the first of image 2"),
        (from_single(np.array([0, -1]), 3), True, "1 labels out of range, the first of image 1"),
        (from_single(np.array([0, 2]), 3), True, None),
        (
            from_dense(np.array([[1, 0, 0], [1, 1, 0]], np.int8)),
            True,
            "1 images without exactly one label, the first is image 1",
        ),
        (from_single(np.array([0]), 4), True, "labels are of 1 images and 4 classes"),
    ],
)
def test_impossible_labels(labels: Labels, exclusive: bool, fault: str | None) -> None:
    split = Split(Named(labels), Classes(NAMES, exclusive))  # type: ignore[arg-type]
    assert label_faults(split, labels) == ([fault] if fault else [])


def test_co_occurrence_is_that_of_a_loop() -> None:
    rng = np.random.default_rng(1)
    dense = rng.choice(np.array([1, 0, -1], np.int8), (50, 6))
    dense[:, 4] = 0
    classes = np.array([0, 2, 4, 5])
    fractions = co_occurrence(from_dense(dense, default=-1), classes)
    for row, one in enumerate(classes):
        for column, other in enumerate(classes):
            shown = dense[dense[:, one] == 1]
            expected = (shown[:, other] == 1).mean() if len(shown) else 0.0
            assert fractions[row, column] == pytest.approx(expected)


def test_statistics_are_those_of_a_loop() -> None:
    labels: Any = from_dense(DENSE)
    statistics = split_statistics(Split(Named(labels), Classes(NAMES)), labels)  # type: ignore[arg-type]
    per_class = Counter(NAMES[k] for row in DENSE for k, value in enumerate(row) if value == 1)
    per_image = [sum(value == 1 for value in row) for row in DENSE]
    assert statistics == {
        "images": 4,
        "classes": 3,
        "positives": sum(per_image),
        "negatives_stated": 0,  # 0 is what the entries that are not listed have
        "images_per_class": {"min": 0, "median": 1.0, "max": 2},
        "labels_per_image": {"min": 0, "mean": 0.75, "max": 2},
        "images_without_label": per_image.count(0),
        "classes_without_positive": [name for name in NAMES if name not in per_class],
    }
    partial: Any = from_dense(DENSE, default=-1)
    stated = split_statistics(Split(Named(partial), Classes(NAMES)), partial)  # type: ignore[arg-type]
    assert stated["negatives_stated"] == int((DENSE == 0).sum())


def test_several_labels_per_image_may_be_allowed() -> None:
    labels = from_dense(np.array([[1, 1, 0], [0, 0, 0]], np.int8))
    split = Split(Named(labels), Classes(NAMES, exclusive=True))  # type: ignore[arg-type]
    assert label_faults(split, labels) == [
        "2 images without exactly one label, the first is image 0"
    ]
    assert label_faults(split, labels, several=True) == []


def test_co_occurrence_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = np.random.default_rng(2).choice(np.array([1, 0], np.int8), (50, 6))
    classes = np.arange(6)
    whole = co_occurrence(from_dense(dense), classes)
    monkeypatch.setattr(label_checks, "CHUNK", 7)
    assert np.array_equal(co_occurrence(from_dense(dense), classes), whole)
