"""Asymmetric losses against their formulas and timm."""

import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F
from random_weights import with_gradient

from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel
from mldec.losses.common import LabelCounts

GAMMAS = [(4.0, 0.0), (0.0, 0.0), (2.0, 3.0), (0.5, 0.5), (0.0, 2.0)]
CLIPS = [0.0, 0.05, 0.3]


def batch(dtype=torch.float64, exclusive=False, soft=False, classes=11):
    """Return logits and targets [6, K]: multi-hot, one-hot (`exclusive`) or in [0, 1] (`soft`)."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, classes, dtype=torch.float64, generator=generator)
    targets = torch.rand(6, classes, generator=generator).double()
    if exclusive:
        targets = F.one_hot(targets.argmax(1), classes).double()
    elif not soft:
        targets = (targets < 0.3).double()
    return logits.to(dtype), targets


def element(x, y, gamma_neg, gamma_pos, clip, focal_grad):
    """Return the loss of one logit and its derivative in closed form."""
    p = 1 / (1 + math.exp(-x))
    slope = p * (1 - p)  # of the probability
    if y == 1:
        wrong, gamma, sign, log = 1 - p, gamma_pos, 1, math.log(p)
        gradient = -(wrong**gamma) * (1 - p)
    else:
        wrong, gamma, sign = max(p - clip, 0.0), gamma_neg, -1
        if wrong == 0:
            return 0.0, 0.0
        log = math.log(1 - wrong)
        gradient = wrong**gamma / (1 - wrong) * slope
    if focal_grad:
        gradient += sign * gamma * wrong ** (gamma - 1) * slope * log
    return -(wrong**gamma) * log, gradient


@pytest.mark.parametrize(("gamma_neg", "gamma_pos"), GAMMAS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("focal_grad", [False, True])
def test_value_and_gradient_match_formula(gamma_neg, gamma_pos, clip, focal_grad):
    logits, targets = batch()
    options = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
    loss = AsymmetricLoss(**options, focal_grad=focal_grad)
    value, gradient = with_gradient(loss, logits, targets)
    pairs = zip(logits.flatten().tolist(), targets.flatten().tolist(), strict=True)
    expected = [element(x, y, **options, focal_grad=focal_grad) for x, y in pairs]
    losses, slopes = zip(*expected, strict=True)
    assert value.item() == pytest.approx(sum(losses), rel=1e-9)
    assert gradient.flatten().tolist() == pytest.approx(slopes, rel=1e-7, abs=1e-12)


def soft_element(x, y, gamma_neg, gamma_pos, clip):
    """Return the official loss of one logit for a target in [0, 1]."""
    p = 1 / (1 + math.exp(-x))
    q = min(1 - p + clip, 1.0)
    weight = (1 - (y * p + (1 - y) * q)) ** (y * gamma_pos + (1 - y) * gamma_neg)
    return -weight * (y * math.log(p) + (1 - y) * math.log(q))


@pytest.mark.parametrize(("gamma_neg", "gamma_pos"), GAMMAS)
@pytest.mark.parametrize("clip", CLIPS)
def test_soft_targets_match_official_formula(gamma_neg, gamma_pos, clip):
    logits, targets = batch(soft=True)
    targets[:, 0] = 0
    targets[:, 1] = 1
    options = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
    pairs = zip(logits.flatten().tolist(), targets.flatten().tolist(), strict=True)
    expected = sum(soft_element(x, y, **options) for x, y in pairs)
    assert AsymmetricLoss(**options)(logits, targets).item() == pytest.approx(expected)
    if clip == 0:
        loss = AsymmetricLoss(**options, focal_grad=True)
        assert torch.autograd.gradcheck(lambda x: loss(x, targets), logits.requires_grad_())


@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_is_zero_at_soft_target(clip):
    targets = torch.tensor([[0.35, 0.5, 0.7]], dtype=torch.float64)
    for offset, sign in ((-0.01, -1), (0.0, 0), (0.01, 1)):
        logits = (targets * (1 + clip) + offset).logit()
        _, gradient = with_gradient(AsymmetricLoss(clip=clip), logits, targets)
        assert (gradient.sign() == sign).all() if sign else gradient.abs().max() < 1e-12


def test_defaults_are_coco_recipe_and_mean_is_scaled_sum():
    logits, targets = batch()
    recipe = {"gamma_neg": 4, "gamma_pos": 0, "clip": 0.05, "focal_grad": False, "eps": 1e-8}
    total = with_gradient(AsymmetricLoss(), logits, targets)
    explicit = with_gradient(AsymmetricLoss(**recipe, reduction="sum"), logits, targets)
    mean = with_gradient(AsymmetricLoss(reduction="mean"), logits, targets)
    for whole, same, part in zip(total, explicit, mean, strict=True):
        assert torch.equal(whole, same)
        torch.testing.assert_close(part, whole / logits.numel(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("eps", [1e-8, 1e-5])
def test_eps_bounds_loss_of_positive(eps):
    value = AsymmetricLoss(eps=eps)(torch.tensor([[-1000.0]]), torch.ones(1, 1))
    assert value.item() == pytest.approx(-math.log(eps), rel=1e-6)


@pytest.mark.parametrize("pos_weight", [1.0, 3.0, "auto"])
@pytest.mark.parametrize("focal_grad", [False, True])
def test_pos_weight_matches_timm(pos_weight, focal_grad):
    logits, targets = batch(torch.float32, classes=3)
    counts = LabelCounts(torch.tensor([1, 4, 10]), torch.tensor([39, 36, 30]))
    weights = torch.tensor([20.0, 9, 3] if pos_weight == "auto" else pos_weight)
    options = {"pos_weight": pos_weight, "pos_weight_cap": 20.0, "label_counts": lambda: counts}
    ours = AsymmetricLoss(gamma_pos=1.0, focal_grad=focal_grad, **options)
    theirs = timm.loss.AsymmetricLossMultiLabel(
        pos_weight=weights, disable_torch_grad_focal_loss=not focal_grad, reduction="sum"
    )
    found, expected = (with_gradient(loss, logits, targets.float()) for loss in (ours, theirs))
    torch.testing.assert_close(found, expected)
    assert not AsymmetricLoss().state_dict()


def test_single_label_loss_has_official_defaults_and_is_finite():
    logits, targets = batch(exclusive=True)
    official = AsymmetricLossSingleLabel(gamma_neg=4, gamma_pos=0, smoothing=0.1)
    assert torch.equal(AsymmetricLossSingleLabel()(logits, targets), official(logits, targets))

    far = torch.tensor([[3e38, -3e38, 0]])
    loss = AsymmetricLossSingleLabel(smoothing=0.0)
    value, gradient = with_gradient(loss, far, torch.tensor([[1, 0, 0]]))
    assert value == 0
    assert gradient.isfinite().all()
