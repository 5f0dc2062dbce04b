"""The metrics of partial labels against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score

from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator

ROWS, CLASSES = 90, 7


def predictions():
    """Return logits and targets; class 1 has no label, 3 no positive and 5 no negative."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(ROWS, CLASSES, generator=generator)
    targets = torch.where(drawn < 0.15, 1, torch.where(drawn < 0.4, 0, -1)).to(torch.int8)
    targets[:, 1] = -1
    targets[:, 3].clamp_(max=0)
    targets[:, 5][targets[:, 5] == 0] = -1
    return torch.randn(ROWS, CLASSES, generator=generator) + (targets == 1), targets


def evaluated(logits, targets, threshold=0.5):
    evaluator = PartialLabelEvaluator(logits.shape[1], threshold=threshold)
    for block, labels in zip(logits.split(40), targets.split(40), strict=True):
        evaluator.update(block, labels)
    return evaluator, evaluator.compute()


def test_only_annotated_labels_of_valid_classes_count():
    logits, targets = predictions()
    evaluator, found = evaluated(logits, targets)
    valid = [0, 2, 4, 6]
    kept = [
        (logits[targets[:, c] >= 0, c].numpy(), targets[targets[:, c] >= 0, c].numpy())
        for c in valid
    ]
    values = [100 * average_precision_score(labels, scores) for scores, labels in kept]
    weights = [int(labels.sum()) for _, labels in kept]
    assert next(iter(found)) == "mAP_partial"
    assert found["mAP_partial"] == pytest.approx(np.mean(values))
    assert found["mAP_weighted"] == pytest.approx(np.average(values, weights=weights))
    assert found["mAP_naive"] == plain_map(logits, targets.clamp(min=0))
    assert {key: value for key, value in found.items() if key.startswith("classes")} == {
        "classes_valid": 4,
        "classes_without_labels": 1,
        "classes_without_positives": 1,
        "classes_without_negatives": 1,
    }
    columns = evaluator.per_class()
    assert [columns["AP"][c] for c in valid] == pytest.approx(values)
    assert np.isnan([columns["AP"][c] for c in (1, 3, 5)]).all()
    assert columns["positives"] == (targets == 1).sum(0).tolist()
    assert columns["negatives"] == (targets == 0).sum(0).tolist()


def test_metrics_at_the_threshold_are_of_annotated_labels_of_valid_classes():
    threshold = 0.75
    logits, targets = predictions()
    _, metrics = evaluated(logits, targets, threshold)
    decided = logits.double().sigmoid() > threshold
    valid = [0, 2, 4, 6]
    columns = [(targets[targets[:, c] >= 0, c], decided[targets[:, c] >= 0, c]) for c in valid]
    precisions = [precision_score(*pair, zero_division=0) for pair in columns]
    recalls = [recall_score(*pair) for pair in columns]
    assert metrics["CP"] == pytest.approx(100 * np.mean(precisions))
    assert metrics["CR"] == pytest.approx(100 * np.mean(recalls))
    labels, decisions = (torch.cat(parts) for parts in zip(*columns, strict=True))
    assert metrics["OP"] == pytest.approx(100 * precision_score(labels, decisions))
    assert metrics["OF1"] == pytest.approx(100 * f1_score(labels, decisions))


def plain_map(logits, targets):
    evaluator = MultiLabelEvaluator(logits.shape[1])
    evaluator.update(logits, targets)
    return evaluator.compute()["mAP"]


def test_the_naive_number_is_the_same_where_all_labels_are_known():
    logits, targets = predictions()
    _, full = evaluated(logits[:, :1], targets[:, :1].clamp(min=0))
    assert full["mAP_naive"] == full["mAP_partial"]


def test_without_a_valid_class_there_is_no_number():
    logits, targets = predictions()
    with pytest.raises(DataError, match="no class has both a positive and a negative"):
        evaluated(logits[:, [1, 5]], targets[:, [1, 5]])
