"""Losses for missing labels; `tests/parity` compares them with the authors' code."""

from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from random_weights import with_gradient
from support import loss_of_option
from torchvision.ops import sigmoid_focal_loss

from mldec.losses import SPLC, AssumeNegative, GeneralizedRobustLoss, HillLoss, LargeLoss

OPTIONS = Path(__file__).parents[3] / "configs" / "loss"
GENERATOR = torch.Generator().manual_seed(3)
LOGITS = 3 * torch.randn(8, 10, dtype=torch.float64, generator=GENERATOR)
OBSERVED = F.one_hot(torch.arange(8), 10).double()


def changed(loss, progress):
    """Return which losses differ from those of the start of the run, bool [8, 10]."""
    gradients = []
    for share in (0.0, progress):
        loss.progress = share
        gradients.append(with_gradient(loss, LOGITS, OBSERVED)[1])
    before, after = gradients
    return before != after


@pytest.mark.parametrize(
    "name", ["an", "wan", "an_ls", "em", "hill", "splc", "ll_r", "ll_ct", "gr"]
)
def test_what_is_not_annotated_is_not_observed(name):
    loss = loss_of_option(OPTIONS / f"{name}.yaml")
    loss.progress = 0.5
    unknown = torch.where(OBSERVED == 1, 1.0, torch.arange(10) % 2 - 1.0)
    assert (unknown == -1).any()
    assert (unknown == 0).any()
    assert loss(LOGITS, unknown).equal(loss(LOGITS, OBSERVED))


def test_focal_is_that_of_torchvision():
    loss = loss_of_option(OPTIONS / "focal.yaml")
    logits = LOGITS.clone().requires_grad_()
    expected = sigmoid_focal_loss(logits, OBSERVED, alpha=-1, gamma=2, reduction="sum")
    value, gradient = with_gradient(loss, LOGITS, OBSERVED)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_assume_negative_is_binary_cross_entropy_with_weights():
    logits, share = LOGITS, 0.1
    smooth = OBSERVED * (1 - share) + (1 - OBSERVED) * share
    for weight, factor in ((None, 1 / 9), (0.25, 0.25), (1.0, 1.0)):
        losses = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none")
        expected = torch.where(OBSERVED == 1, losses, factor * losses).mean()
        loss = AssumeNegative(weight=weight, smoothing=share, eps=0)
        torch.testing.assert_close(loss(logits, OBSERVED), expected)


def test_the_hill_is_flat_where_a_label_is_probably_missing():
    logits = torch.tensor([2 / 3 * 1.2], dtype=torch.float64).logit()[None]
    _, gradient = with_gradient(HillLoss(lam=1.2), logits, torch.zeros(1, 1))
    assert gradient.item() == pytest.approx(0, abs=1e-12)


def test_labels_are_corrected_from_the_start_of_the_second_epoch_on():
    likely = (LOGITS.sigmoid() > 0.7) & (OBSERVED == 0)
    loss = SPLC(tau=0.7, start=0.1)
    steps = 37
    assert not changed(loss, (steps - 1) / (10 * steps)).any()
    assert changed(loss, steps / (10 * steps)).equal(likely)


@pytest.mark.parametrize("mode", ["reject", "correct"])
def test_the_largest_losses_are_distrusted_more_and_more(mode):
    order = LOGITS.masked_fill(OBSERVED == 1, -torch.inf).flatten().argsort(descending=True)
    loss = LargeLoss(mode=mode, delta=0.02, stages=10)
    for progress, count in ((0.0999, 0), (0.1, 2), (0.19, 2), (0.3, 5), (0.95, 15)):
        found = changed(loss, progress).flatten().nonzero().flatten()
        assert sorted(found.tolist()) == sorted(order[:count].tolist())


# With some of these sizes a product of floats is just above a whole number.
@pytest.mark.parametrize("images", [8, 10, 16])
@pytest.mark.parametrize("classes", [20, 80, 100])
@pytest.mark.parametrize("delta", ["0.001", "0.003", "0.005"])
def test_number_of_rejected_labels_is_exact(images, classes, delta):
    loss = LargeLoss(delta=float(delta))
    logits = torch.linspace(-3, 3, images * classes, dtype=torch.float64).view(images, classes)
    for stage in range(10):
        loss.progress = stage / 10
        _, gradient = with_gradient(loss, logits, torch.zeros_like(logits))
        expected = ceil(Fraction(delta) * stage * images * classes)
        assert (gradient == 0).sum() == expected


def test_a_label_is_weighed_between_positive_and_negative():
    # With k = 1 a label is a positive of the generalised cross-entropy, with k = 0 a negative.
    for offset, sign in ((50.0, 1), (-50.0, -1)):
        options = {"w": [0, 0], "b": [offset] * 2, "mu": [0, 0], "sigma": [1e6] * 2}
        loss = GeneralizedRobustLoss(**options, q2=0.5, q3=0.5)
        right = (sign * LOGITS).sigmoid()
        expected = ((1 - right**0.5) / 0.5).masked_fill(OBSERVED == 1, 0)
        expected += torch.where(OBSERVED == 1, -LOGITS.sigmoid().log(), 0)
        torch.testing.assert_close(loss(LOGITS, OBSERVED), expected.mean(), rtol=1e-5, atol=1e-5)
