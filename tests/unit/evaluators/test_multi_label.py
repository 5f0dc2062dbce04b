"""Multi-label metrics against scikit-learn and plain counting."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from mldec.evaluators.multi_label import MultiLabelEvaluator

KEYS = ["CP", "CR", "CF1", "CF1_mean", "OP", "OR", "OF1"]


def predictions(rows=120, classes=9, levels=None, unknown=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.linspace(0.05, 0.6, classes)
    targets = (torch.rand(rows, classes, generator=generator) < frequencies).to(torch.int8)
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
    """Return the classes of the k highest logits. Ties go to the lower class index."""
    return set(sorted(range(len(row)), key=lambda c: (-row[c], c))[:k])


def decide(logits, *, threshold=None, k=None):
    rows = logits.tolist()
    if k is not None:
        return [[c in highest(row, k) for c in range(len(row))] for row in rows]
    return [[1 / (1 + math.exp(-x)) > threshold for x in row] for row in rows]


def naive(decided, targets):
    """Return the metrics of `KEYS` and the columns per class by counting, in percent."""

    def share(part, whole):
        return 100 * part / whole if whole else 0.0

    def harmonic(a, b):
        return 2 * a * b / (a + b) if a + b else 0.0

    counts = np.zeros((len(decided[0]), 3))
    for row, labels in zip(decided, targets.tolist(), strict=True):
        for c, (d, y) in enumerate(zip(row, labels, strict=True)):
            if y != -1:
                counts[c] += (d and y, d, y)
    precision = [share(hits, predicted) for hits, predicted, _ in counts]
    recall = [share(hits, positives) for hits, _, positives in counts]
    f1 = [harmonic(*pair) for pair in zip(precision, recall, strict=True)]

    cp = np.mean(precision)
    cr = np.mean(recall)
    hits, predicted, positives = counts.sum(0)
    op = share(hits, predicted)
    overall = share(hits, positives)
    means = [cp, cr, harmonic(cp, cr), np.mean(f1), op, overall, harmonic(op, overall)]
    columns = {"precision": precision, "recall": recall, "f1": f1, "positives": counts[:, 2]}
    return means, columns


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.97])
@pytest.mark.parametrize(("unknown", "levels"), [(0.0, None), (0.4, 4)])
def test_metrics_at_threshold_match_counting(threshold, unknown, levels):
    logits, targets = predictions(levels=levels, unknown=unknown)
    _, metrics = evaluated(logits, targets, threshold=threshold)
    means, _ = naive(decide(logits, threshold=threshold), targets)
    assert [metrics[key] for key in KEYS] == pytest.approx(means, rel=1e-9)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize(("unknown", "levels"), [(0.0, None), (0.4, 4)])
def test_metrics_at_top_k_match_counting(k, unknown, levels):
    logits, targets = predictions(levels=levels, unknown=unknown)
    _, metrics = evaluated(logits, targets, top_k=k)
    means, columns = naive(decide(logits, k=k), targets)
    assert [metrics[f"{key}@{k}"] for key in KEYS] == pytest.approx(means, rel=1e-9)
    assert metrics[f"N+@{k}"] == np.count_nonzero(columns["recall"])


def test_metrics_without_predictions_or_positives_are_0():
    logits, targets = torch.full((4, 3), -9.0), torch.tensor([[1, 0, 0]] * 4)
    _, metrics = evaluated(logits, targets)
    assert [metrics[key] for key in KEYS] == [0] * 7
    _, metrics = evaluated(logits + 18, 0 * targets)
    assert [metrics[key] for key in KEYS] == [0] * 7


def test_metrics_of_perfect_predictions_are_100():
    targets = torch.eye(3, dtype=torch.int8).repeat(4, 1)
    _, metrics = evaluated(20.0 * targets - 10, targets, top_k=1)
    means = ["mAP", "mAP_skip_empty", "mAP_interpolated", "mAP_11point"]
    assert list(metrics) == [*means, *KEYS, *(f"{key}@1" for key in KEYS), "N+@1"]
    assert metrics.pop("N+@1") == 3
    assert set(metrics.values()) == {100.0}
    json.dumps(metrics, allow_nan=False)


def test_class_without_positives_counts_as_0_or_is_skipped():
    logits, targets = predictions()
    keep = [k for k in range(9) if k not in (2, 6)]
    targets[:, 2] = 0
    targets[:, 6] = -1
    _, metrics = evaluated(logits, targets)
    _, without = evaluated(logits[:, keep], targets[:, keep])
    assert metrics["mAP_skip_empty"] == pytest.approx(without["mAP"], rel=1e-12)
    for name in ("mAP", "mAP_interpolated", "mAP_11point"):
        assert metrics[name] == pytest.approx(without[name] * 7 / 9, rel=1e-12)


def test_skip_empty_only_changes_order_of_metrics():
    logits, targets = predictions()
    targets[:, 2] = 0
    _, metrics = evaluated(logits, targets)
    _, reordered = evaluated(logits, targets, skip_empty=True)
    assert list(reordered)[:2] == ["mAP_skip_empty", "mAP"]
    assert reordered == metrics

    # mAP_skip_empty is undefined without positives.
    _, empty = evaluated(logits, torch.zeros_like(targets), skip_empty=True)
    assert next(iter(empty)) == "mAP"


def test_metrics_do_not_depend_on_batches_order_and_dtype():
    logits, targets = predictions(levels=6, unknown=0.2)
    evaluator, metrics = evaluated(logits, targets, size=len(logits))
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(3))
    shuffled, again = evaluated(logits[order].double(), targets[order].float(), size=7)
    assert again == metrics
    assert shuffled.per_class() == evaluator.per_class()
    short = logits.bfloat16()
    assert evaluated(short, targets)[1] == evaluated(short.float(), targets)[1]


@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_per_class_metrics_match_sklearn(unknown):
    logits, targets = predictions(unknown=unknown)
    evaluator, metrics = evaluated(logits, targets, threshold=0.7)
    rows = evaluator.per_class()
    assert list(rows) == ["AP", "precision", "recall", "f1", "positives"]
    _, columns = naive(decide(logits, threshold=0.7), targets)
    for name, expected in columns.items():
        assert rows[name] == pytest.approx(expected, rel=1e-9)
    for k, value in enumerate(rows["AP"]):
        known = targets[:, k] >= 0
        reference = average_precision_score(targets[known, k].numpy(), logits[known, k].numpy())
        assert value == pytest.approx(100 * reference, rel=1e-9)
    assert np.mean(rows["AP"]) == pytest.approx(metrics["mAP"], rel=1e-12)
