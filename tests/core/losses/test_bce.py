import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target

from mldec.errors import ConfigError, DataError
from mldec.losses.common import LabelCounts
from mldec.losses.cross_entropy import BinaryCrossEntropy

WEIGHTS = [0.5, 1.0, 2.0, 0.0, 3.5]


def batch(dtype=torch.float64, seed=0, soft=False, unknown=False):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(8, 5, dtype=torch.float64, generator=generator)
    targets = torch.rand(8, 5, dtype=torch.float64, generator=generator)
    if not soft:
        targets = (targets < 0.3).double()
    if unknown:
        targets[torch.rand(8, 5, generator=generator) < 0.4] = -1
    return logits.to(dtype).requires_grad_(), targets


def everything(loss, logits, targets):
    value = loss(logits, targets)
    (gradient,) = torch.autograd.grad(value, logits)
    return value, gradient


def naive(logits, targets, *, smoothing=0.0, target_threshold=None, class_weights=None):
    """Sum of the loss and its gradient, one element at a time."""
    total, gradient = 0.0, torch.zeros(logits.shape, dtype=torch.float64)
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


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("target_threshold", [None, 0.2])
@pytest.mark.parametrize("class_weights", [None, WEIGHTS])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("unknown", [False, True])
def test_value_and_gradient_are_those_of_the_formula(
    smoothing, target_threshold, class_weights, soft, unknown
):
    options = {
        "smoothing": smoothing,
        "target_threshold": target_threshold,
        "class_weights": class_weights,
    }
    logits, targets = batch(soft=soft, unknown=unknown)
    value, gradient = everything(BinaryCrossEntropy(reduction="sum", **options), logits, targets)
    expected, slope = naive(logits, targets, **options)
    assert value.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=1e-7, atol=1e-10)
    mean = everything(BinaryCrossEntropy(**options), logits, targets)
    torch.testing.assert_close(mean, (value / 40, gradient / 40), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("soft", [False, True])
def test_it_is_the_binary_cross_entropy_of_torch(reduction, soft):
    logits, targets = batch(soft=soft)
    found = everything(BinaryCrossEntropy(reduction=reduction), logits, targets)
    expected = everything(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction=reduction), logits, targets
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"smoothing": 0.1}, {"target_threshold": 0.2}, {"class_weights": WEIGHTS}]
)
def test_unannotated_labels_cost_exactly_nothing(options):
    logits, targets = batch(unknown=True)
    loss = BinaryCrossEntropy(reduction="sum", **options)
    value, gradient = everything(loss, logits, targets)
    assert (gradient[targets == -1] == 0).all()
    elsewhere = torch.where(targets == -1, 50 * torch.randn(8, 5), logits).detach()
    assert torch.equal(loss(elsewhere, targets), value)
    assert loss(logits, torch.full_like(targets, -1)).item() == 0


def test_unannotated_labels_count_as_0_in_the_mean():
    logits, targets = batch(unknown=True)
    total = F.binary_cross_entropy_with_logits(
        logits[targets >= 0], targets[targets >= 0], reduction="sum"
    )
    torch.testing.assert_close(
        BinaryCrossEntropy()(logits, targets), total / 40, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("target_threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_labels_cost_what_they_cost_in_timm(smoothing, target_threshold):
    """Labels softened and mixed by timm's Mixup; its loss is the mean over images and classes."""
    logits, _ = batch()
    labels = torch.arange(8) % 5
    for lam in (0.05, 0.19, 0.21, 0.5, 0.95):
        targets = mixup_target(labels, 5, lam, smoothing)
        found = everything(BinaryCrossEntropy(target_threshold=target_threshold), logits, targets)
        theirs = timm.loss.BinaryCrossEntropy(smoothing=0.0, target_threshold=target_threshold)
        expected = everything(theirs, logits, targets.double())
        torch.testing.assert_close(found, expected)


def test_a_soft_target_counts_as_1_only_above_the_threshold():
    logits = torch.zeros(1, 4, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([[0.0, 0.25, 0.250001, 1.0]])
    _, gradient = everything(
        BinaryCrossEntropy(target_threshold=0.25, reduction="sum"), logits, targets
    )
    assert gradient.tolist() == [[0.5, 0.5, -0.5, -0.5]]


def test_smoothing_moves_targets_towards_a_half():
    logits = torch.zeros(1, 2, dtype=torch.float64).requires_grad_()
    _, gradient = everything(
        BinaryCrossEntropy(smoothing=0.2, reduction="sum"), logits, torch.tensor([[0, 1]])
    )
    assert gradient.flatten().tolist() == pytest.approx([0.5 - 0.1, 0.5 - 0.9])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_formats_give_a_finite_float32_loss(dtype):
    logits, targets = batch(dtype, unknown=True)
    value, gradient = everything(
        BinaryCrossEntropy(class_weights=WEIGHTS), logits, targets.to(torch.int8)
    )
    assert value.dtype == torch.float32
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()
    exact, _ = naive(logits, targets, class_weights=WEIGHTS)
    assert value.item() == pytest.approx(exact / 40, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"smoothing": 0.1}, {"target_threshold": 0.2}, {"reduction": "sum"}]
)
def test_extreme_logits_give_finite_losses_and_gradients(dtype, options):
    logits = torch.tensor(
        [[100.0, -100], [100, -100], [100, -100], [0, 0]], dtype=dtype
    ).requires_grad_()
    targets = torch.tensor([[0, 0], [1, 1], [-1, -1], [0, 1]])
    value, gradient = everything(BinaryCrossEntropy(**options), logits, targets)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 0] > 0 > gradient[1, 1]  # a hopeless error still has a gradient


