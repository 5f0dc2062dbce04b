"""The metrics of several labels against scikit-learn and against counting."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from mldec.errors import ConfigError, DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator, top_k

KEYS = ["CP", "CR", "CF1", "CF1_mean", "OP", "OR", "OF1"]


def predictions(rows=120, classes=9, levels=None, unknown=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = (
        torch.rand(rows, classes, generator=generator) < torch.linspace(0.05, 0.6, classes)
    ).to(torch.int8)
    logits = 1.5 * torch.randn(rows, classes, generator=generator) + 2 * targets - 1
    if levels:
        logits = (logits * levels / 6).round()
    targets[torch.rand(rows, classes, generator=generator) < unknown] = -1
    return logits, targets


def evaluated(logits, targets, size=50, **options):
    evaluator = MultiLabelEvaluator(logits.shape[1], **options)
    for block, labels in zip(logits.split(size), targets.split(size), strict=True):
        evaluator.update(block, labels)
    return evaluator, evaluator.compute()


def highest(row, k):
    """The classes of the k highest logits, the lower class first among equals."""
    return set(sorted(range(len(row)), key=lambda c: (-row[c], c))[:k])


def decide(logits, *, threshold=None, k=None):
    rows = logits.tolist()
    if k is not None:
        return [[c in highest(row, k) for c in range(len(row))] for row in rows]
    return [[1 / (1 + math.exp(-x)) > threshold for x in row] for row in rows]


def naive(decided, targets):
    """All seven means by counting, a class or a sum without a denominator being 0."""

    def share(part, whole):
        return part / whole if whole else 0.0

    def harmonic(a, b):
        return 2 * a * b / (a + b) if a + b else 0.0

    counts = []
    for c in range(len(decided[0])):
        pairs = [
            (row[c], labels[c])
            for row, labels in zip(decided, targets.tolist(), strict=True)
            if labels[c] != -1
        ]
        counts.append(
            (sum(d and y for d, y in pairs), sum(d for d, _ in pairs), sum(y for _, y in pairs))
        )
    precision = [share(hits, predicted) for hits, predicted, _ in counts]
    recall = [share(hits, positives) for hits, _, positives in counts]
    f1 = [harmonic(p, r) for p, r in zip(precision, recall, strict=True)]
    cp, cr = np.mean(precision), np.mean(recall)
    hits, predicted, positives = (sum(column) for column in zip(*counts, strict=True))
    op, recall_overall = share(hits, predicted), share(hits, positives)
    means = (
        cp,
        cr,
        harmonic(cp, cr),
        np.mean(f1),
        op,
        recall_overall,
        harmonic(op, recall_overall),
    )
    return {
        "means": [100 * mean for mean in means],
        "precision": [100 * p for p in precision],
        "recall": [100 * r for r in recall],
        "f1": [100 * f for f in f1],
        "positives": [positives for _, _, positives in counts],
    }


# Means


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.97])
@pytest.mark.parametrize(("unknown", "levels"), [(0.0, None), (0.4, 4)])
def test_means_at_a_threshold_are_those_of_counting(threshold, unknown, levels):
    logits, targets = predictions(levels=levels, unknown=unknown)
    _, metrics = evaluated(logits, targets, threshold=threshold)
    expected = naive(decide(logits, threshold=threshold), targets)
    assert [metrics[key] for key in KEYS] == pytest.approx(expected["means"], rel=1e-9)


@pytest.mark.parametrize("k", [1, 3, 8, 20])
@pytest.mark.parametrize(("unknown", "levels"), [(0.0, None), (0.4, 4)])
def test_means_at_top_k_are_those_of_counting(k, unknown, levels):
    logits, targets = predictions(levels=levels, unknown=unknown)
    _, metrics = evaluated(logits, targets, top_k=k)
    expected = naive(decide(logits, k=k), targets)
    assert [metrics[f"{key}@{k}"] for key in KEYS] == pytest.approx(expected["means"], rel=1e-9)


def test_nothing_predicted_and_nothing_to_find_are_0_not_an_error():
    logits, targets = torch.full((4, 3), -9.0), torch.tensor([[1, 0, 0]] * 4)
    _, metrics = evaluated(logits, targets)
    assert [metrics[key] for key in KEYS] == [0] * 7
    _, metrics = evaluated(logits + 18, 0 * targets)
    assert [metrics[key] for key in KEYS] == [0] * 7


def test_perfect_predictions_are_100_under_these_names():
    targets = torch.eye(3, dtype=torch.int8).repeat(4, 1)
    _, metrics = evaluated(20.0 * targets - 10, targets, top_k=1)
    means = ["mAP", "mAP_skip_empty", "mAP_interpolated", "mAP_11point"]
    assert list(metrics) == [*means, *KEYS, *(f"{key}@1" for key in KEYS)]
    assert set(metrics.values()) == {100.0}
    json.dumps(metrics, allow_nan=False)


# Deciding


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.97])
def test_a_probability_above_the_threshold_is_predicted(threshold):
    edge = math.log(threshold / (1 - threshold))
    logits = torch.tensor([[edge + 1e-4, edge - 1e-4, edge if threshold == 0.5 else -9]])
    evaluator, _ = evaluated(logits, torch.ones(1, 3, dtype=torch.int8), threshold=threshold)
    assert evaluator.per_class()["recall"] == [100, 0, 0]


@pytest.mark.parametrize("levels", [None, 1, 8])
@pytest.mark.parametrize("k", [1, 3, 9, 100])
def test_top_k_takes_the_lower_class_first_among_equals(k, levels):
    logits, _ = predictions(60, levels=levels)
    for row, mask in zip(logits.tolist(), top_k(logits, k), strict=True):
        assert set(mask.nonzero().flatten().tolist()) == highest(row, k)


# mAP


def test_a_class_without_a_positive_counts_as_0_or_is_skipped():
    logits, targets = predictions()
    keep = [k for k in range(9) if k not in (2, 6)]
    targets[:, 2] = 0
    targets[:, 6] = -1
    _, metrics = evaluated(logits, targets)
    _, without = evaluated(logits[:, keep], targets[:, keep])
    assert metrics["mAP_skip_empty"] == pytest.approx(without["mAP"], rel=1e-12)
    for name in ("mAP", "mAP_interpolated", "mAP_11point"):
        assert metrics[name] == pytest.approx(without[name] * 7 / 9, rel=1e-12)


def test_skip_empty_changes_the_order_of_the_metrics_only():
    logits, targets = predictions()
    targets[:, 2] = 0
    _, metrics = evaluated(logits, targets)
    _, reordered = evaluated(logits, targets, skip_empty=True)
    assert list(reordered)[:2] == ["mAP_skip_empty", "mAP"]
    assert reordered == metrics

    # Without any positive the mean does not exist.
    _, empty = evaluated(logits, torch.zeros_like(targets), skip_empty=True)
    assert next(iter(empty)) == "mAP"


def test_nothing_depends_on_the_batches_the_order_or_the_format():
    logits, targets = predictions(levels=6, unknown=0.2)
    evaluator, metrics = evaluated(logits, targets, size=len(logits))
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(3))
    shuffled, again = evaluated(logits[order].double(), targets[order].float(), size=7)
    assert again == metrics
    assert shuffled.per_class() == evaluator.per_class()
    short = logits.bfloat16()
    assert evaluated(short, targets)[1] == evaluated(short.float(), targets)[1]


# Per class


@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_per_class_has_a_row_a_class_in_percent(unknown):
    logits, targets = predictions(unknown=unknown)
    evaluator, metrics = evaluated(logits, targets, threshold=0.7)
    rows = evaluator.per_class()
    assert list(rows) == ["AP", "precision", "recall", "f1", "positives"]
    expected = naive(decide(logits, threshold=0.7), targets)
    for name in ("precision", "recall", "f1", "positives"):
        assert rows[name] == pytest.approx(expected[name], rel=1e-9)
    for k, value in enumerate(rows["AP"]):
        known = targets[:, k] >= 0
        reference = average_precision_score(targets[known, k].numpy(), logits[known, k].numpy())
        assert value == pytest.approx(100 * reference, rel=1e-9)
    assert np.mean(rows["AP"]) == pytest.approx(metrics["mAP"], rel=1e-12)


# Errors


def test_a_score_that_is_not_a_number_is_refused():
    logits, targets = predictions()
    logits[3, 4] = math.nan
    with pytest.raises(DataError, match="not finite"):
        evaluated(logits, targets)


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": 1.0}])
def test_a_wrong_setting_is_one_line_with_its_name_and_value(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=f"{name} .*{value}"):
        MultiLabelEvaluator(5, **options)
