"""ZLPR against timm, the pairwise form of the paper, and plain sums."""

import math

import pytest
import torch
from timm.loss import ZlprLoss

from mldec.errors import ConfigError, DataError
from mldec.losses.zlpr import ZLPR


def batch(*, soft: bool = False, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(8, 5, dtype=torch.float64, generator=generator)
    targets = torch.rand(8, 5, dtype=torch.float64, generator=generator)
    if not soft:
        targets = (targets < 0.4).double()
        targets[0], targets[1] = 0, 1
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("soft", [False, True])
def test_value_is_the_formula(soft: bool) -> None:
    logits, targets = batch(soft=soft)
    expected = 0.0
    for scores, row in zip(logits.tolist(), targets.tolist(), strict=True):
        pairs = list(zip(scores, row, strict=True))
        expected += math.log(1 + sum(y * math.exp(-s) for s, y in pairs))
        expected += math.log(1 + sum((1 - y) * math.exp(s) for s, y in pairs))
    assert ZLPR(reduction="sum")(logits, targets).item() == pytest.approx(expected, rel=1e-12)
    assert ZLPR()(logits, targets).item() == pytest.approx(expected / 8, rel=1e-12)


def test_it_compares_each_positive_with_each_negative_and_both_with_zero() -> None:
    logits, targets = batch()
    expected = 0.0
    for scores, row in zip(logits.tolist(), targets.tolist(), strict=True):
        positives = [0.0] + [score for score, y in zip(scores, row, strict=True) if y]
        negatives = [0.0] + [score for score, y in zip(scores, row, strict=True) if not y]
        differences = [negative - positive for negative in negatives for positive in positives]
        expected += math.log(sum(map(math.exp, differences)))
    assert ZLPR(reduction="sum")(logits, targets).item() == pytest.approx(expected, rel=1e-12)


def test_value_and_gradient_are_those_of_timm() -> None:
    logits, targets = batch()
    ours = logits.float().detach().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    value, expected = ZLPR()(ours, targets), ZlprLoss()(theirs, targets)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("soft", [False, True])
def test_gradients_are_those_of_differences(soft: bool) -> None:
    logits, targets = batch(soft=soft)
    assert torch.autograd.gradcheck(lambda values: ZLPR()(values, targets), (logits,))


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_large_logits_keep_float32_finite(target: float) -> None:
    logits = torch.tensor([[1e30, -1e30, 500.0]], requires_grad=True)
    value = ZLPR()(logits, torch.full((1, 3), target))
    value.backward()
    assert value.item() == pytest.approx(1e30)
    assert logits.grad is not None
    # Only the worst logit counts: the highest negative, or the lowest positive.
    assert logits.grad.tolist() == ([[0, -1, 0]] if target else [[1, 0, 0]])


def test_targets_and_reductions_are_checked() -> None:
    with pytest.raises(DataError, match="target -1 is not allowed: this loss takes 0 to 1"):
        ZLPR()(torch.zeros(1, 2), torch.tensor([[1, -1]]))
    with pytest.raises(ConfigError, match="reduction 'none' is unknown"):
        ZLPR(reduction="none")  # type: ignore[arg-type]