@pytest.mark.parametrize(
    "options", [{}, {"smoothing": 0.1}, {"target_threshold": 0.2}, {"reduction": "sum"}]
)
def test_the_largest_logits_without_a_label_cost_nothing(options):
    logits = torch.tensor([[3e38, -3e38, math.inf, 0.0]]).requires_grad_()
    value, gradient = everything(
        BinaryCrossEntropy(**options), logits, torch.tensor([[-1, -1, -1, -1]])
    )
    assert value == 0
    assert torch.equal(gradient, torch.zeros(1, 4))


def test_the_gradient_mode_is_left_as_it_was():
    logits, targets = batch()
    assert BinaryCrossEntropy()(logits, targets).requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert not BinaryCrossEntropy()(logits, targets).requires_grad
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("value", [2.0, -0.5, -2.0, 1.001, math.nan])
def test_a_target_out_of_range_is_refused_with_its_value(value):
    logits, targets = batch()
    targets[2, 3] = value
    with pytest.raises(DataError, match=rf"target {value:g} ") as caught:
        BinaryCrossEntropy()(logits, targets)
    assert "\n" not in str(caught.value)


def test_targets_of_another_shape_are_refused():
    logits, targets = batch()
    with pytest.raises(DataError, match=r"\(8, 1\).*\(8, 5\)"):
        BinaryCrossEntropy()(logits, targets[:, :1])


@pytest.mark.parametrize("count", [1, 4, 6])
def test_a_wrong_number_of_class_weights_is_refused_with_both_numbers(count):
    logits, targets = batch()
    with pytest.raises(
        ConfigError, match=rf"loss\.class_weights has {count} values for 5 classes"
    ) as caught:
        BinaryCrossEntropy(class_weights=[1.0] * count)(logits, targets)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"smoothing": 1.0}, ["loss.smoothing", "1.0"]),
        ({"smoothing": -0.1}, ["loss.smoothing", "-0.1"]),
        ({"target_threshold": 0.0}, ["loss.target_threshold", "0.0"]),
        ({"target_threshold": 1.0}, ["loss.target_threshold", "1.0"]),
        ({"reduction": "none"}, ["loss.reduction", "none", "mean", "sum"]),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_name_and_value(options, names):
    with pytest.raises(ConfigError) as caught:
        BinaryCrossEntropy(**options)
    assert "\n" not in str(caught.value)
    assert [name for name in names if name not in str(caught.value)] == []


@pytest.mark.parametrize("pos_weight", [3.0, "auto"])
def test_positives_weigh_as_in_torch(pos_weight):
    logits, targets = batch(soft=True)
    counts = LabelCounts(torch.tensor([1, 2, 4, 8, 10]), torch.tensor([19, 18, 16, 12, 10]))
    loss = BinaryCrossEntropy(
        pos_weight=pos_weight, pos_weight_cap=10.0, label_counts=lambda: counts
    )
    weights = torch.tensor([10, 9, 4, 1.5, 1]) if pos_weight == "auto" else torch.tensor(3.0)
    expected = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)
    torch.testing.assert_close(loss(logits, targets), expected)
    assert torch.autograd.gradcheck(lambda values: loss(values, targets), (logits,))


def test_the_weight_of_positives_leaves_the_unannotated_out():
    logits, targets = batch(unknown=True)
    weighted, plain = BinaryCrossEntropy(pos_weight=2.0), BinaryCrossEntropy()
    positives = plain(logits, torch.where(targets == 1, targets, -1))
    torch.testing.assert_close(weighted(logits, targets), plain(logits, targets) + positives)


def test_the_weights_of_positives_must_be_of_the_classes():
    counts = LabelCounts(torch.ones(4), torch.ones(4))
    loss = BinaryCrossEntropy(pos_weight="auto", label_counts=lambda: counts)
    with pytest.raises(ConfigError, match=r"loss\.pos_weight has 4 values for 5 classes"):
        loss(*batch())
