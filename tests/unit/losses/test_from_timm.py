"""Losses of timm against the formulas of their papers, and the two-way loss against timm."""

import math

import pytest
import timm.loss
import torch
from random_weights import with_gradient

from mldec.losses.common import LabelCounts
from mldec.losses.from_timm import ZLPR, DistributionBalancedLoss
from mldec.losses.two_way import TwoWayLoss

POSITIVES = [900, 300, 60, 7, 1]
IMAGES = 1000
COUNTS = LabelCounts(torch.tensor(POSITIVES), IMAGES - torch.tensor(POSITIVES))


def batch():
    """Return logits and targets. Some rows and columns have no positive or no negative."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(8, 5, generator=generator)
    targets = (torch.rand(8, 5, generator=generator) < 0.4).float()
    targets[:, 0] = 0
    targets[:, 1] = 1
    targets[0, 1:] = 1
    targets[1] = 0
    targets[2] = 1
    return logits, targets


@pytest.mark.parametrize(("positive", "negative"), [(4.0, 1.0), (1.0, 1.0), (2.0, 0.5)])
def test_two_way_loss_equals_timm(positive, negative):
    logits, targets = batch()
    ours = TwoWayLoss(positive_temperature=positive, negative_temperature=negative)
    theirs = timm.loss.TwoWayLoss(tp=positive, tn=negative)
    found, expected = (with_gradient(loss, logits, targets) for loss in (ours, theirs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("target", [0, 1])
def test_two_way_loss_without_pairs_is_zero(target):
    logits = torch.randn(3, 4, requires_grad=True)
    value = TwoWayLoss()(logits, torch.full((3, 4), target))
    value.backward()
    assert value.item() == 0
    assert not logits.grad.any()


def test_zlpr_matches_formula():
    logits, targets = batch()
    expected = 0.0
    for scores, row in zip(logits.tolist(), targets.tolist(), strict=True):
        positives = [0.0] + [score for score, y in zip(scores, row, strict=True) if y]
        negatives = [0.0] + [score for score, y in zip(scores, row, strict=True) if not y]
        differences = [negative - positive for negative in negatives for positive in positives]
        expected += math.log(sum(map(math.exp, differences)))
    assert ZLPR()(logits, targets).item() == pytest.approx(expected / len(logits), rel=1e-5)


@pytest.mark.parametrize(("gamma", "factor"), [(1.5, 0.7), (2.0, 2.0), (0.0, 1.0)])
def test_distribution_balanced_loss_matches_formula(gamma, factor):
    logits, targets = batch()
    options = {"alpha": 0.3, "beta": 5.0, "mu": 0.4, "negative_scale": 3.0, "kappa": 0.2}
    options |= {"gamma": gamma, "scale": factor, "reduction": "sum"}
    loss = DistributionBalancedLoss(**options, label_counts=lambda: COUNTS)

    expected = 0.0
    for scores, row in zip(logits.tolist(), targets.tolist(), strict=True):
        of_image = sum(y / n for y, n in zip(row, POSITIVES, strict=True))
        for s, y, n in zip(scores, row, POSITIVES, strict=True):
            r = 1 / n / of_image if of_image else math.inf
            weight = 0.3 + 1 / (1 + math.exp(-5.0 * (r - 0.4)))
            z = s - 0.2 / 3.0 * math.log(IMAGES / n - 1)
            divisor = 1.0 if y else -3.0
            right = 1 / (1 + math.exp(-z * divisor))
            expected -= factor * weight * (1 - right) ** gamma * math.log(right) / abs(divisor)
    assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-5)


def test_classes_without_positives_or_negatives_have_finite_weights():
    never_always = LabelCounts(torch.tensor([0, 20]), torch.tensor([20, 0]))
    loss = DistributionBalancedLoss(label_counts=lambda: never_always)
    assert loss(torch.zeros(2, 2), torch.tensor([[0, 1], [1, 1]])).isfinite()
