"""Weighted metrics against repeated images, and intervals against the usual bootstrap."""

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from sklearn.metrics import average_precision_score

from mldec.evaluators.average_precision import INTERPOLATIONS
from mldec.evaluators.average_precision import average_precision as exact
from mldec.evaluators.multi_label import Counts
from mldec.report import resampling
from mldec.report.resampling import (
    STEP,
    average_precision,
    count,
    counts_of_classes,
    draw,
    interval,
    precision_of_classes,
)


def made(
    images: int, classes: int, *, share: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits with many ties, and labels of which some are missing."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, classes)) < share).astype(np.int8)
    logits = np.round(rng.normal(size=labels.shape) + labels, 1).astype(np.float32)
    labels[rng.random(labels.shape) < 0.1] = -1
    return logits, labels


def whole(images: int, resamples: int) -> np.ndarray:
    """Return how often each image is repeated in each resample, 1 to 3 times."""
    rng = np.random.default_rng(1)
    return rng.integers(1, 4, (1, images, resamples)).astype(np.float32)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_whole_weights_are_repeated_images(interpolation: str) -> None:
    logits, labels = made(60, 70)
    weights = whole(60, 6)
    values = precision_of_classes(logits, labels, weights, [interpolation])[interpolation]
    assert values.shape == (6, 70)

    for number in range(6):
        rows = np.repeat(np.arange(60), weights[0, :, number].astype(int))
        scores, targets = torch.from_numpy(logits[rows]), torch.from_numpy(labels[rows])
        expected = exact(scores, targets, interpolations=[interpolation])[interpolation]
        assert values[number] == pytest.approx(expected.numpy(), abs=1e-6)


def test_any_weights_are_those_of_scikit_learn() -> None:
    logits, labels = made(200, 1)
    annotated = labels[:, 0] >= 0
    weights = draw(200, 1)
    values = average_precision(logits[:, 0], labels[:, 0], weights)["none"]
    for number in range(0, len(values), 111):
        expected = average_precision_score(
            labels[annotated, 0] == 1,
            logits[annotated, 0],
            sample_weight=weights[number // STEP, annotated, number % STEP],
        )
        assert values[number] == pytest.approx(expected, abs=1e-5)


def test_a_class_without_a_positive_has_no_precision() -> None:
    values = average_precision(np.zeros(5, np.float32), np.array([0, 0, -1, 0, 0]), draw(5, 1))
    assert np.isnan(values["none"]).all()


def test_counts_are_those_of_repeated_images() -> None:
    logits, labels = made(50, 3)
    weights = whole(50, 4)
    counts = counts_of_classes(logits, labels, weights, lambda _, scores: scores > 0.5)
    for number in range(4):
        rows = np.repeat(np.arange(50), weights[0, :, number].astype(int))
        expected = Counts(3)
        expected.update(torch.from_numpy(logits[rows] > 0.5), torch.from_numpy(labels[rows]))
        actual = counts.of(number)
        assert torch.equal(actual.hits, expected.hits)
        assert torch.equal(actual.predicted, expected.predicted)
        assert torch.equal(actual.positives, expected.positives)


def test_intervals_are_about_those_of_the_usual_bootstrap() -> None:
    logits, labels = made(600, 1)
    annotated = labels[:, 0] >= 0
    scores, present = logits[annotated, 0], labels[annotated, 0] == 1
    values = average_precision(scores, labels[annotated, 0], draw(len(scores), 1))["none"]
    low, high = interval(values)

    usual = bootstrap(
        (present, scores),
        average_precision_score,
        paired=True,
        vectorized=False,
        n_resamples=400,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    width = usual.high - usual.low
    assert low == pytest.approx(usual.low, abs=0.2 * width)
    assert high == pytest.approx(usual.high, abs=0.2 * width)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    # The average precision of ten thousand images stands for the truth.
    logits, labels = made(10_000, 1)
    truth = float(exact(torch.from_numpy(logits), torch.from_numpy(labels))["none"])
    inside = 0
    for seed in range(200):
        scores, targets = made(150, 1, seed=seed + 1)
        values = average_precision(scores[:, 0], targets[:, 0], draw(150, 1)[:2])["none"]
        low, high = interval(values)
        inside += bool(low <= truth <= high)
    assert 0.89 <= inside / 200 <= 0.99


def test_resamples_are_always_the_same_and_fewer_of_many_pairs() -> None:
    assert np.array_equal(draw(7, 3), draw(7, 3))
    assert (draw(7, 3) > 0).all()
    assert draw(2_000, 1).mean() == pytest.approx(1, abs=0.01)
    assert count(draw(7, 3)) == resampling.MOST_RESAMPLES
    assert count(draw(7, 3_000_000_000)) == STEP
    assert count(draw(20, 10_000_000)) == 200


def test_without_resamples_an_interval_is_unknown() -> None:
    low, high = interval(np.zeros((0, 3)))
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    assert low.shape == (3,)
