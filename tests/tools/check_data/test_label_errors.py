"""The ranking of labels, against loops and another optimiser, and on planted errors."""

import math

import numpy as np
import pytest

from mldec.calibration import calibrated, platt
from mldec.check_data.label_errors import Ranking, rank, suspected_labels


def planted(
    *, images: int = 600, classes: int = 8, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits [N, K], labels of which 5 % are flipped, and which those are.

    As after training with the asymmetric loss, the logits of each class have a scale and an offset
    of their own.
    """
    rng = np.random.default_rng(seed)
    truth = rng.random((images, classes)) < rng.uniform(0.03, 0.4, classes)
    evidence = 2.5 * (2 * truth - 1) + rng.normal(size=truth.shape)
    logits = evidence * rng.uniform(0.1, 2, classes) + rng.uniform(-3, 3, classes)

    flipped = np.zeros(truth.size, bool)
    flipped[rng.permutation(truth.size)[: truth.size // 20]] = True
    flipped = flipped.reshape(truth.shape)
    return logits.astype(np.float32), (truth ^ flipped).astype(np.int8), flipped


def matrix(ranking: Ranking, shape: tuple[int, int]) -> np.ndarray:
    """Return the probabilities of all pairs, [N, K], 0 for those that are not annotated."""
    probabilities = np.zeros(shape)
    probabilities[ranking.images, ranking.classes] = ranking.probabilities
    return probabilities


def test_a_class_with_one_label_only_has_probabilities_near_it_and_no_suspects() -> None:
    logits = np.random.default_rng(0).normal(size=(50, 2))
    labels = np.zeros((50, 2), np.int8)
    labels[:, 1] = 1
    probabilities = calibrated(logits, labels)
    assert (probabilities[:, 0] < 0.05).all()
    assert (probabilities[:, 1] > 0.95).all()
    assert not suspected_labels(probabilities, labels).any()


def test_suspected_labels_are_those_of_loops() -> None:
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


def test_the_ranking_is_that_of_loops() -> None:
    logits, labels, _ = planted(images=90)
    labels[np.random.default_rng(2).random(labels.shape) < 0.1] = -1

    pairs = []
    for k in range(8):
        annotated = [n for n in range(90) if labels[n, k] >= 0]
        slope, offset = platt(logits[annotated, k], labels[annotated, k] == 1)
        for n in annotated:
            p = 1 / (1 + math.exp(-(max(slope, 0) * logits[n, k] + offset)))
            pairs.append((p if labels[n, k] == 1 else 1 - p, n, k, p))
    pairs.sort()

    ranking = rank(logits, labels)
    assert len(ranking) == len(pairs) == (labels >= 0).sum()
    of_label = np.where(ranking.present, ranking.probabilities, 1 - ranking.probabilities)
    assert (np.diff(of_label) >= 0).all()
    np.testing.assert_allclose(of_label, [pair[0] for pair in pairs], atol=1e-4)

    expected = {pair[1:3]: pair for pair in pairs}
    suspected = suspected_labels(matrix(ranking, labels.shape), labels)
    for n, k, present, p, mark in zip(
        ranking.images,
        ranking.classes,
        ranking.present,
        ranking.probabilities,
        ranking.suspected,
        strict=True,
    ):
        assert present == (labels[n, k] == 1)
        assert p == pytest.approx(expected.pop((int(n), int(k)))[3], abs=1e-4)
        assert mark == suspected[n, k]
    assert not expected


def test_equal_pairs_keep_the_order_of_the_images() -> None:
    ranking = rank(np.zeros((5, 2)), np.zeros((5, 2), np.int8))
    assert ranking.images.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert ranking.classes.tolist() == [0, 1] * 5


@pytest.mark.parametrize("seed", range(3))
def test_planted_errors_are_among_the_first_tenth(seed: int) -> None:
    logits, labels, flipped = planted(seed=seed)
    ranking = rank(logits, labels)
    found = flipped[ranking.images, ranking.classes]
    first = len(found) // 10
    assert found[:first].sum() > 0.9 * flipped.sum()
    assert (found & ranking.suspected).sum() > 0.5 * flipped.sum()
    assert found[ranking.suspected].mean() > 0.9

    # The scores alone are worse: a class with high logits looks present everywhere.
    count = flipped.sum()
    of_label = np.where(labels == 1, logits, -logits).ravel()
    by_score = flipped.ravel()[np.argsort(of_label)[:count]].sum()
    assert found[:count].sum() > 0.9 * count > 0.85 * count > by_score
