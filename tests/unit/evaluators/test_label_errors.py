"""The ranking of labels, compared with loops."""

import math

import numpy as np

from mldec.evaluators.label_errors import calibrated, rank, suspected_labels
from mldec.evaluators.platt import platt


def predictions(images=90, classes=8):
    """Return logits [N, K] and labels. Each class has another scale and offset."""
    rng = np.random.default_rng(0)
    labels = rng.random((images, classes)) < rng.uniform(0.03, 0.4, classes)
    evidence = 2.5 * (2 * labels - 1) + rng.normal(size=labels.shape)
    logits = evidence * rng.uniform(0.1, 2, classes) + rng.uniform(-3, 3, classes)
    return logits.astype(np.float32), labels.astype(np.int8)


def test_constant_labels_have_no_suspects():
    logits = np.random.default_rng(0).normal(size=(50, 2))
    labels = np.zeros((50, 2), np.int8)
    labels[:, 1] = 1
    probabilities = calibrated(logits, labels)
    assert (probabilities[:, 0] < 0.05).all()
    assert (probabilities[:, 1] > 0.95).all()
    assert not suspected_labels(probabilities, labels).any()


def test_suspected_labels_equal_loops():
    rng = np.random.default_rng(1)
    probabilities = rng.random((60, 4)) * [1, 1, 0.6, 0.9]
    labels = rng.integers(-1, 2, (60, 4)).astype(np.int8)
    suspected = suspected_labels(probabilities, labels)
    assert 0 < suspected.sum() < 240
    for k in range(4):
        column = list(zip(probabilities[:, k], labels[:, k], strict=True))
        with_class = [p for p, label in column if label == 1]
        without = [1 - p for p, label in column if label == 0]
        for index, (p, label) in enumerate(column):
            opposite = {0: p, 1: 1 - p, -1: 0}[int(label)]
            same = without if label == 1 else with_class
            expected = opposite > 0.5 and opposite >= sum(same) / len(same)
            assert suspected[index, k] == expected


def test_ranking_equals_loops():
    logits, labels = predictions()
    labels[np.random.default_rng(2).random(labels.shape) < 0.1] = -1

    pairs = []
    probabilities = np.zeros(labels.shape)
    for k in range(8):
        annotated = [n for n in range(90) if labels[n, k] >= 0]
        slope, offset = platt(logits[annotated, k], labels[annotated, k] == 1)
        for n in annotated:
            p = probabilities[n, k] = 1 / (1 + math.exp(-(slope * logits[n, k] + offset)))
            pairs.append((p if labels[n, k] == 1 else 1 - p, n, k))
    pairs.sort()

    ranking = rank(logits, labels)
    assert len(ranking) == len(pairs) == (labels >= 0).sum()
    assert list(zip(ranking.images, ranking.classes, strict=True)) == [(n, k) for _, n, k in pairs]
    places = (ranking.images, ranking.classes)
    np.testing.assert_allclose(ranking.probabilities, probabilities[places], atol=1e-6)
    assert (ranking.present == (labels[places] == 1)).all()
    assert (ranking.suspected == suspected_labels(probabilities, labels)[places]).all()

    # Ties keep the order of the images.
    equal = rank(np.zeros((5, 2)), np.zeros((5, 2), np.int8))
    assert equal.images.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
