"""The two-way loss against timm, the formula of the official code, and softmax cross-entropy."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.loss import TwoWayLoss as TimmTwoWayLoss

from mldec.errors import DataError
from mldec.losses.two_way import TwoWayLoss


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and targets; some rows and columns have no positive, some no negative."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(8, 6, dtype=torch.float64, generator=generator)
    targets = (torch.rand(8, 6, dtype=torch.float64, generator=generator) < 0.4).double()
    targets[:, 0], targets[:, 1] = 0, 1
    targets[0, 1:], targets[1] = 1, 0
    return logits.requires_grad_(), targets


def direction(logits: torch.Tensor, targets: torch.Tensor, *, tp: float, tn: float) -> float:
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
def test_value_is_the_formula_in_both_ways(tp: float, tn: float) -> None:
    logits, targets = batch()
    expected = direction(logits, targets, tp=tp, tn=tn) + direction(
        logits.T, targets.T, tp=tp, tn=tn
    )
    loss = TwoWayLoss(positive_temperature=tp, negative_temperature=tn)
    assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-12)


def test_value_and_gradient_are_those_of_timm() -> None:
    logits, targets = batch()
    ours = logits.float().detach().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    value, expected = TwoWayLoss()(ours, targets), TimmTwoWayLoss()(theirs, targets)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_within_an_image_of_one_label_it_is_softmax_cross_entropy() -> None:
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    targets = F.one_hot(torch.tensor([2]), 5)
    # One image has no other to be compared with: the class it shows has no negative.
    expected = F.cross_entropy(logits, torch.tensor([2]))
    torch.testing.assert_close(TwoWayLoss()(logits, targets), expected)


def test_gradients_are_those_of_differences() -> None:
    logits, targets = batch()
    assert torch.autograd.gradcheck(lambda values: TwoWayLoss()(values, targets), (logits,))


@pytest.mark.parametrize("target", [0, 1])
def test_without_anything_to_compare_loss_and_gradient_are_0(target: int) -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    value = TwoWayLoss()(logits, torch.full((3, 4), target))
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_large_logits_keep_float32_finite() -> None:
    logits = torch.tensor([[1e30, -1e30], [300.0, 5e4]], requires_grad=True)
    value = TwoWayLoss()(logits, torch.tensor([[0, 1], [1, 0]]))
    value.backward()
    assert logits.grad is not None
    assert value.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] > 0 > logits.grad[0, 1]


def test_targets_and_temperatures_are_checked() -> None:
    with pytest.raises(DataError, match=r"target 0\.5 is not allowed"):
        TwoWayLoss()(torch.zeros(1, 2), torch.tensor([[1, 0.5]]))
    with pytest.raises(ValueError, match=r"^negative_temperature is 0: it must be above 0$"):
        TwoWayLoss(negative_temperature=0)
