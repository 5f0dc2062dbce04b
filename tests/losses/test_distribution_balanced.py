"""The distribution-balanced loss against timm, and its formula with plain sums."""

import math

import pytest
import torch
from timm.loss import DistributionBalancedLoss as TimmDistributionBalancedLoss

from mldec.errors import ConfigError, DataError
from mldec.losses.distribution_balanced import DistributionBalancedLoss
from mldec.losses.label_counts import LabelCounts

POSITIVES, IMAGES = [900, 300, 60, 7, 1], 1000


def counts() -> LabelCounts:
    positives = torch.tensor(POSITIVES)
    return LabelCounts(positives, IMAGES - positives)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(8, 5, dtype=torch.float64, generator=generator)
    targets = (torch.rand(8, 5, dtype=torch.float64, generator=generator) < 0.4).double()
    targets[0] = 0  # an image without a label
    return logits.requires_grad_(), targets


def test_value_is_the_formula() -> None:
    logits, targets = batch()
    alpha, beta, mu, scale, kappa, gamma, factor = 0.3, 5.0, 0.4, 3.0, 0.2, 1.5, 1.0
    loss = DistributionBalancedLoss(
        alpha=alpha,
        beta=beta,
        mu=mu,
        negative_scale=scale,
        kappa=kappa,
        gamma=gamma,
        scale=factor,
        reduction="sum",
        label_counts=counts,
    )

    expected = 0.0
    for scores, row in zip(logits.tolist(), targets.tolist(), strict=True):
        of_image = sum(y / n for y, n in zip(row, POSITIVES, strict=True))
        for s, y, n in zip(scores, row, POSITIVES, strict=True):
            r = 1 / n / of_image if of_image else math.inf
            weight = alpha + 1 / (1 + math.exp(-beta * (r - mu)))
            z = s - kappa / scale * math.log(IMAGES / n - 1)
            if y:
                right, divisor = 1 / (1 + math.exp(-z)), 1.0
            else:
                right, divisor = 1 / (1 + math.exp(scale * z)), scale
            expected -= weight * (1 - right) ** gamma * math.log(right) / divisor

    # The counts are kept in float32.
    assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_value_and_gradient_are_those_of_timm(gamma: float) -> None:
    logits, targets = batch()
    ours = logits.float().detach().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()

    # timm leaves out the factor 2 together with the focal weight.
    scale = 2.0 if gamma else 1.0
    loss = DistributionBalancedLoss(gamma=gamma, scale=scale, label_counts=counts)
    value = loss(ours, targets)
    expected = TimmDistributionBalancedLoss(POSITIVES, IMAGES, focal_gamma=gamma)(theirs, targets)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_gradients_are_those_of_differences(gamma: float) -> None:
    logits, targets = batch()
    loss = DistributionBalancedLoss(gamma=gamma, label_counts=counts)
    assert torch.autograd.gradcheck(lambda values: loss(values, targets), (logits,))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_large_logits_keep_float32_finite(gamma: float) -> None:
    logits = torch.tensor([[1e30, -1e30, 500.0, -500.0, 1e4]]).repeat(2, 1).requires_grad_()
    targets = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    value = DistributionBalancedLoss(gamma=gamma, label_counts=counts)(logits, targets)
    value.backward()
    assert logits.grad is not None
    assert value.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] > 0 > logits.grad[1, 1]


def test_classes_without_a_positive_or_a_negative_have_finite_weights() -> None:
    never_always = LabelCounts(torch.tensor([0, 20]), torch.tensor([20, 0]))
    loss = DistributionBalancedLoss(label_counts=lambda: never_always)
    assert loss(torch.zeros(2, 2), torch.tensor([[0, 1], [1, 1]])).isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kappa": -0.1}, r"^kappa is -0\.1: it must be 0 or more$"),
        ({"negative_scale": 0}, "^negative_scale is 0: it must be above 0$"),
        ({"label_counts": None}, "^the distribution-balanced loss needs the counts"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributionBalancedLoss(**{"label_counts": counts, **arguments})  # type: ignore[arg-type]


def test_targets_and_classes_are_checked() -> None:
    loss = DistributionBalancedLoss(label_counts=counts)
    with pytest.raises(DataError, match="target -1 is not allowed"):
        loss(torch.zeros(1, 5), torch.tensor([[1, 0, 0, 0, -1]]))
    with pytest.raises(ConfigError, match=r"loss\.label_counts has 5 values for 3 classes"):
        loss(torch.zeros(1, 3), torch.zeros(1, 3))
