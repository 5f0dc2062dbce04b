import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from mldec.calibration.fitting import BINS
from mldec.report.answers import Answers, normalise
from mldec.report.histograms import (
    COARSE,
    FINE,
    SHOWN,
    bin_edges,
    calibration_errors,
    co_occurrence,
    histograms,
)


def made(classes: int = 3, images: int = 300) -> Answers:
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(images, classes))).astype(np.float32)
    labels = rng.integers(-1, 2, logits.shape).astype(np.int8)
    return Answers(logits=logits, labels=labels, exclusive=False, lowest=0.2)


def test_counts_at_an_edge_are_exact() -> None:
    answers = made()
    edges = bin_edges(3, np.array([0.123456, 0.7]))
    counted = histograms(answers, edges)
    scores = answers.probabilities(answers.logits)
    for k in range(3):
        for edge in (0.123456, 0.7, 0.005, 0.5):
            place = np.flatnonzero(np.isclose(edges, edge))[0]
            above = scores[:, k] >= edge
            assert counted.positives[k, place:].sum() == (above & (answers.labels[:, k] == 1)).sum()
            assert counted.negatives[k, place:].sum() == (above & (answers.labels[:, k] == 0)).sum()
        annotated = answers.labels[:, k] >= 0
        assert counted.score_sums[k].sum() == pytest.approx(scores[annotated, k].sum())


def test_saturated_scores_are_in_the_first_and_the_last_bin() -> None:
    logits = np.array([[-200.0], [200.0]], np.float32)
    labels = np.array([[0], [1]], np.int8)
    answers = Answers(logits=logits, labels=labels, exclusive=False, lowest=0.0)
    counted = histograms(answers, bin_edges(1, None))
    assert (counted.negatives[0, 0], counted.positives[0, -1]) == (1, 1)


def test_many_classes_have_wider_bins_and_no_edges_of_their_own() -> None:
    few, many = bin_edges(80, np.linspace(0.1, 0.9, 80)), bin_edges(9_605, np.linspace(0, 1, 9_605))
    assert FINE < len(few) < FINE + 80 + 40
    assert COARSE < len(many) < COARSE + 40
    for edges in (few, many):
        assert (edges[0], edges[-1]) == (0, 1)
        assert (np.diff(edges) > 1e-9).all()


def test_the_calibration_error_is_that_of_bins_of_equal_width() -> None:
    answers = made()
    answers.labels[:, 2] = -1
    errors = calibration_errors(histograms(answers, bin_edges(3, np.array([0.31]))))
    assert np.isnan(errors[2])
    for k in range(2):
        annotated = answers.labels[:, k] >= 0
        scores = answers.probabilities(answers.logits[annotated, k])
        present = answers.labels[annotated, k] == 1
        bins = np.minimum((scores * BINS).astype(int), BINS - 1)
        gaps = [present[bins == b].sum() - scores[bins == b].sum() for b in range(BINS)]
        assert errors[k] == pytest.approx(np.abs(gaps).sum() / annotated.sum())


def test_classes_that_occur_together_are_counted() -> None:
    matrix = co_occurrence(made(classes=SHOWN + 4))
    answers = made(classes=SHOWN + 4)
    positives = (answers.labels == 1).sum(0)
    assert matrix.classes == sorted(matrix.classes)
    left_out = set(range(SHOWN + 4)) - set(matrix.classes)
    assert max(positives[list(left_out)]) <= min(positives[matrix.classes])

    present, decided = answers.labels == 1, answers.logits > 0.2
    for row, first in enumerate(matrix.classes[:5]):
        for column, second in enumerate(matrix.classes[:5]):
            assert matrix.labels[row, column] == (present[:, first] & present[:, second]).sum()
            assert matrix.predictions[row, column] == (decided[:, first] & decided[:, second]).sum()


def test_one_label_has_a_confusion_matrix() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(5, size=200)
    logits = (rng.normal(size=(200, 5)) + 2 * np.eye(5)[truth]).astype(np.float32)
    labels = np.eye(5, dtype=np.int8)[truth]
    normalise(logits)
    matrix = co_occurrence(Answers(logits=logits, labels=labels, exclusive=True, lowest=None))
    assert np.array_equal(matrix.predictions, confusion_matrix(truth, logits.argmax(1)))
    assert np.array_equal(matrix.labels, np.diag(np.bincount(truth)))
