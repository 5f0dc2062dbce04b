from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mldec import report
from mldec.data.base import Classes, Split
from mldec.report import facts
from mldec.report.subject import Subject, prepare


@pytest.fixture(scope="module")
def subject(digits_run: Path) -> Subject:
    words = [str(digits_run), "--plugin", "patches", "data.val_images=20", "--out", "r.html"]
    return prepare(report.parser().parse_intermixed_args(words))


def with_classes(subject: Subject, classes: Classes) -> Subject:
    split = Split(subject.data.val.dataset, classes)
    return replace(subject, data=replace(subject.data, load_val=lambda: split))


def test_the_summary_counts_what_was_scored(subject: Subject) -> None:
    labels = np.array([[1, 0, -1], [1, 1, 0]], np.int8)
    summary = dict(facts.summary(subject, labels, 3))
    assert summary["Validation images"] == "2, and 3 that cannot be read"
    assert (summary["Classes"], summary["Positive labels"]) == ("3", "3")
    assert summary["Image size"] == "64 pixels"
    count = sum(tensor.numel() for tensor in subject.loaded.model.parameters())
    assert summary["Parameters"] == f"{count:,}"
    assert dict(facts.summary(subject, labels, 0))["Validation images"] == "2"


def test_the_notes_say_what_was_sampled(subject: Subject) -> None:
    notes = " ".join(facts.notes(subject, 300, 10))
    assert "300 resamples" in notes
    assert "the checkpoint is not calibrated" in notes
    assert "data.threshold" in notes
    assert "Of each class the 3 surest images" in notes
    assert "matrix" not in notes

    many = with_classes(subject, Classes(tuple(map(str, range(400)))))
    notes = " ".join(facts.notes(many, 300, 100))
    assert "Of 100 of the 400 classes" in notes
    assert "The matrix shows the 30 classes with the most images." in notes

    one = with_classes(subject, Classes(tuple(map(str, range(400))), exclusive=True))
    notes = " ".join(facts.notes(one, 300, 100))
    assert "Suspected labels are looked for only if images have several labels." in notes
    assert "The matrix shows the 30 classes with the most mistakes." in notes
