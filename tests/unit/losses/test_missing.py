"""Schedules of the losses for missing labels; tests/parity checks their values."""

from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from random_weights import with_gradient
from support import loss_of_option
from torchvision.ops import sigmoid_focal_loss

from mldec.losses import SPLC, LargeLoss

OPTIONS = Path(__file__).parents[3] / "configs" / "loss"
GENERATOR = torch.Generator().manual_seed(3)
LOGITS = 3 * torch.randn(8, 10, dtype=torch.float64, generator=GENERATOR)
OBSERVED = F.one_hot(torch.arange(8), 10).double()


def changed(loss, progress):
    """Return the labels whose gradients differ from the start of the run, bool [8, 10]."""
    gradients = []
    for share in (0.0, progress):
        loss.progress = share
        gradients.append(with_gradient(loss, LOGITS, OBSERVED)[1])
    return gradients[0] != gradients[1]


@pytest.mark.parametrize(
    "name",
    ["an", "wan", "an_ls", "em", "hill", "splc", "ll_r", "ll_ct", "gr"]
    + ["role", "em_apl", "ll_cp"],
)
def test_targets_of_0_and_unknown_targets_are_equivalent(name):
    loss = loss_of_option(OPTIONS / f"{name}.yaml", 10)
    loss.eval()
    loss.progress = 0.5
    unknown = torch.where(OBSERVED == 1, 1.0, torch.arange(10) % 2 - 1.0)
    assert (unknown == -1).any()
    assert (unknown == 0).any()
    assert loss(LOGITS, unknown).equal(loss(LOGITS, OBSERVED))


def test_focal_loss_matches_torchvision():
    loss = loss_of_option(OPTIONS / "focal.yaml")
    logits = LOGITS.clone().requires_grad_()
    expected = sigmoid_focal_loss(logits, OBSERVED, alpha=-1, gamma=2, reduction="sum")
    value, gradient = with_gradient(loss, LOGITS, OBSERVED)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_splc_corrects_labels_from_start():
    likely = (LOGITS.sigmoid() > 0.7) & (OBSERVED == 0)
    loss = SPLC(tau=0.7, start=0.1)
    steps = 37
    assert not changed(loss, (steps - 1) / (10 * steps)).any()
    assert changed(loss, steps / (10 * steps)).equal(likely)


@pytest.mark.parametrize("mode", ["reject", "correct"])
def test_number_of_large_losses_grows_with_progress(mode):
    order = LOGITS.masked_fill(OBSERVED == 1, -torch.inf).flatten().argsort(descending=True)
    loss = LargeLoss(mode=mode, delta=0.02, stages=10)
    for progress, count in ((0.0999, 0), (0.1, 2), (0.19, 2), (0.3, 5), (0.95, 15)):
        found = changed(loss, progress).flatten().nonzero().flatten()
        assert sorted(found.tolist()) == sorted(order[:count].tolist())


# A product of floats is slightly above an integer for some of these sizes.
@pytest.mark.parametrize("images", [8, 10, 16])
@pytest.mark.parametrize("classes", [20, 80, 100])
@pytest.mark.parametrize("delta", ["0.001", "0.002", "0.003", "0.004", "0.005"])
def test_number_of_rejected_labels_is_exact(images, classes, delta):
    loss = LargeLoss(delta=float(delta))
    logits = torch.linspace(-3, 3, images * classes, dtype=torch.float64).view(images, classes)
    for stage in range(10):
        loss.progress = stage / 10
        _, gradient = with_gradient(loss, logits, torch.zeros_like(logits))
        expected = ceil(Fraction(delta) * stage * images * classes)
        assert (gradient == 0).sum() == expected
