import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F

from mldec.errors import ConfigError, DataError
from mldec.losses.cross_entropy import CrossEntropy


def batch(dtype=torch.float64, seed=0, soft=False):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(6, 7, dtype=torch.float64, generator=generator)
    targets = F.one_hot(torch.randint(7, (6,), generator=generator), 7).double()
    if soft:
        targets = 0.3 * targets + 0.7 * targets.flip(0)  # as mixup does
    return logits.to(dtype).requires_grad_(), targets


def everything(loss, logits, targets):
    value = loss(logits, targets)
    (gradient,) = torch.autograd.grad(value, logits)
    return value, gradient


def test_mixed_labels_cost_what_they_cost_in_timm():
    logits, targets = batch(soft=True)
    torch.testing.assert_close(
        everything(CrossEntropy(), logits, targets),
        everything(timm.loss.SoftTargetCrossEntropy(), logits, targets),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_it_is_the_cross_entropy_of_torch_with_class_indices(smoothing):
    logits, targets = batch()
    found = everything(CrossEntropy(smoothing=smoothing), logits, targets)
    expected = everything(
        lambda x, y: F.cross_entropy(x, y.argmax(1), label_smoothing=smoothing), logits, targets
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets_follow_the_formula(smoothing):
    logits, targets = batch(soft=True)
    value, gradient = everything(CrossEntropy(smoothing=smoothing), logits, targets)
    total = 0.0
    for b in range(6):
        row = logits[b].tolist()
        norm = math.log(sum(math.exp(x) for x in row))
        for k, x in enumerate(row):
            y = targets[b, k].item() * (1 - smoothing) + smoothing / 7
            total -= y * (x - norm) / 6
            assert gradient[b, k].item() == pytest.approx((math.exp(x - norm) - y) / 6, abs=1e-12)
    assert value.item() == pytest.approx(total, rel=1e-10)


def test_the_default_does_not_smooth():
    logits, targets = batch()
    assert torch.equal(
        CrossEntropy()(logits, targets), CrossEntropy(smoothing=0.0)(logits, targets)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_formats_give_a_finite_float32_loss(dtype):
    logits, targets = batch(dtype)
    value, gradient = everything(CrossEntropy(), logits, targets.to(torch.int8))
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()
    assert value.item() == pytest.approx(F.cross_entropy(logits.double(), targets).item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extreme_logits_give_finite_losses_and_gradients(dtype, smoothing):
    logits = torch.tensor(
        [[100.0, -100, 0], [100, 100, 100], [-100, -100, -100]], dtype=dtype
    ).requires_grad_()
    for right in range(3):
        targets = F.one_hot(torch.full((3,), right), 3)
        value, gradient = everything(CrossEntropy(smoothing=smoothing), logits, targets)
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_logits_further_apart_than_float32_reaches_cost_nothing_where_they_are_right():
    logits = torch.tensor([[3e38, -3e38, 0]]).requires_grad_()
    value, gradient = everything(CrossEntropy(), logits, torch.tensor([[1, 0, 0]]))
    assert value == 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_cross_entropy_of_torch_to_the_bit(dtype, smoothing):
    torch.manual_seed(0)
    logits = (5 * torch.randn(16, 37, dtype=dtype)).requires_grad_()
    targets = F.one_hot(torch.randint(37, (16,)), 37).to(dtype)
    targets = 0.7 * targets + 0.3 * targets.roll(1, 0)
    value, gradient = everything(CrossEntropy(smoothing=smoothing), logits, targets)
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected, logits)[0])


def test_the_gradient_mode_is_left_as_it_was():
    logits, targets = batch()
    assert CrossEntropy()(logits, targets).requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert not CrossEntropy()(logits, targets).requires_grad
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("value", [2.0, -1.0, -0.5, math.nan])
def test_a_target_out_of_range_is_refused_with_its_value(value):
    logits, targets = batch()
    targets[2, 3] = value
    with pytest.raises(DataError, match=rf"target {value:g} ") as caught:
        CrossEntropy()(logits, targets)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "total"), [([0, 0, 0], "0"), ([1, 1, 0], "2"), ([0.5, 0, 0], "0.5")]
)
def test_labels_that_do_not_sum_to_1_are_refused_with_their_sum(labels, total):
    targets = torch.tensor([[1.0, 0, 0], [float(label) for label in labels]])
    with pytest.raises(DataError, match=rf"sum to {total}: .*loss=asl") as caught:
        CrossEntropy()(torch.randn(2, 3), targets)
    assert "\n" not in str(caught.value)


def test_targets_of_another_shape_are_refused():
    logits, targets = batch()
    with pytest.raises(DataError, match=r"\(6, 1\).*\(6, 7\)"):
        CrossEntropy()(logits, targets[:, :1])


@pytest.mark.parametrize("smoothing", [1.0, -0.1])
def test_smoothing_out_of_range_is_refused_with_its_value(smoothing):
    with pytest.raises(ConfigError, match=rf"loss\.smoothing {smoothing}") as caught:
        CrossEntropy(smoothing=smoothing)
    assert "\n" not in str(caught.value)
