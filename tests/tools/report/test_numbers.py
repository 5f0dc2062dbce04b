"""Resampled metrics against repeated images, intervals, paired tests, and scores of the page."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, confusion_matrix

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.tools.report import comparison, statistics
from mldec.tools.report.comparison import changes, compare
from mldec.tools.report.statistics import (
    BINS,
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


def answers_of(kind):
    """Return logits with many ties, and labels."""
    rng = np.random.default_rng(3)
    if kind == "single":
        labels = np.eye(CLASSES, dtype=np.int8)[rng.integers(CLASSES, size=IMAGES)]
        labels[:3] = 0
    else:
        labels = (rng.random((IMAGES, CLASSES)) < 0.4).astype(np.int8)
    if kind == "partial":
        labels[rng.random(labels.shape) < 0.3] = -1
    logits = np.round(rng.normal(size=labels.shape) + labels, 1).astype(np.float32)
    lowest = getattr(evaluator(kind), "logit_threshold", None)
    return Answers(logits=logits, labels=labels, exclusive=kind == "single", lowest=lowest)


def evaluator(kind):
    if kind == "single":
        return SingleLabelEvaluator(CLASSES, top_k=3, suffix="_real")
    made = {"several": MultiLabelEvaluator, "partial": PartialLabelEvaluator}[kind](CLASSES)
    made.logit_threshold = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
    return made


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("several", {"mAP", "mAP_skip_empty", "CF1", "OF1"}),
        ("single", {"top1_real"}),
        ("partial", {"CF1", "OF1"}),
    ],
)
def test_whole_weights_give_the_metrics_of_repeated_images(kind, expected):
    answers = answers_of(kind)
    if kind == "several":
        answers.labels[:, 7] = 0
    weights = np.random.default_rng(0).integers(1, 4, (1, IMAGES, 3)).astype(np.float32)
    values = metrics(evaluator(kind), answers.logits, answers.labels)
    numbers = resample({**values, "CP": 12.0}, answers, weights)
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
    for name, entry in numbers.with_intervals().items():
        assert np.isfinite(entry.low) == (name in expected)

    # A metric that has another value under this name is defined otherwise.
    other = dict.fromkeys(values, 12.0)
    assert resample(other, answers, weights).resampled == {}


def one_class(images, seed=0):
    rng = np.random.default_rng(seed)
    labels = (rng.random(images) < 0.3).astype(np.int8)
    return np.round(rng.normal(size=images) + labels, 1).astype(np.float32), labels


def test_average_precision_with_weights_is_that_of_scikit_learn():
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
    assert np.isnan(average_precision(scores, np.minimum(labels, 0), weights)).all()


def test_intervals_hold_the_truth():
    # The average precision of ten thousand images stands for the truth.
    truth = average_precision_score(*one_class(10_000)[::-1])
    inside = 0
    for seed in range(200):
        low, high = interval(average_precision(*one_class(150, seed + 1), draw(150, 1)[:2]))
        inside += bool(low <= truth <= high)
    assert 0.89 <= inside / 200 <= 0.99


def test_resamples_are_always_the_same_and_fewer_of_many_pairs():
    assert np.array_equal(draw(7, 3), draw(7, 3))
    assert (draw(7, 3) > 0).all()
    assert draw(2_000, 1).mean() == pytest.approx(1, abs=0.01)
    assert count(draw(7, 3)) == statistics.MOST_RESAMPLES
    assert count(draw(7, 3_000_000_000)) == STEP
    assert count(draw(20, 10_000_000)) == 200
    assert interval(np.arange(1001.0)) == (25, 975)


@pytest.mark.parametrize("kind", ["several", "single"])
def test_the_table_of_classes_has_the_values_of_the_evaluator(kind):
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


def made(classes=3):
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(300, classes))).astype(np.float32)
    logits[:40] = 0
    labels = rng.integers(-1, 2, logits.shape).astype(np.int8)
    return Answers(logits=logits, labels=labels, exclusive=False, lowest=0.2)


def test_counts_at_an_edge_are_exact():
    answers = made()
    edges = bin_edges(3, np.array([0.123456, 0.7]))
    counted = histograms(answers, edges)
    scores = answers.probabilities(answers.logits)
    assert (scores == 0.5).any()
    for k in range(3):
        for edge in (0.123456, 0.7, 0.005, 0.5):
            place = np.flatnonzero(np.isclose(edges, edge))[0]
            above = scores[:, k] >= edge
            assert counted.positives[k, place:].sum() == (above & (answers.labels[:, k] == 1)).sum()
            assert counted.negatives[k, place:].sum() == (above & (answers.labels[:, k] == 0)).sum()


def test_pairs_of_classes_and_confusions_are_counted():
    answers = made(classes=MOST_PAIRED + 4)
    pairs = pairs_of_classes(answers)
    positives = (answers.labels == 1).sum(0)
    left_out = set(range(MOST_PAIRED + 4)) - set(pairs.classes)
    assert max(positives[list(left_out)]) <= min(positives[pairs.classes])
    present, decided = answers.labels == 1, answers.logits > 0.2
    first, second = pairs.classes[:2]
    assert pairs.labels[0, 1] == (present[:, first] & present[:, second]).sum()
    assert pairs.predictions[0, 1] == (decided[:, first] & decided[:, second]).sum()

    rng = np.random.default_rng(0)
    truth = rng.integers(5, size=200)
    logits = (rng.normal(size=(200, 5)) + 2 * np.eye(5)[truth]).astype(np.float32)
    labels = np.eye(5, dtype=np.int8)[truth]
    pairs = pairs_of_classes(Answers(logits=logits, labels=labels, exclusive=True, lowest=None))
    assert np.array_equal(pairs.predictions, confusion_matrix(truth, logits.argmax(1)))
    assert np.array_equal(pairs.labels, np.diag(np.bincount(truth)))


# ------------------------------------------------------------------------------------- two models


def two_models(images, classes, *, better=0.0, seed=0):
    """Return two models that differ by noise, the first one better by so much."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, classes)) < 0.3).astype(np.int8)
    common = rng.normal(size=labels.shape) + labels
    models = []
    for gain in (better, 0.0):
        logits = (common + gain * labels + 0.7 * rng.normal(size=labels.shape)).astype(np.float32)
        lowest = 0.4 * gain
        models.append(Answers(logits=logits, labels=labels, exclusive=False, lowest=lowest))
    return models


