"""Partial-label metrics against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator

ROWS = 90
CLASSES = 7
VALID = [0, 2, 4, 6]


def predictions():
    """Return logits and targets. Class 1 has no label, 3 no positive and 5 no negative."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(ROWS, CLASSES, generator=generator)
    targets = torch.where(drawn < 0.15, 1, torch.where(drawn < 0.4, 0, -1)).to(torch.int8)
    targets[:, 1] = -1
    targets[:, 3].clamp_(max=0)
    targets[:, 5][targets[:, 5] == 0] = -1
    return torch.randn(ROWS, CLASSES, generator=generator) + (targets == 1), targets


def annotated(targets, values):
    """Return the annotated targets and their values for each valid class."""
    rows = targets >= 0
    return [(targets[rows[:, c], c], values[rows[:, c], c]) for c in VALID]


def evaluated(logits, targets, threshold=0.5, top_k=None):
    evaluator = PartialLabelEvaluator(logits.shape[1], threshold=threshold, top_k=top_k)
    for block, labels in zip(logits.split(40), targets.split(40), strict=True):
        evaluator.update(block, labels)
    return evaluator, evaluator.compute()


def test_map_of_valid_classes_matches_sklearn():
    logits, targets = predictions()
    evaluator, found = evaluated(logits, targets)
    kept = annotated(targets, logits)
    values = [100 * average_precision_score(labels, scores) for labels, scores in kept]
    weights = [int(labels.sum()) for labels, _ in kept]
    assert next(iter(found)) == "mAP_partial"
    assert found["mAP_partial"] == pytest.approx(np.mean(values))
    assert found["mAP_weighted"] == pytest.approx(np.average(values, weights=weights))
    plain = MultiLabelEvaluator(CLASSES)
    plain.update(logits, targets.clamp(min=0))
    assert found["mAP_naive"] == plain.compute()["mAP"]
    assert {key: value for key, value in found.items() if key.startswith("classes")} == {
        "classes_valid": 4,
        "classes_without_labels": 1,
        "classes_without_positives": 1,
        "classes_without_negatives": 1,
    }
    columns = evaluator.per_class()
    assert [columns["AP"][c] for c in VALID] == pytest.approx(values)
    assert np.isnan([columns["AP"][c] for c in (1, 3, 5)]).all()
    assert columns["positives"] == (targets == 1).sum(0).tolist()
    assert columns["negatives"] == (targets == 0).sum(0).tolist()


def test_metrics_at_top_k_match_sklearn():
    logits, targets = predictions()
    _, metrics = evaluated(logits, targets, top_k=2)
    decided = torch.zeros(ROWS, CLASSES).scatter(1, logits.argsort(1, descending=True)[:, :2], 1)
    columns = annotated(targets, decided)
    precision = np.mean([precision_score(*pair, zero_division=0) for pair in columns])
    recalls = [recall_score(*pair) for pair in columns]
    f1 = 2 * precision * np.mean(recalls) / (precision + np.mean(recalls))
    assert metrics["CP@2"] == pytest.approx(100 * precision)
    assert metrics["CR@2"] == pytest.approx(100 * np.mean(recalls))
    assert metrics["CF1@2"] == pytest.approx(100 * f1)
    assert metrics["N+@2"] == np.count_nonzero(recalls)


def test_metrics_at_threshold_match_sklearn():
    threshold = 0.75
    logits, targets = predictions()
    _, metrics = evaluated(logits, targets, threshold)
    decided = logits.double().sigmoid() > threshold
    columns = annotated(targets, decided)
    precisions = [precision_score(*pair, zero_division=0) for pair in columns]
    recalls = [recall_score(*pair) for pair in columns]
    assert metrics["CP"] == pytest.approx(100 * np.mean(precisions))
    assert metrics["CR"] == pytest.approx(100 * np.mean(recalls))
    labels, decisions = (torch.cat(parts) for parts in zip(*columns, strict=True))
    assert metrics["OP"] == pytest.approx(100 * precision_score(labels, decisions))
    assert metrics["OF1"] == pytest.approx(100 * f1_score(labels, decisions))
