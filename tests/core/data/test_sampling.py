"""Repeat-factor sampling, against loops and the mean of many epochs."""

import math
import re

import numpy as np
import pytest
import torch

from mldec.data.table import from_dense
from mldec.data.types import Sampling, draw, epoch_length, repeat_factors


def dense(images: int = 200, seed: int = 0) -> np.ndarray:
    """Return labels of classes from rare to common; the last one is never positive."""
    rng = np.random.default_rng(seed)
    fractions = np.array([0.01, 0.03, 0.2, 0.6, 0.0])
    labels = (rng.random((images, 5)) < fractions).astype(np.int8)
    labels[rng.random((images, 5)) < 0.1] = -1
    return labels


@pytest.mark.parametrize("default", [0, -1])
@pytest.mark.parametrize("threshold", [0.001, 0.1, 1.0])
def test_factors_are_those_of_loops(threshold: float, default: int) -> None:
    labels = dense()
    shown = [sum(row[k] == 1 for row in labels) for k in range(5)]
    expected = []
    for row in labels:
        of_classes = [
            max(1.0, math.sqrt(threshold / (shown[k] / len(labels))))
            for k in range(5)
            if row[k] == 1
        ]
        expected.append(max(of_classes, default=1.0))
    factors = repeat_factors(from_dense(labels, default=default), threshold)
    np.testing.assert_allclose(factors, expected, rtol=1e-12)


def epoch(factors: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    images, appearances = draw(factors, generator)
    return images.numpy(), appearances.numpy()


def test_epochs_have_the_same_length_and_each_image_its_factor_rounded_down_or_up() -> None:
    factors = repeat_factors(from_dense(dense()), 0.1)
    length = epoch_length(factors)
    assert factors.sum() <= length < factors.sum() + 1

    # The sum is rounded up, so that the factors grow by less than 1 in all.
    scaled = factors * length / factors.sum()
    counts = []
    for seed in range(400):
        images, _ = epoch(factors, seed)
        assert len(images) == length
        counts.append(np.bincount(images, minlength=len(factors)))
        assert (counts[-1] >= np.floor(scaled)).all()
        assert (counts[-1] <= np.ceil(scaled)).all()

    # The standard deviation of a count is at most 1/2, that of the mean of 400 at most 1/40.
    np.testing.assert_allclose(np.mean(counts, axis=0), scaled, atol=5 / 40)


def test_an_epoch_is_shuffled_counts_appearances_and_depends_on_the_generator_only() -> None:
    factors = np.array([1.0, 3.0, 1.5, 1.0, 2.5])
    images, appearances = epoch(factors, 0)
    for index in range(5):
        own = appearances[images == index]
        assert sorted(own.tolist()) == list(range(len(own)))

    orders = {tuple(epoch(factors, seed)[0]) for seed in range(20)}
    assert len(orders) > 15
    for one, other in zip(epoch(factors, 0), (images, appearances), strict=True):
        assert np.array_equal(one, other)


def test_factors_of_1_are_a_permutation() -> None:
    images, appearances = epoch(np.ones(1000), 0)
    assert sorted(images.tolist()) == list(range(1000))
    assert not appearances.any()


def test_settings() -> None:
    labels = from_dense(dense())
    assert Sampling().factors(lambda: pytest.fail("it was asked for labels")) is None
    for threshold, used in ((None, 0.001), (0.1, 0.1)):
        sampling = Sampling(sampler="repeat_factor", repeat_threshold=threshold)
        factors = sampling.factors(lambda: labels)
        assert factors is not None
        assert np.array_equal(factors, repeat_factors(labels, used))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "repeat"}, "sampler 'repeat' is not known: choose shuffle or repeat_factor"),
        (
            {"sampler": "repeat_factor", "repeat_threshold": 0.0},
            "repeat_threshold is 0.0: it must be in (0, 1]",
        ),
        ({"repeat_threshold": 0.1}, "repeat_threshold has no effect with data.sampler=shuffle"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Sampling(**settings)  # type: ignore[arg-type]
