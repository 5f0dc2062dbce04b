"""Temperature and Platt scaling, against a fine grid and another optimiser."""

import math

import numpy as np
import pytest
import torch

from mldec.calibration import TEMPERATURES, platt, temperature


def scores(*, images: int = 200, classes: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [N, K] and labels [N, K]; each class has a scale and an offset of its own."""
    rng = np.random.default_rng(seed)
    labels = rng.random((images, classes)) < rng.uniform(0.05, 0.4, classes)
    evidence = 2 * labels - 1 + rng.normal(size=labels.shape)
    logits = evidence * rng.uniform(0.5, 4, classes) + rng.uniform(-1, 1, classes)
    return logits.astype(np.float32), labels.astype(np.int8)


def log_loss(logits: np.ndarray, labels: np.ndarray, value: float, *, exclusive: bool) -> float:
    """Return the mean log loss of the scores of logits / value, by torch."""
    scaled = torch.from_numpy(logits).double() / value
    if exclusive:
        return torch.nn.functional.cross_entropy(scaled, torch.from_numpy(labels.argmax(1))).item()
    known = torch.from_numpy(labels >= 0)
    targets = torch.from_numpy(labels).double()
    return torch.nn.functional.binary_cross_entropy_with_logits(
        scaled[known], targets[known]
    ).item()


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_temperature_is_the_best_of_a_fine_grid(seed: int, exclusive: bool) -> None:
    logits, labels = scores(seed=seed)
    if exclusive:
        labels = np.eye(6, dtype=np.int8)[
            (logits + np.random.default_rng(seed).normal(scale=6, size=logits.shape)).argmax(1)
        ]
    else:
        labels[::7] = -1

    fitted = temperature(logits, labels, exclusive=exclusive)
    grid = np.geomspace(*TEMPERATURES, 4000)
    losses = [log_loss(logits, labels, value, exclusive=exclusive) for value in grid]
    assert fitted == pytest.approx(grid[np.argmin(losses)], rel=2e-3)
    assert fitted != pytest.approx(1, rel=0.02)


def test_logits_that_were_multiplied_have_a_temperature_that_much_higher() -> None:
    logits, labels = scores()
    once, thrice = (temperature(factor * logits, labels, exclusive=False) for factor in (1, 3))
    assert once is not None
    assert thrice == pytest.approx(3 * once)


def test_an_image_without_a_label_does_not_count() -> None:
    logits, _ = scores(classes=3)
    labels = np.eye(3, dtype=np.int8)[np.arange(200) % 3]
    more = np.concatenate([logits, [[9, -9, 0]]]), np.concatenate([labels, [[0, 0, 0]]])
    assert temperature(*more, exclusive=True) == temperature(logits, labels, exclusive=True)


@pytest.mark.parametrize("sign", [1, -1])
def test_separated_and_reversed_scores_have_no_temperature(sign: int) -> None:
    labels = np.array([[1], [1], [0], [0], [0]], np.int8)
    assert temperature(sign * (4.0 * labels - 2), labels, exclusive=False) is None


def by_lbfgs(logits: np.ndarray, present: np.ndarray) -> tuple[float, float]:
    positives, negatives = present.sum(), (~present).sum()
    targets = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weights],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    inputs, outputs = torch.from_numpy(logits).double(), torch.from_numpy(targets)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        scores = weights[0] * inputs + weights[1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, outputs)
        loss.backward()
        return loss

    optimiser.step(closure)
    return tuple(weights.tolist())


@pytest.mark.parametrize("seed", range(3))
def test_platt_scaling_is_that_of_another_optimiser(seed: int) -> None:
    logits, labels = scores(seed=seed)
    for column in range(logits.shape[1]):
        present = labels[:, column] == 1
        expected = by_lbfgs(logits[:, column], present)
        np.testing.assert_allclose(
            platt(logits[:, column], present), expected, rtol=1e-4, atol=1e-4
        )


def test_a_class_that_the_logits_separate_has_a_finite_slope() -> None:
    logits = np.array([-9.0, -8, -7, 5, 6])
    present = logits > 0
    slope, offset = platt(logits, present)
    np.testing.assert_allclose((slope, offset), by_lbfgs(logits, present), rtol=1e-3)
    assert 0 < slope < 10


@pytest.mark.parametrize(
    ("logits", "present"),
    [
        ([3.0, 3, 3, 3], [True, False, False, False]),  # all are equal
        ([-2.0, 1, 2, 3], [True, False, False, False]),  # worse than chance
        ([], []),
    ],
)
def test_logits_that_say_nothing_leave_the_frequency(
    logits: list[float], present: list[bool]
) -> None:
    slope, offset = platt(np.array(logits), np.array(present, bool))
    assert slope == 0
    assert 1 / (1 + math.exp(-offset)) == pytest.approx((sum(present) + 1) / (len(logits) + 2))
