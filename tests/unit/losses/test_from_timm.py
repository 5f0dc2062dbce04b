"""The losses of timm by the formulas of their papers, written with plain sums."""

import math

import pytest
import torch
import torch.nn.functional as F

from mldec.losses import AsymmetricLoss
from mldec.losses.common import LabelCounts
from mldec.losses.from_timm import ZLPR, DistributionBalancedLoss, TwoWayLoss

POSITIVES, IMAGES = [900, 300, 60, 7, 1], 1000


def counts():
    positives = torch.tensor(POSITIVES)
    return LabelCounts(positives, IMAGES - positives)


def batch():
    """Return scores and targets; some rows and columns have no positive, some no negative."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(8, 5, generator=generator)
    targets = (torch.rand(8, 5, generator=generator) < 0.4).float()
    targets[:, 0], targets[:, 1] = 0, 1
    targets[0, 1:], targets[1], targets[2] = 1, 0, 1
    return logits.requires_grad_(), targets


def direction(logits, targets, *, tp, tn):
    """Return the mean comparison of the rows with a positive, with plain sums."""
    losses = []
    for scores, row in zip(logits.tolist(), targets.tolist(), strict=True):
        positives = sum(math.exp(-s / tp) for s, y in zip(scores, row, strict=True) if y)
        negatives = sum(math.exp(s / tn) for s, y in zip(scores, row, strict=True) if not y)
        if positives and negatives:
            difference = tp * math.log(positives) + tn * math.log(negatives)
            losses.append(math.log1p(math.exp(difference)))
        elif positives:
            losses.append(0.0)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("tp", "tn"), [(4.0, 1.0), (1.0, 1.0), (2.0, 0.5)])
def test_the_two_way_loss_is_the_formula_in_both_ways(tp, tn):
    logits, targets = batch()
    expected = direction(logits, targets, tp=tp, tn=tn) + direction(
        logits.T, targets.T, tp=tp, tn=tn
    )
    loss = TwoWayLoss(positive_temperature=tp, negative_temperature=tn)
    assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-5)


def test_the_two_way_loss_of_an_image_with_one_label_is_softmax_cross_entropy():
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    # One image has no other to be compared with: the class it shows has no negative.
    expected = F.cross_entropy(logits, torch.tensor([2]))
    torch.testing.assert_close(TwoWayLoss()(logits, F.one_hot(torch.tensor([2]), 5)), expected)


@pytest.mark.parametrize("target", [0, 1])
def test_without_anything_to_compare_the_two_way_loss_and_its_gradient_are_0(target):
    logits = torch.randn(3, 4, requires_grad=True)
    value = TwoWayLoss()(logits, torch.full((3, 4), target))
    value.backward()
    assert value.item() == 0
    assert not logits.grad.any()


def test_zlpr_compares_each_positive_with_each_negative_and_both_with_zero():
    logits, targets = batch()
    expected = 0.0
    for scores, row in zip(logits.tolist(), targets.tolist(), strict=True):
        positives = [0.0] + [score for score, y in zip(scores, row, strict=True) if y]
        negatives = [0.0] + [score for score, y in zip(scores, row, strict=True) if not y]
        differences = [negative - positive for negative in negatives for positive in positives]
        expected += math.log(sum(map(math.exp, differences)))
    assert ZLPR()(logits, targets).item() == pytest.approx(expected / len(logits), rel=1e-5)


@pytest.mark.parametrize(("gamma", "factor"), [(1.5, 0.7), (2.0, 2.0), (0.0, 1.0)])
def test_the_distribution_balanced_loss_is_the_formula(gamma, factor):
    logits, targets = batch()
    alpha, beta, mu, scale, kappa = 0.3, 5.0, 0.4, 3.0, 0.2
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
            expected -= factor * weight * (1 - right) ** gamma * math.log(right) / divisor
    assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "make", [DistributionBalancedLoss, lambda: AsymmetricLoss(pos_weight="auto")]
)
def test_missing_label_counts_raise_one_line(make):
    with pytest.raises(ValueError, match="label_counts is None"):
        make()


def test_classes_without_a_positive_or_a_negative_have_finite_weights():
    never_always = LabelCounts(torch.tensor([0, 20]), torch.tensor([20, 0]))
    loss = DistributionBalancedLoss(label_counts=lambda: never_always)
    assert loss(torch.zeros(2, 2), torch.tensor([[0, 1], [1, 1]])).isfinite()
