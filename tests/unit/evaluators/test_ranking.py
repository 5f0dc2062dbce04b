"""Ranking metrics, AUROC and decisions per image against scikit-learn and plain loops."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    coverage_error,
    f1_score,
    hamming_loss,
    label_ranking_average_precision_score,
    label_ranking_loss,
    roc_auc_score,
)

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.ranking import ranking_metrics
from mldec.evaluators.zero_shot import ZeroShotEvaluator

ROWS = 90
CLASSES = 7


def predictions(levels=None, unknown=0.0, seed=0):
    """Return logits and targets. Some images have no positive, some no negative."""
    generator = torch.Generator().manual_seed(seed)
    rates = torch.linspace(0.1, 0.6, CLASSES)
    targets = (torch.rand(ROWS, CLASSES, generator=generator) < rates).to(torch.int8)
    logits = torch.randn(ROWS, CLASSES, generator=generator) + targets - 0.5
    if levels:
        logits = (logits * levels / 4).round()
    targets[torch.rand(ROWS, CLASSES, generator=generator) < unknown] = -1
    targets[:3] = 0
    targets[3:5] = 1
    return logits, targets


def computed(logits, targets, kind=MultiLabelEvaluator, threshold=0.6, size=20, **options):
    evaluator = kind(logits.shape[1], threshold=threshold, **options)
    for block, labels in zip(logits.split(size), targets.split(size), strict=True):
        evaluator.update(block, labels)
    return ranking_metrics(evaluator)


def naive(logits, targets, threshold=0.6):
    """Return the metrics by counting, one image and one pair of labels at a time."""
    names = ("LRAP", "coverage", "ranking_loss", "one_error", "F1_samples", "exact_match")
    values = {name: [] for name in (*names, "hamming_loss")}
    cells = []
    for row, labels in zip(logits.tolist(), targets.tolist(), strict=True):
        known = [(score, label) for score, label in zip(row, labels, strict=True) if label >= 0]
        if not known:
            continue
        cells.append(known)
        positives = [score for score, label in known if label]
        negatives = [score for score, label in known if not label]
        ranks = [sum(other >= score for other, _ in known) for score in positives]
        hits = [sum(other >= score for other in positives) for score in positives]
        shares = [hit / rank for hit, rank in zip(hits, ranks, strict=True)]
        values["LRAP"].append(np.mean(shares) if shares else 1)
        values["coverage"].append(max(ranks, default=0))
        wrong = [negative >= positive for positive in positives for negative in negatives]
        values["ranking_loss"].append(np.mean(wrong) if wrong else 0)
        if positives:
            values["one_error"].append(max(negatives, default=-math.inf) >= max(positives))
        decided = [1 / (1 + math.exp(-score)) > threshold for score, _ in known]
        right = sum(yes and label for yes, (_, label) in zip(decided, known, strict=True))
        total = sum(decided) + len(positives)
        values["F1_samples"].append(2 * right / total if total else 0)
        wrong = [yes != label for yes, (_, label) in zip(decided, known, strict=True)]
        values["exact_match"].append(not any(wrong))
        values["hamming_loss"] += wrong
    metrics = {name: 100 * np.mean(numbers) for name, numbers in values.items()}
    metrics["coverage"] /= 100
    return metrics


def area(scores, labels):
    """Return the AUROC of the annotated labels in percent; None without both values."""
    known = labels >= 0
    if len(set(labels[known].tolist())) < 2:
        return None
    return 100 * roc_auc_score(labels[known], scores[known])


@pytest.mark.parametrize("levels", [None, 4])
def test_complete_labels_match_sklearn(levels):
    logits, targets = predictions(levels)
    labels = targets.numpy()
    scores = logits.numpy()
    decided = logits.double().sigmoid() > 0.6
    expected = {
        "LRAP": 100 * label_ranking_average_precision_score(labels, scores),
        "coverage": coverage_error(labels, scores),
        "ranking_loss": 100 * label_ranking_loss(labels, scores),
        "one_error": naive(logits, targets)["one_error"],
        "AUROC_macro": 100 * roc_auc_score(labels, scores, average="macro"),
        "AUROC_micro": 100 * roc_auc_score(labels, scores, average="micro"),
        "F1_samples": 100 * f1_score(labels, decided, average="samples", zero_division=0),
        "exact_match": 100 * accuracy_score(labels, decided),
        "hamming_loss": 100 * hamming_loss(labels, decided),
    }
    assert expected["exact_match"] > 0
    found = computed(logits, targets)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("kind", [MultiLabelEvaluator, PartialLabelEvaluator])
def test_unknown_labels_are_ignored(levels, kind):
    logits, targets = predictions(levels, unknown=0.4)
    targets[5:7] = -1  # no annotated label
    targets[:, 2] = -1
    targets[:, 4] = targets[:, 4].clamp(max=0)  # no positive
    found = computed(logits, targets, kind)
    areas = [area(logits[:, k], targets[:, k]) for k in range(CLASSES)]
    expected = naive(logits, targets)
    expected["AUROC_macro"] = np.mean([value for value in areas if value is not None])
    expected["AUROC_micro"] = area(logits.flatten(), targets.flatten())
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 200, 10**6])
def test_metrics_do_not_depend_on_order_and_chunks(chunk, monkeypatch):
    logits, targets = predictions(levels=4, unknown=0.2)
    expected = computed(logits, targets)
    monkeypatch.setattr("mldec.evaluators.ranking.CHUNK", chunk)
    order = torch.randperm(ROWS)
    assert computed(logits[order], targets[order], size=7) == expected


def test_thresholds_per_class_decide():
    logits, targets = predictions()
    evaluator = MultiLabelEvaluator(CLASSES)
    evaluator.logit_threshold = torch.linspace(-1, 1, CLASSES, dtype=torch.float64)
    evaluator.update(logits, targets)
    decided = logits > torch.linspace(-1, 1, CLASSES)
    expected = 100 * f1_score(targets, decided, average="samples", zero_division=0)
    assert ranking_metrics(evaluator)["F1_samples"] == pytest.approx(expected)


def test_zero_shot_evaluator_ranks_all_classes():
    logits, targets = predictions()
    found = computed(logits, targets, ZeroShotEvaluator, unseen=[1, 2], images="all")
    assert found == computed(logits, targets)


def test_metrics_without_a_positive_or_an_image_are_nan():
    logits, targets = predictions()
    found = computed(logits, torch.zeros_like(targets))
    nan = {name for name, value in found.items() if math.isnan(value)}
    assert nan == {"one_error", "AUROC_macro", "AUROC_micro"}
    found = computed(logits, torch.full_like(targets, -1))
    assert all(map(math.isnan, found.values()))