def numbers_of(answers, weights):
    evaluator = MultiLabelEvaluator(answers.labels.shape[1])
    return resample(metrics(evaluator, answers.logits, answers.labels), answers, weights)


@pytest.mark.parametrize("most", [10, 10_000])
def test_pairs_that_changed_sides_are_found(most, monkeypatch):
    monkeypatch.setattr(comparison, "MOST_CHANGED", most)
    first, second = two_models(101, 70, better=1)
    first.labels[::7, ::3] = -1
    surest, num_fixed, num_broken = changes(first, second)

    expected = {}
    for row, k in np.argwhere(first.labels >= 0):
        present = first.labels[row, k] == 1
        right = (first.logits[row, k] > 0.4) == present
        if right != ((second.logits[row, k] > 0) == present):
            scores = [float(own.probabilities(own.logits[row, k])) for own in (first, second)]
            expected[row, k] = (present, *scores, right)

    fixed = [pair for pair in expected if expected[pair][3]]
    assert (num_fixed, num_broken) == (len(fixed), len(expected) - len(fixed))
    assert len(surest) == min(most, len(expected))
    for change in surest:
        present, score, other_score, right = expected[change.row, change.class_index]
        assert (change.present, change.fixed) == (present, right)
        assert change.score == pytest.approx(score, abs=1e-3)
        assert change.other_score == pytest.approx(other_score, abs=1e-6)
    gaps = [abs(change.score - change.other_score) for change in surest]
    assert gaps == sorted(gaps, reverse=True)


def test_paired_intervals_are_narrower_and_tell_a_real_difference():
    weights = draw(200, 6)[:2]
    models = two_models(200, 6)
    first, second = (numbers_of(answers, weights) for answers in models)
    result = compare("b.pt", models[0], first, models[1], second)
    own, other, gap = result.metrics["mAP"]
    assert gap.value == pytest.approx(own.value - other.value)
    assert gap.low < gap.value < gap.high
    unpaired = np.hypot(own.high - own.low, other.high - other.low)
    assert gap.high - gap.low < 0.9 * unpaired
    gaps = 100 * (first.precision - second.precision)
    for row, difference in zip(result.per_class, gaps, strict=True):
        assert row.value == pytest.approx(difference)
        assert row.low < row.value < row.high
    assert compare("a.pt", models[0], first, models[0], first).p_value == 1

    models = two_models(200, 6, better=0.6)
    first, second = (numbers_of(answers, weights) for answers in models)
    result = compare("b.pt", models[0], first, models[1], second)
    assert result.p_value == pytest.approx(2 / 201)
    assert "200 resamples" in result.test
    assert "at least 0.010" in result.test
