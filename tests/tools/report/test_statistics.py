"""Resampled metrics, intervals, paired tests and histograms of a report."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, confusion_matrix

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.tools.report import comparison, statistics
from mldec.tools.report.comparison import changed_decisions, compare
from mldec.tools.report.statistics import (
    BLOCK,
    CALIBRATION_BINS,
    MAX_PAIRED,
    Predictions,
    bin_edges,
    bootstrap_metrics,
    bootstrap_weights,
    class_pairs,
    class_table,
    interval_bounds,
    score_histograms,
    weighted_average_precision,
    weighted_counts,
)

IMAGES, CLASSES = 80, 70


def compute_metrics(evaluator, logits, labels):
    evaluator.update(torch.from_numpy(logits), torch.from_numpy(labels))
    return evaluator.compute()


def predictions_of(kind):
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
    threshold = getattr(evaluator_of(kind), "logit_threshold", None)
    return Predictions(logits, labels, kind == "single", threshold)


def evaluator_of(kind):
    if kind == "single":
        return SingleLabelEvaluator(CLASSES, top_k=3, suffix="_real")
    if kind in ("unseen", "all", "seen"):
        images = "unseen" if kind == "unseen" else "all"
        unseen = [] if kind == "seen" else [0, 5, 7]
        return ZeroShotEvaluator(CLASSES, unseen=unseen, images=images)
    classes = {"multi": MultiLabelEvaluator, "partial": PartialLabelEvaluator}
    evaluator = classes[kind](CLASSES)
    evaluator.logit_threshold = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
    return evaluator


def unit_counts(predictions):
    [counts] = weighted_counts(predictions, np.ones((1, len(predictions.labels), 1), np.float32))
    return counts


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("multi", {"mAP", "mAP_skip_empty", "CF1", "OF1"}),
        ("single", {"top1_real"}),
        ("partial", {"mAP_partial", "CF1", "OF1"}),
        ("unseen", {"zsl_mAP"}),
        ("all", {"zsl_mAP", "gzsl_mAP", "gzsl_mAP_skip_empty", "gzsl_CF1", "gzsl_OF1"}),
        ("seen", {"gzsl_mAP", "gzsl_mAP_skip_empty", "gzsl_CF1", "gzsl_OF1"}),
    ],
)
def test_integer_weights_equal_repeated_images(kind, expected):
    predictions = predictions_of(kind)
    if kind != "single":
        predictions.labels[:, 7] = 0
    weights = np.random.default_rng(0).integers(1, 4, (1, IMAGES, 3)).astype(np.float32)
    own = evaluator_of(kind)
    values = compute_metrics(own, predictions.logits, predictions.labels)
    result = bootstrap_metrics({**values, "CP": 12.0}, predictions, weights, own)
    assert result.resampled.keys() == expected
    assert next(iter(values)) in expected, "the first metric always has an interval"

    for number in range(3):
        rows = np.repeat(np.arange(IMAGES), weights[0, :, number].astype(int))
        evaluator = evaluator_of(kind)
        repeated = compute_metrics(evaluator, predictions.logits[rows], predictions.labels[rows])
        for name in expected:
            assert result.resampled[name][number] == pytest.approx(repeated[name], abs=2e-5)
        if kind in ("multi", "all", "seen"):
            class_ap = 100 * result.resampled_ap[number]
            assert class_ap == pytest.approx(evaluator.per_class()["AP"], abs=1e-4, nan_ok=True)
    for name, interval in result.with_intervals().items():
        assert np.isfinite(interval.low) == (name in expected)

    # Metrics with other values have another definition, and no intervals.
    other = dict.fromkeys(values, 12.0)
    assert bootstrap_metrics(other, predictions, weights, own).resampled == {}


def one_class(images, seed=0):
    rng = np.random.default_rng(seed)
    labels = (rng.random(images) < 0.3).astype(np.int8)
    return np.round(rng.normal(size=images) + labels, 1).astype(np.float32), labels


def test_weighted_average_precision_equals_scikit_learn():
    scores, labels = one_class(200)
    labels[::9] = -1
    weights = bootstrap_weights(200, 1)
    values = weighted_average_precision(scores, labels, weights)
    for number in range(0, len(values), 111):
        expected = average_precision_score(
            labels[labels >= 0] == 1,
            scores[labels >= 0],
            sample_weight=weights[number // BLOCK, labels >= 0, number % BLOCK],
        )
        assert values[number] == pytest.approx(expected, abs=1e-5)
    no_positives = np.minimum(labels, 0)
    assert np.isnan(weighted_average_precision(scores, no_positives, weights)).all()


def test_intervals_contain_the_true_value():
    # The average precision of ten thousand images is close to the true value.
    truth = average_precision_score(*one_class(10_000)[::-1])
    inside = 0
    for seed in range(200):
        weights = bootstrap_weights(150, 1)[:2]
        values = weighted_average_precision(*one_class(150, seed + 1), weights)
        low, high = interval_bounds(values)
        inside += bool(low <= truth <= high)
    assert 0.89 <= inside / 200 <= 0.99


def test_weights_are_reproducible_and_limited_by_the_work():
    weights = bootstrap_weights(7, 3)
    assert np.array_equal(weights, bootstrap_weights(7, 3))
    assert (weights > 0).all()
    assert bootstrap_weights(2_000, 1).mean() == pytest.approx(1, abs=0.01)
    assert len(weights) == statistics.MAX_RESAMPLES // BLOCK
    assert len(bootstrap_weights(7, 3_000_000_000)) == 1
    assert len(bootstrap_weights(20, 10_000_000)) == 2
    assert interval_bounds(np.arange(1001.0)).tolist() == [25, 975]


@pytest.mark.parametrize("kind", ["multi", "single"])
def test_class_table_equals_the_evaluator(kind):
    predictions = predictions_of(kind)
    evaluator = evaluator_of(kind)
    values = compute_metrics(evaluator, predictions.logits, predictions.labels)
    expected = evaluator.per_class()
    if kind == "single":
        predictions.logits[:] = torch.from_numpy(predictions.logits).log_softmax(1)

    weights = bootstrap_weights(IMAGES, CLASSES)[:1]
    resampled = bootstrap_metrics(values, predictions, weights, evaluator)
    thresholds = predictions.thresholds()
    histograms = score_histograms(predictions, bin_edges(CLASSES, thresholds))
    names = tuple(map(str, range(CLASSES)))
    table = class_table(names, unit_counts(predictions), thresholds, histograms, resampled)

    columns = table.columns
    if kind == "single":
        has_images = np.array(expected["images"]) > 0
        recall = np.array(columns["recall"])
        assert recall[has_images] == pytest.approx(np.array(expected["accuracy"])[has_images])
        assert columns["positives"] == expected["images"]
        assert "threshold" not in columns
    else:
        for name in ("AP", "precision", "recall", "f1"):
            assert columns[name] == pytest.approx(expected[name])
        assert columns["positives"] == expected["positives"]
        logits = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
        assert columns["threshold"] == pytest.approx(logits.sigmoid().tolist())

    ap = np.array(columns["AP"])
    low, high = np.array(table.intervals)
    assert (np.isnan(ap) | ((low - 1e-4 <= ap) & (ap <= high + 1e-4))).all()
    ranked = np.argsort(ap, kind="stable")
    assert table.weakest(3) == ranked[:3].tolist()
    assert len(table.weakest(100)) == np.isfinite(ap).sum()

    # The calibration error uses bins of equal width.
    scores = predictions.probabilities(predictions.logits[:, 0])
    bins = np.minimum((scores * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, predictions.labels[:, 0] - scores)
    assert columns["calibration error"][0] == pytest.approx(100 * np.abs(gaps).sum() / IMAGES)


def random_predictions(classes=3):
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(300, classes))).astype(np.float32)
    logits[:40] = 0
    labels = rng.integers(-1, 2, logits.shape).astype(np.int8)
    return Predictions(logits, labels, exclusive=False, logit_threshold=0.2)


def test_histogram_counts_are_exact_at_edges():
    predictions = random_predictions()
    edges = bin_edges(3, np.array([0.123456, 0.7]))
    histograms = score_histograms(predictions, edges)
    scores = predictions.probabilities(predictions.logits)
    assert (scores == 0.5).any()
    for edge in (0.123456, 0.7, 0.005, 0.5):
        place = np.flatnonzero(np.isclose(edges, edge))[0]
        above = scores >= edge
        positives = (above & (predictions.labels == 1)).sum(0)
        negatives = (above & (predictions.labels == 0)).sum(0)
        assert histograms.positives[:, place:].sum(1).tolist() == positives.tolist()
        assert histograms.negatives[:, place:].sum(1).tolist() == negatives.tolist()


def test_class_pairs_count_images_with_both_classes():
    predictions = random_predictions(classes=MAX_PAIRED + 4)
    pairs = class_pairs(predictions, unit_counts(predictions))
    present = predictions.labels == 1
    decided = predictions.logits > 0.2
    positives = present.sum(0)
    others = set(range(MAX_PAIRED + 4)) - set(pairs.classes)
    assert max(positives[list(others)]) <= min(positives[pairs.classes])

    # Only the images with annotations of both classes count.
    for row, first in enumerate(pairs.classes):
        for column, second in enumerate(pairs.classes):
            known = (predictions.labels[:, [first, second]] >= 0).all(1)
            for values, both, single in (
                (present[known], pairs.labels, pairs.labeled),
                (decided[known], pairs.predictions, pairs.predicted),
            ):
                assert both[row, column] == (values[:, first] & values[:, second]).sum()
                assert single[row, column] == values[:, first].sum()


def test_confusion_matrix_equals_scikit_learn():
    rng = np.random.default_rng(0)
    truth = rng.integers(5, size=200)
    logits = (rng.normal(size=(200, 5)) + 2 * np.eye(5)[truth]).astype(np.float32)
    predictions = Predictions(logits, np.eye(5, dtype=np.int8)[truth], True, None)
    pairs = class_pairs(predictions, unit_counts(predictions))
    assert np.array_equal(pairs.predictions, confusion_matrix(truth, logits.argmax(1)))
    assert np.array_equal(pairs.labels, np.diag(np.bincount(truth)))


def two_models(images, classes, *, better=0.0):
    """Return two models with different noise; `better` is the advantage of the first model."""
    rng = np.random.default_rng(0)
    labels = (rng.random((images, classes)) < 0.3).astype(np.int8)
    common = rng.normal(size=labels.shape) + labels
    models = []
    for gain in (better, 0.0):
        logits = (common + gain * labels + 0.7 * rng.normal(size=labels.shape)).astype(np.float32)
        models.append(Predictions(logits, labels, exclusive=False, logit_threshold=0.4 * gain))
    return models


def resampled_metrics(predictions, weights):
    evaluator = MultiLabelEvaluator(predictions.labels.shape[1])
    metrics = compute_metrics(evaluator, predictions.logits, predictions.labels)
    return bootstrap_metrics(metrics, predictions, weights, evaluator)


@pytest.mark.parametrize("most", [10, 10_000])
def test_changed_decisions_equal_loops(most, monkeypatch):
    monkeypatch.setattr(comparison, "MAX_CHANGES", most)
    first, second = two_models(101, 70, better=1)
    first.labels[::7, ::3] = -1
    changed, num_fixed, num_broken = changed_decisions(first, second)

    expected = {}
    for row, k in np.argwhere(first.labels >= 0):
        present = first.labels[row, k] == 1
        right = (first.logits[row, k] > 0.4) == present
        if right != ((second.logits[row, k] > 0) == present):
            score = float(first.probabilities(first.logits[row, k]))
            other_score = float(second.probabilities(second.logits[row, k]))
            expected[row, k] = (present, right, score, other_score)

    right = [entry[1] for entry in expected.values()]
    assert (num_fixed, num_broken) == (sum(right), len(right) - sum(right))
    assert len(changed) == min(most, num_fixed) + min(most, num_broken)
    for change in changed:
        present, right, score, other_score = expected[change.row, change.class_index]
        assert (change.present, change.fixed) == (present, right)
        assert (change.score, change.other_score) == pytest.approx((score, other_score), abs=1e-6)
    for fixed in (True, False):
        gaps = [abs(one.score - one.other_score) for one in changed if one.fixed == fixed]
        assert gaps == sorted(gaps, reverse=True)


def test_changed_decisions_of_single_label_images_are_about_their_label():
    labels = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 0]], np.int8)
    predicted = [([0, 0, 1, 0], [1, 0, 2, 1])]  # right or wrong: A only, none, no label, both
    first, second = (
        Predictions(np.log(0.1 + 0.7 * np.eye(3, dtype=np.float32)[rows]), labels, True, None)
        for rows in predicted[0]
    )
    [change], fixed, broken = changed_decisions(first, second)
    assert (fixed, broken, change.row, change.class_index) == (1, 0, 0, 0)
    assert (change.score, change.other_score) == pytest.approx((0.8, 0.1))


def test_paired_intervals_are_narrower_and_detect_a_difference():
    weights = bootstrap_weights(200, 6)[:2]
    models = two_models(200, 6)
    first, second = (resampled_metrics(model, weights) for model in models)
    result = compare("b.pt", models[0], first, models[1], second)
    own, other, gap = result.metrics["mAP"]
    assert gap.value == pytest.approx(own.value - other.value)
    assert gap.low < gap.value < gap.high
    unpaired = np.hypot(own.high - own.low, other.high - other.low)
    assert gap.high - gap.low < 0.9 * unpaired
    values, low, high = result.per_class
    assert values == pytest.approx(100 * (first.class_ap - second.class_ap))
    assert (low < values).all()
    assert (values < high).all()
    assert compare("a.pt", models[0], first, models[0], first).p_value == 1

    models = two_models(200, 6, better=0.6)
    first, second = (resampled_metrics(model, weights) for model in models)
    result = compare("b.pt", models[0], first, models[1], second)
    assert result.p_value == pytest.approx(2 / 201)
    content = result.to_json(tuple("abcdef"))
    assert (content["metric"], content["p_value"]) == ("mAP", result.p_value)
    _, _, gap = result.metrics["mAP"]
    found = content["metrics"]["mAP"]
    assert (found["difference"], found["low"], found["high"]) == (gap.value, gap.low, gap.high)
    assert found["value"] - found["other"] == pytest.approx(gap.value)
    assert list(content["per_class"]["b"].values()) == result.per_class[:, 1].tolist()
