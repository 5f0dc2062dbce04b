"""Binary and softmax cross-entropy against their formulas and torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_weights import with_gradient

from mldec.losses import AsymmetricLoss
from mldec.losses.common import LabelCounts
from mldec.losses.cross_entropy import BinaryCrossEntropy, CrossEntropy

WEIGHTS = [0.5, 1.0, 2.0, 0.0, 3.5]


def batch(soft=False, unknown=False):
    """Return logits and targets [8, 5]: multi-hot, in [0, 1] (`soft`), with -1 (`unknown`)."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(8, 5, dtype=torch.float64, generator=generator)
    targets = torch.rand(8, 5, dtype=torch.float64, generator=generator)
    if not soft:
        targets = (targets < 0.3).double()
    if unknown:
        targets[torch.rand(8, 5, generator=generator) < 0.4] = -1
    return logits, targets


def naive(logits, targets, *, smoothing=0.0, target_threshold=None, class_weights=None):
    """Return the sum of the binary loss and its gradient, one element at a time."""
    total = 0.0
    gradient = torch.zeros(logits.shape, dtype=torch.float64)
    for b, row in enumerate(logits.tolist()):
        for k, x in enumerate(row):
            y = targets[b, k].item()
            if y == -1:
                continue
            if target_threshold is not None:
                y = 1.0 if y > target_threshold else 0.0
            y = y * (1 - smoothing) + smoothing / 2
            weight = 1.0 if class_weights is None else class_weights[k]
            p = 1 / (1 + math.exp(-x))
            total -= weight * (y * math.log(p) + (1 - y) * math.log(1 - p))
            gradient[b, k] = weight * (p - y)
    return total, gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target_threshold", [None, 0.2])
@pytest.mark.parametrize("class_weights", [None, WEIGHTS])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("unknown", [False, True])
def test_value_and_gradient_match_formula(
    smoothing, target_threshold, class_weights, soft, unknown
):
    options = {"smoothing": smoothing, "target_threshold": target_threshold}
    options["class_weights"] = class_weights
    logits, targets = batch(soft=soft, unknown=unknown)
    value, gradient = with_gradient(BinaryCrossEntropy(reduction="sum", **options), logits, targets)
    expected, slope = naive(logits, targets, **options)
    assert value.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-7, atol=1e-10)
    # Unannotated labels count as 0 in the mean.
    mean = with_gradient(BinaryCrossEntropy(**options), logits, targets)
    torch.testing.assert_close(mean, (value / 40, gradient / 40), rtol=1e-10, atol=1e-15)
    # Their loss is 0 for any logit.
    far = torch.where(targets == -1, math.inf, logits).detach()
    torch.testing.assert_close(BinaryCrossEntropy(**options)(far, targets), mean[0])


def test_focused_bce_matches_asymmetric_loss():
    torch.manual_seed(0)
    logits = (4 * torch.randn(8, 5, dtype=torch.float64)).requires_grad_()
    targets = (torch.rand(8, 5) < 0.3).double()
    focused = with_gradient(BinaryCrossEntropy(gamma_neg=2.0, reduction="sum"), logits, targets)
    expected = with_gradient(AsymmetricLoss(gamma_neg=2.0, clip=0.0), logits, targets)
    torch.testing.assert_close(focused, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("pos_weight", [3.0, "auto"])
def test_pos_weight_matches_torch(pos_weight):
    logits, targets = batch(soft=True)
    counts = LabelCounts(torch.tensor([1, 2, 4, 8, 10]), torch.tensor([19, 18, 16, 12, 10]))
    options = {"pos_weight": pos_weight, "pos_weight_cap": 10.0, "label_counts": lambda: counts}
    loss = BinaryCrossEntropy(**options)
    weights = torch.tensor([10, 9, 4, 1.5, 1] if pos_weight == "auto" else 3.0)
    expected = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)
    torch.testing.assert_close(loss(logits, targets), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_is_mean_over_images(dtype, smoothing):
    torch.manual_seed(0)
    logits = (5 * torch.randn(16, 37, dtype=dtype)).requires_grad_()
    targets = F.one_hot(torch.randint(37, (16,)), 37).to(dtype)
    targets = 0.7 * targets + 0.3 * targets.roll(1, 0)  # as mixup does
    value, gradient = with_gradient(CrossEntropy(smoothing=smoothing), logits, targets)
    smooth = targets * (1 - smoothing) + smoothing / 37
    expected = -(smooth * logits.log_softmax(-1)).sum() / 16
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
