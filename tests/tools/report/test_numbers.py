"""Resampled metrics against repeated images, intervals, paired tests, and scores of the page."""

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from sklearn.metrics import average_precision_score, confusion_matrix

from mldec.evaluators import Evaluator
from mldec.evaluators.metrics import meaning
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.report import comparison, statistics
from mldec.report.comparison import changes, compare, p_value
from mldec.report.statistics import (
    BINS,
    MOST_PAIRED,
    STEP,
    Answers,
    Numbers,
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


def answers_of(kind: str) -> Answers:
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


def evaluator(kind: str) -> Evaluator:
    if kind == "single":
        return SingleLabelEvaluator(CLASSES, top_k=3, suffix="_real")
    made = {"several": MultiLabelEvaluator, "partial": PartialLabelEvaluator}[kind](CLASSES)
    made.logit_threshold = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
    return made


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("several", {"mAP", "CF1", "OF1"}), ("single", {"top1_real"}), ("partial", {"CF1", "OF1"})],
)
def test_whole_weights_give_the_metrics_of_repeated_images(kind: str, expected: set[str]) -> None:
    answers = answers_of(kind)
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


def one_class(images: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(images) < 0.3).astype(np.int8)
    return np.round(rng.normal(size=images) + labels, 1).astype(np.float32), labels


def test_average_precision_with_weights_is_that_of_scikit_learn() -> None:
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


def test_intervals_are_about_those_of_the_usual_bootstrap_and_hold_the_truth() -> None:
    scores, labels = one_class(600)
    low, high = interval(average_precision(scores, labels, draw(600, 1)))
    usual = bootstrap(
        (labels == 1, scores),
        average_precision_score,
        paired=True,
        vectorized=False,
        n_resamples=200,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    width = usual.high - usual.low
    assert low == pytest.approx(usual.low, abs=0.2 * width)
    assert high == pytest.approx(usual.high, abs=0.2 * width)

    # The average precision of ten thousand images stands for the truth.
    truth = average_precision_score(*one_class(10_000)[::-1])
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
    assert interval(np.arange(1001.0)) == (25, 975)


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
    logits[:40] = 0
    labels = rng.integers(-1, 2, logits.shape).astype(np.int8)
    return Answers(logits=logits, labels=labels, exclusive=False, lowest=0.2)


def test_counts_at_an_edge_are_exact() -> None:
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

    # Many classes have wider bins and no edges of their own.
    for edges, most in (
        (bin_edges(80, np.linspace(0.1, 0.9, 80)), 320),
        (bin_edges(9_605, np.linspace(0, 1, 9_605)), 90),
    ):
        assert len(edges) < most
        assert (edges[0], edges[-1]) == (0, 1)
        assert (np.diff(edges) > 1e-9).all()


def test_pairs_of_classes_and_confusions_are_counted() -> None:
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


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("mAP_skip_empty", "mAP without the classes"),
        ("OF1@3", "Harmonic mean of OP and OR, if the 3 highest scores of an image are predicted"),
        ("zsl_all_F1@5", "Harmonic mean of P and R, among the classes that training did not see,"),
        ("classes_valid", "A number"),
        ("my_own", ""),
    ],
)
def test_a_metric_has_a_meaning(name: str, start: str) -> None:
    assert meaning(name).startswith(start)
    assert bool(meaning(name)) == bool(start)


# ------------------------------------------------------------------------------------- two models


def two_models(images: int, classes: int, *, better: float = 0.0, seed: int = 0) -> list[Answers]:
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


def numbers_of(answers: Answers, weights: np.ndarray) -> Numbers:
    evaluator = MultiLabelEvaluator(answers.labels.shape[1])
    return resample(metrics(evaluator, answers.logits, answers.labels), answers, weights)


@pytest.mark.parametrize("most", [10, 10_000])
def test_pairs_that_changed_sides_are_found(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_image_of_one_label_changes_sides_once() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(4, size=50)
    labels = np.eye(4, dtype=np.int8)[truth]
    labels[0] = 0
    models = []
    for _ in range(2):
        logits = (rng.normal(size=labels.shape) + labels).astype(np.float32)
        normalise(logits)
        models.append(Answers(logits=logits, labels=labels, exclusive=True, lowest=None))
    right, other_right = (model.predicted == truth for model in models)
    surest, num_fixed, num_broken = changes(models[0], models[1])
    assert num_fixed == (right & ~other_right)[1:].sum()
    assert num_broken == (~right & other_right)[1:].sum()
    for change in surest:
        assert (change.class_index, change.present) == (truth[change.row], True)
        own = models[1].logits[change.row, change.class_index]
        assert change.other_score == pytest.approx(np.exp(own), abs=1e-6)


def test_paired_intervals_are_narrower_and_tell_a_real_difference() -> None:
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


def test_without_a_difference_p_values_are_spread_evenly() -> None:
    values = []
    for seed in range(200):
        weights = np.random.default_rng(seed).standard_exponential((1, 120, 100), np.float32)
        gaps = []
        for answers in two_models(120, 3, seed=seed):
            pairs = zip(answers.logits.T, answers.labels.T, strict=True)
            gaps.append(np.mean([average_precision(*pair, weights) for pair in pairs], axis=0))
        values.append(p_value(gaps[0] - gaps[1]))
    for level in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert np.mean(np.array(values) <= level) == pytest.approx(level, abs=0.1)
