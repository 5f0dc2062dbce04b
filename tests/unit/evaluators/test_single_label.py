"""Single-label metrics against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, recall_score, top_k_accuracy_score

from mldec.evaluators import single_label
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.runtime import distributed

IMAGES = 400
CLASSES = 12


def one_hot(labels, classes=CLASSES):
    return torch.nn.functional.one_hot(torch.as_tensor(labels), classes).to(torch.int8)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    return torch.randn(IMAGES, CLASSES, generator=generator) + 2 * one_hot(labels), labels


def evaluated(logits, targets, sizes=(IMAGES,), **arguments):
    evaluator = SingleLabelEvaluator(logits.shape[1], **arguments)
    for batch in zip(logits.split(sizes), targets.split(sizes), strict=True):
        evaluator.update(*batch)
    return evaluator, evaluator.compute()


def test_metrics_match_sklearn(case):
    logits, labels = case
    evaluator, metrics = evaluated(logits, one_hot(labels))
    assert list(metrics) == ["top1", "top5", "class_accuracy", "ECE"]
    confidence, predicted = logits.double().softmax(1).max(1)
    right = predicted == labels
    assert metrics["top1"] == pytest.approx(100 * accuracy_score(labels, predicted))
    assert metrics["top5"] == pytest.approx(100 * top_k_accuracy_score(labels, logits, k=5))
    by_class = 100 * recall_score(labels, predicted, average=None)
    assert metrics["class_accuracy"] == pytest.approx(by_class.mean())
    assert evaluator.per_class()["accuracy"] == pytest.approx(by_class.tolist())
    assert evaluator.per_class()["images"] == labels.bincount(minlength=CLASSES).tolist()

    share, mean = calibration_curve(right, confidence, n_bins=single_label.BINS)
    images = np.histogram(confidence, bins=single_label.BINS, range=(0, 1))[0]
    error = 100 * np.abs(share - mean) @ images[images > 0] / IMAGES
    assert metrics["ECE"] == pytest.approx(error, rel=1e-5)
    assert 20 < metrics["top1"] < metrics["top5"] < 100


def test_metrics_do_not_depend_on_ranks(case, monkeypatch):
    logits, labels = case
    alone, whole = evaluated(logits, one_hot(labels))
    other, _ = evaluated(logits[:130], one_hot(labels[:130]), (130,))
    mine = SingleLabelEvaluator(CLASSES)
    mine.update(logits[130:], one_hot(labels[130:]))
    monkeypatch.setattr(distributed, "gather", lambda rows: [rows, torch.cat(other.rows, dim=1)])
    assert mine.compute() == whole
    assert mine.per_class() == alone.per_class()
    assert mine.pairs() == alone.pairs()


def test_ties_go_to_lower_class():
    targets = one_hot([0, 1, 2], 3)
    evaluator, metrics = evaluated(torch.zeros(3, 3), targets, (3,), top_k=2)
    assert metrics["top1"] == pytest.approx(100 / 3)
    assert metrics["top2"] == pytest.approx(200 / 3)
    assert evaluator.pairs() == [(1, 0, 1), (2, 0, 1)]


def test_confusions_are_sorted_by_count(case):
    logits, labels = case
    evaluator, metrics = evaluated(logits, one_hot(labels))
    confusion = np.zeros((CLASSES, CLASSES), int)
    np.add.at(confusion, (labels.numpy(), logits.argmax(1).numpy()), 1)
    np.fill_diagonal(confusion, 0)
    expected = sorted(((-n, *pair) for pair, n in np.ndenumerate(confusion) if n))
    pairs = evaluator.pairs(1000)
    assert pairs == [(a, b, -n) for n, a, b in expected]
    assert evaluator.pairs(3) == pairs[:3]
    assert sum(n for _, _, n in pairs) == round(IMAGES * (1 - metrics["top1"] / 100))


def test_ece_of_small_cases(monkeypatch):
    # Confidences 0.8 (right), 0.8 (wrong) and 0.6 (right): |1 - 1.6| and |1 - 0.6| images of three.
    logits = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]]).log()
    _, metrics = evaluated(logits, one_hot([0, 1, 1], 2), (3,))
    assert metrics["ECE"] == pytest.approx(100 * (0.6 + 0.4) / 3, rel=1e-6)
    # A bin includes its upper bound: 0.5 (right) and 0.6 (wrong) are in different halves.
    monkeypatch.setattr(single_label, "BINS", 2)
    logits = torch.tensor([[0.5, 0.5], [0.4, 0.6]]).log()
    _, metrics = evaluated(logits, one_hot([0, 0], 2), (2,))
    assert metrics["ECE"] == pytest.approx(100 * (0.5 + 0.6) / 2, rel=1e-6)
    # A confidence of 1 is in the last bin.
    assert evaluated(torch.tensor([[100.0, 0]]), one_hot([0], 2), (1,))[1]["ECE"] == 0


def test_images_with_several_labels_or_none():
    logits = torch.tensor([[3.0, 2, 1], [3.0, 2, 1], [3.0, 2, 1]])
    targets = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]])
    evaluator, metrics = evaluated(logits, targets, (3,), top_k=2, suffix="_real")
    assert metrics["top1_real"] == 50
    assert metrics["top2_real"] == 100
    assert evaluator.per_class()["images"] == [1, 1, 0]
    assert evaluator.pairs() == [(1, 0, 1)]
