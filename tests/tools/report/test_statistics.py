"""Resampled metrics against repeated images, intervals, and what the page draws of the scores."""

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from sklearn.metrics import average_precision_score, confusion_matrix

from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.report import statistics
from mldec.report.statistics import (
    BINS,
    COARSE,
    FINE,
    MOST_PAIRED,
    STEP,
    Answers,
    average_precision,
    bin_edges,
    class_table,
    count,
    draw,
    histograms,
    interval,
    metrics,
    normalise,
    pairs_of_classes,
    resample,
)

IMAGES, CLASSES = 80, 70


def data(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return logits with many ties, and labels."""
    rng = np.random.default_rng(3)
    if kind == "single":
        labels = np.eye(CLASSES, dtype=np.int8)[rng.integers(CLASSES, size=IMAGES)]
        labels[:3] = 0
    else:
        labels = (rng.random((IMAGES, CLASSES)) < 0.4).astype(np.int8)
    if kind == "partial":
        labels[rng.random(labels.shape) < 0.3] = -1
    return np.round(rng.normal(size=labels.shape) + labels, 1).astype(np.float32), labels


def evaluator(kind: str) -> Evaluator:
    if kind == "single":
        return SingleLabelEvaluator(CLASSES, top_k=3, suffix="_real")
    made = {"several": MultiLabelEvaluator, "partial": PartialLabelEvaluator}[kind](CLASSES)
    made.logit_threshold = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
    return made


def answers_of(kind: str) -> Answers:
    logits, labels = data(kind)
    lowest = getattr(evaluator(kind), "logit_threshold", None)
    return Answers(logits=logits, labels=labels, exclusive=kind == "single", lowest=lowest)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("several", {"mAP", "CF1", "OF1"}), ("single", {"top1_real"}), ("partial", {"CF1", "OF1"})],
)
def test_whole_weights_give_the_metrics_of_repeated_images(kind: str, expected: set[str]) -> None:
    answers = answers_of(kind)
    weights = np.random.default_rng(0).integers(1, 4, (1, IMAGES, 3)).astype(np.float32)
    used = evaluator(kind)
    values = metrics(used, answers.logits, answers.labels)
    numbers = resample(values, answers, weights)
    assert numbers.resampled.keys() == expected

    for number in range(3):
        rows = np.repeat(np.arange(IMAGES), weights[0, :, number].astype(int))
        own = evaluator(kind)
        repeated = metrics(own, answers.logits[rows], answers.labels[rows])
        for name in expected:
            assert numbers.resampled[name][number] == pytest.approx(repeated[name], abs=2e-5)
        if kind != "single":
            precision = 100 * numbers.resampled_precision[number]
            assert precision == pytest.approx(own.per_class()["AP"], abs=1e-4, nan_ok=True)

    shown = numbers.with_intervals()
    assert list(shown) == list(values)
    for name, entry in shown.items():
        assert np.isfinite(entry.low) == (name in expected)


def test_a_metric_of_another_definition_has_no_interval() -> None:
    answers = answers_of("several")
    values = {"mAP": 12.0, "images seen": 80.0}
    assert resample(values, answers, draw(IMAGES, CLASSES)[:1]).resampled == {}


def one_class(images: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(images) < 0.3).astype(np.int8)
    return np.round(rng.normal(size=images) + labels, 1).astype(np.float32), labels


def test_any_weights_are_those_of_scikit_learn() -> None:
    scores, labels = one_class(200)
    labels[::9] = -1
    weights = draw(200, 1)
    values = average_precision(scores, labels, weights)
    for number in range(0, len(values), 111):
        expected = average_precision_score(
            labels[labels >= 0] == 1,
            scores[labels >= 0],
            sample_weight=weights[number // STEP, labels >= 0, number % STEP],
        )
        assert values[number] == pytest.approx(expected, abs=1e-5)


def test_a_class_without_a_positive_has_no_precision() -> None:
    values = average_precision(np.zeros(5, np.float32), np.array([0, 0, -1, 0, 0]), draw(5, 1))
    assert np.isnan(values).all()


def test_intervals_are_about_those_of_the_usual_bootstrap() -> None:
    scores, labels = one_class(600)
    low, high = interval(average_precision(scores, labels, draw(600, 1)))
    usual = bootstrap(
        (labels == 1, scores),
        average_precision_score,
        paired=True,
        vectorized=False,
        n_resamples=400,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    width = usual.high - usual.low
    assert low == pytest.approx(usual.low, abs=0.2 * width)
    assert high == pytest.approx(usual.high, abs=0.2 * width)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    # The average precision of ten thousand images stands for the truth.
    scores, labels = one_class(10_000)
    truth = average_precision_score(labels, scores)
    inside = 0
    for seed in range(200):
        low, high = interval(average_precision(*one_class(150, seed + 1), draw(150, 1)[:2]))
        inside += bool(low <= truth <= high)
    assert 0.89 <= inside / 200 <= 0.99


def test_resamples_are_always_the_same_and_fewer_of_many_pairs() -> None:
    assert np.array_equal(draw(7, 3), draw(7, 3))
    assert (draw(7, 3) > 0).all()
    assert draw(2_000, 1).mean() == pytest.approx(1, abs=0.01)
    assert count(draw(7, 3)) == statistics.MOST_RESAMPLES
    assert count(draw(7, 3_000_000_000)) == STEP
    assert count(draw(20, 10_000_000)) == 200


@pytest.mark.parametrize("kind", ["several", "single"])
def test_the_table_of_classes_has_the_values_of_the_evaluator(kind: str) -> None:
    answers = answers_of(kind)
    used = evaluator(kind)
    values = metrics(used, answers.logits, answers.labels)
    expected = used.per_class()
    if kind == "single":
        normalise(answers.logits)

    numbers = resample(values, answers, draw(IMAGES, CLASSES)[:1])
    counted = histograms(answers, bin_edges(CLASSES, answers.thresholds()))
    table = class_table(tuple(map(str, range(CLASSES))), answers, counted, numbers)

    columns = table.columns
    if kind == "single":
        shown = np.array(expected["images"]) > 0
        recall = np.array(columns["recall"])
        assert recall[shown] == pytest.approx(np.array(expected["accuracy"])[shown])
        assert columns["positives"] == expected["images"]
        assert "threshold" not in columns
    else:
        for name, own in (("AP", "AP"), ("precision",) * 2, ("recall",) * 2, ("F1", "f1")):
            assert columns[name] == pytest.approx(expected[own])
        assert columns["positives"] == expected["positives"]
        lowest = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
        assert columns["threshold"] == pytest.approx(lowest.sigmoid().tolist())

    for value, low, high in zip(columns["AP"], *table.intervals, strict=True):
        assert np.isnan(value) or low - 1e-4 <= value <= high + 1e-4

    # The calibration error is that of bins of equal width.
    scores = answers.probabilities(answers.logits[:, 0])
    bins = np.minimum((scores * BINS).astype(int), BINS - 1)
    gaps = [(answers.labels[:, 0] - scores)[bins == b].sum() for b in range(BINS)]
    assert columns["calibration error"][0] == pytest.approx(100 * np.abs(gaps).sum() / IMAGES)


def made(classes: int = 3) -> Answers:
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(300, classes))).astype(np.float32)
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


def test_many_classes_have_wider_bins_and_no_edges_of_their_own() -> None:
    few, many = bin_edges(80, np.linspace(0.1, 0.9, 80)), bin_edges(9_605, np.linspace(0, 1, 9_605))
    assert FINE < len(few) < FINE + 80 + 40
    assert COARSE < len(many) < COARSE + 40
    for edges in (few, many):
        assert (edges[0], edges[-1]) == (0, 1)
        assert (np.diff(edges) > 1e-9).all()


def test_classes_that_occur_together_are_counted() -> None:
    answers = made(classes=MOST_PAIRED + 4)
    pairs = pairs_of_classes(answers)
    positives = (answers.labels == 1).sum(0)
    left_out = set(range(MOST_PAIRED + 4)) - set(pairs.classes)
    assert max(positives[list(left_out)]) <= min(positives[pairs.classes])

    present, decided = answers.labels == 1, answers.logits > 0.2
    first, second = pairs.classes[:2]
    assert pairs.labels[0, 1] == (present[:, first] & present[:, second]).sum()
    assert pairs.predictions[0, 1] == (decided[:, first] & decided[:, second]).sum()


def test_one_label_has_a_confusion_matrix() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(5, size=200)
    logits = (rng.normal(size=(200, 5)) + 2 * np.eye(5)[truth]).astype(np.float32)
    labels = np.eye(5, dtype=np.int8)[truth]
    pairs = pairs_of_classes(Answers(logits=logits, labels=labels, exclusive=True, lowest=None))
    assert np.array_equal(pairs.predictions, confusion_matrix(truth, logits.argmax(1)))
    assert np.array_equal(pairs.labels, np.diag(np.bincount(truth)))
