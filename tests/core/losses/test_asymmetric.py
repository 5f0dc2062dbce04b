import inspect
import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F

from mldec.errors import ConfigError, DataError
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel
from mldec.losses.common import LabelCounts

GAMMAS = [(4.0, 0.0), (4.0, 1.0), (0.0, 0.0), (2.0, 3.0), (0.5, 0.5), (0.0, 2.0), (1.0, 0.0)]
CLIPS = [0.0, 0.05, 0.3]
EPS = 1e-8


def batch(dtype=torch.float64, seed=0, shape=(6, 11), exclusive=False, soft=False):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(*shape, dtype=torch.float64, generator=generator)
    if exclusive:
        targets = F.one_hot(
            torch.randint(shape[1], (shape[0],), generator=generator), shape[1]
        ).double()
    else:
        targets = torch.rand(*shape, generator=generator).double()
        if not soft:
            targets = (targets < 0.3).double()
    return logits.to(dtype).requires_grad_(), targets


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def one_element(x, y, gamma_neg, gamma_pos, clip, focal_grad):
    """The loss of one logit and its derivative, in closed form."""
    p = sigmoid(x)
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


def everything(loss, logits, targets):
    value = loss(logits, targets)
    (gradient,) = torch.autograd.grad(value, logits)
    return value, gradient


# Values and gradients


@pytest.mark.parametrize(("gamma_neg", "gamma_pos"), GAMMAS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("focal_grad", [False, True])
def test_value_and_gradient_are_those_of_the_formula(gamma_neg, gamma_pos, clip, focal_grad):
    logits, targets = batch()
    loss = AsymmetricLoss(
        gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=clip, focal_grad=focal_grad
    )
    value, gradient = everything(loss, logits, targets)
    expected = [
        one_element(x, y, gamma_neg, gamma_pos, clip, focal_grad)
        for x, y in zip(logits.flatten().tolist(), targets.flatten().tolist(), strict=True)
    ]
    assert value.item() == pytest.approx(sum(item for item, _ in expected), rel=1e-9)
    assert gradient.flatten().tolist() == pytest.approx(
        [item for _, item in expected], rel=1e-7, abs=1e-12
    )


@pytest.mark.parametrize(("gamma_neg", "gamma_pos"), GAMMAS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("focal_grad", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_value_and_gradient_are_those_of_timm(gamma_neg, gamma_pos, clip, focal_grad, soft):
    if "reduction" not in inspect.signature(timm.loss.AsymmetricLossMultiLabel).parameters:
        pytest.skip("this timm has no reduction='sum'")
    theirs = timm.loss.AsymmetricLossMultiLabel(
        gamma_neg, gamma_pos, clip, disable_torch_grad_focal_loss=not focal_grad, reduction="sum"
    )
    ours = AsymmetricLoss(
        gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=clip, focal_grad=focal_grad
    )
    logits, targets = batch(torch.float32, soft=soft)
    for found, expected in zip(
        everything(ours, logits, targets), everything(theirs, logits, targets), strict=True
    ):
        # A power below 1 has an endless slope at 0: there timm's gradient is not a number.
        assert found.isfinite().all()
        usable = expected.isfinite()
        assert usable.double().mean() > 0.5
        torch.testing.assert_close(found[usable], expected[usable], rtol=1e-5, atol=1e-6)


def soft_element(x, y, gamma_neg, gamma_pos, clip):
    """The official code on one logit, with a target anywhere from 0 to 1."""
    p = sigmoid(x)
    q = min(1 - p + clip, 1.0)
    weight = (1 - (y * p + (1 - y) * q)) ** (y * gamma_pos + (1 - y) * gamma_neg)
    return -weight * (y * math.log(p) + (1 - y) * math.log(q))


@pytest.mark.parametrize(("gamma_neg", "gamma_pos"), GAMMAS)
@pytest.mark.parametrize("clip", CLIPS)
def test_soft_targets_follow_the_official_formula(gamma_neg, gamma_pos, clip):
    logits, targets = batch(soft=True)
    # Targets of 0 and 1 may be among the others, as where images of the same class are mixed.
    targets[:, 0], targets[:, 1] = 0, 1
    options = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
    expected = [
        soft_element(x, y, **options)
        for x, y in zip(logits.flatten().tolist(), targets.flatten().tolist(), strict=True)
    ]
    assert AsymmetricLoss(**options)(logits, targets).item() == pytest.approx(sum(expected))
    if clip == 0:
        loss = AsymmetricLoss(**options, focal_grad=True)
        assert torch.autograd.gradcheck(lambda x: loss(x, targets), logits)


@pytest.mark.parametrize("clip", CLIPS)
def test_the_loss_of_a_soft_target_draws_the_probability_to_it(clip):
    targets = torch.tensor([[0.35, 0.5, 0.7]], dtype=torch.float64)
    loss = AsymmetricLoss(clip=clip)
    best = targets * (1 + clip)

    for offset, sign in ((-0.01, -1), (0.0, 0), (0.01, 1)):
        logits = (best + offset).logit().requires_grad_()
        _, gradient = everything(loss, logits, targets)
        if sign:
            assert (gradient.sign() == sign).all()
        else:
            assert gradient.abs().max() < 1e-12


def test_the_defaults_are_the_coco_recipe():
    logits, targets = batch()
    recipe = AsymmetricLoss(
        gamma_neg=4, gamma_pos=0, clip=0.05, focal_grad=False, reduction="sum", eps=1e-8
    )
    for found, expected in zip(
        everything(AsymmetricLoss(), logits, targets),
        everything(recipe, logits, targets),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_without_focusing_and_clip_it_is_binary_cross_entropy():
    logits, targets = batch()
    value, gradient = everything(AsymmetricLoss(gamma_neg=0, gamma_pos=0, clip=0), logits, targets)
    expected = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient, logits.detach().sigmoid() - targets, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("gamma_neg", "gamma_pos"), [(4, 0), (2, 3), (1.5, 0.5)])
def test_the_gradient_through_the_focal_weight_is_the_slope_of_the_value(gamma_neg, gamma_pos):
    logits, targets = batch()
    loss = AsymmetricLoss(gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=0.0, focal_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(x, targets), logits)
    detached = AsymmetricLoss(gamma_neg=gamma_neg, gamma_pos=gamma_pos, clip=0.0)
    assert torch.equal(loss(logits, targets), detached(logits, targets))
    assert not torch.allclose(
        everything(loss, logits, targets)[1], everything(detached, logits, targets)[1]
    )


@pytest.mark.parametrize("gamma_neg", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("focal_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [0.05, 0.3])
def test_negatives_below_the_clip_cost_exactly_nothing(gamma_neg, focal_grad, dtype, clip):
    edge = math.log(clip / (1 - clip))
    logits = torch.tensor(
        [[-100.0, -50, -20, -10, -5, edge - 0.5, edge - 1e-3]], dtype=dtype
    ).requires_grad_()
    loss = AsymmetricLoss(gamma_neg=gamma_neg, clip=clip, focal_grad=focal_grad)
    value, gradient = everything(loss, logits, torch.zeros_like(logits))
    assert value.item() == 0
    assert (gradient == 0).all()
    above = torch.tensor([[edge + 1e-2]], dtype=dtype).requires_grad_()
    value, gradient = everything(loss, above, torch.zeros_like(above))
    assert value > 0
    assert gradient.item() > 0


@pytest.mark.parametrize("options", [{}, {"gamma_pos": 1.0}, {"focal_grad": True}])
def test_mean_is_the_sum_over_the_number_of_elements(options):
    logits, targets = batch()
    total = everything(AsymmetricLoss(**options), logits, targets)
    mean = everything(AsymmetricLoss(reduction="mean", **options), logits, targets)
    for whole, part in zip(total, mean, strict=True):
        torch.testing.assert_close(part, whole / logits.numel(), rtol=1e-12, atol=0)


def test_eps_bounds_the_loss_of_a_hopeless_positive():
    logits = torch.tensor([[-1000.0]])
    for eps in (1e-8, 1e-5):
        value = AsymmetricLoss(eps=eps)(logits, torch.ones(1, 1))
        assert value.item() == pytest.approx(-math.log(eps), rel=1e-6)


# One label


def single_value(logits, targets, gamma_neg, gamma_pos, smoothing):
    """The official single-label formula, one element at a time."""
    total, classes = 0.0, len(logits[0])
    for row, labels in zip(logits, targets, strict=True):
        top = max(row)
        norm = top + math.log(sum(math.exp(x - top) for x in row))
        for x, y in zip(row, labels, strict=True):
            p = math.exp(x - norm)
            weight = (1 - p) ** gamma_pos if y else p**gamma_neg
            total -= (y * (1 - smoothing) + smoothing / classes) * weight * (x - norm)
    return total / len(logits)


@pytest.mark.parametrize(
    ("gamma_neg", "gamma_pos"), [(4.0, 0.0), (4.0, 1.0), (0.0, 0.0), (2.0, 3.0), (1.5, 0.5)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_single_label_value_is_that_of_the_formula_and_the_gradient_its_slope(
    gamma_neg, gamma_pos, smoothing
):
    logits, targets = batch(exclusive=True)
    loss = AsymmetricLossSingleLabel(gamma_neg=gamma_neg, gamma_pos=gamma_pos, smoothing=smoothing)
    expected = single_value(logits.tolist(), targets.tolist(), gamma_neg, gamma_pos, smoothing)
    assert loss(logits, targets).item() == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.gradcheck(lambda x: loss(x, targets), logits)


@pytest.mark.parametrize(("gamma_neg", "gamma_pos"), [(4.0, 0.0), (4.0, 1.0), (2.0, 3.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_single_label_value_and_gradient_are_those_of_timm(gamma_neg, gamma_pos, smoothing):
    logits, targets = batch(exclusive=True)
    ours = AsymmetricLossSingleLabel(gamma_neg=gamma_neg, gamma_pos=gamma_pos, smoothing=smoothing)
    theirs = timm.loss.AsymmetricLossSingleLabel(gamma_pos, gamma_neg, eps=smoothing)
    found = everything(ours, logits, targets)
    expected = everything(lambda x, y: theirs(x, y.argmax(1)), logits, targets)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("gamma_neg", [0.0, 0.5, 4.0])
def test_single_label_without_smoothing_is_cross_entropy_whatever_gamma_neg(gamma_neg):
    logits, targets = batch(exclusive=True)
    loss = AsymmetricLossSingleLabel(gamma_neg=gamma_neg, gamma_pos=0, smoothing=0)
    found = everything(loss, logits, targets)
    expected = everything(lambda x, y: F.cross_entropy(x, y.argmax(1)), logits, targets)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_single_label_defaults_are_the_official_ones():
    logits, targets = batch(exclusive=True)
    official = AsymmetricLossSingleLabel(gamma_neg=4, gamma_pos=0, smoothing=0.1)
    assert torch.equal(AsymmetricLossSingleLabel()(logits, targets), official(logits, targets))


# Number formats and the gradient mode

LOSSES = [
    *[
        AsymmetricLoss(
            gamma_neg=gamma_neg,
            gamma_pos=gamma_pos,
            clip=clip,
            focal_grad=focal_grad,
            reduction=reduction,
        )
        for gamma_neg, gamma_pos in GAMMAS
        for clip in (0.0, 0.05)
        for focal_grad in (False, True)
        for reduction in ("sum", "mean")
    ],
    *[
        AsymmetricLossSingleLabel(gamma_neg=gamma_neg, gamma_pos=gamma_pos, smoothing=smoothing)
        for gamma_neg, gamma_pos in GAMMAS
        for smoothing in (0.0, 0.1)
    ],
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_short_formats_give_a_finite_float32_loss_near_the_exact_one(dtype):
    logits, targets = batch(dtype, exclusive=True)
    for loss in LOSSES:
        value, gradient = everything(loss, logits, targets.to(torch.int8))
        assert value.dtype == torch.float32
        assert value.shape == ()
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
        exact = loss(logits.double(), targets)
        assert exact.dtype == torch.float64
        assert value.item() == pytest.approx(exact.item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extreme_logits_give_finite_losses_and_gradients(dtype):
    logits = torch.tensor(
        [
            [100.0, -100, 0, 100, -100],
            [-100, -100, -100, 100, -100],
            [30, -30, 20, -20, 17],
            [0, 0, 0, 0, 0],
        ],
        dtype=dtype,
    ).requires_grad_()
    for loss in LOSSES:
        for right in range(5):
            targets = F.one_hot(torch.full((4,), right), 5)
            value, gradient = everything(loss, logits, targets)
            assert value.isfinite()
            assert value >= 0
            assert gradient.isfinite().all()


def test_the_gradient_mode_is_left_as_it_was():
    logits, targets = batch(exclusive=True)
    for loss in LOSSES:
        assert loss(logits, targets).requires_grad
        assert torch.is_grad_enabled()
        with torch.no_grad():
            assert not loss(logits, targets).requires_grad
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def test_the_inputs_are_not_changed():
    logits, targets = batch(torch.float32, exclusive=True)
    before = logits.detach().clone(), targets.clone()
    for loss in LOSSES:
        loss(logits, targets)
    assert torch.equal(logits, before[0])
    assert torch.equal(targets, before[1])


# Errors


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        *[(AsymmetricLoss(), value) for value in (2.0, -0.1, -1.0, math.nan)],
        *[(AsymmetricLossSingleLabel(), value) for value in (2.0, 0.5, -1.0, math.nan)],
    ],
)
def test_a_target_out_of_its_range_is_refused_with_its_value(loss, value):
    logits, targets = batch(exclusive=True)
    targets[2, 3] = value
    with pytest.raises(DataError, match=rf"target {value:g} ") as caught:
        loss(logits, targets)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", [AsymmetricLoss(), AsymmetricLossSingleLabel()])
def test_targets_of_another_shape_are_refused(loss):
    logits, targets = batch()
    with pytest.raises(DataError, match=r"\(6, 1\).*\(6, 11\)") as caught:
        loss(logits, targets[:, :1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "options", "names"),
    [
        (AsymmetricLoss, {"gamma_neg": -1.0}, ["loss.gamma_neg", "-1"]),
        (AsymmetricLoss, {"gamma_pos": -0.5}, ["loss.gamma_pos", "-0.5"]),
        (AsymmetricLoss, {"clip": 1.0}, ["loss.clip", "1.0"]),
        (AsymmetricLoss, {"clip": -0.1}, ["loss.clip", "-0.1"]),
        (AsymmetricLoss, {"reduction": "men"}, ["loss.reduction", "men", "mean", "sum"]),
        (AsymmetricLossSingleLabel, {"gamma_neg": -1.0}, ["loss.gamma_neg", "-1"]),
        (AsymmetricLossSingleLabel, {"gamma_pos": -1.0}, ["loss.gamma_pos", "-1"]),
        (AsymmetricLossSingleLabel, {"smoothing": 1.0}, ["loss.smoothing", "1.0"]),
        (AsymmetricLossSingleLabel, {"smoothing": -0.1}, ["loss.smoothing", "-0.1"]),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_name_and_value(target, options, names):
    with pytest.raises(ConfigError) as caught:
        target(**options)
    assert "\n" not in str(caught.value)
    assert [name for name in names if name not in str(caught.value)] == []


def test_logits_further_apart_than_float32_reaches_cost_nothing_where_they_are_right():
    logits = torch.tensor([[3e38, -3e38, 0]]).requires_grad_()
    value = AsymmetricLossSingleLabel(smoothing=0.0)(logits, torch.tensor([[1, 0, 0]]))
    value.backward()
    assert value == 0
    assert logits.grad.isfinite().all()


# The weight of positives


@pytest.mark.parametrize("pos_weight", [3.0, "auto"])
@pytest.mark.parametrize("focal_grad", [False, True])
def test_positives_weigh_as_in_timm(pos_weight, focal_grad):
    logits, targets = batch(shape=(8, 3))
    counts = LabelCounts(torch.tensor([1, 4, 10]), torch.tensor([39, 36, 30]))
    weights = torch.tensor([20.0, 9, 3]) if pos_weight == "auto" else torch.tensor(3.0)
    ours = AsymmetricLoss(
        pos_weight=pos_weight,
        pos_weight_cap=20.0,
        gamma_pos=1.0,
        focal_grad=focal_grad,
        label_counts=lambda: counts,
    )
    theirs = timm.loss.AsymmetricLossMultiLabel(
        pos_weight=weights, disable_torch_grad_focal_loss=not focal_grad, reduction="sum"
    )
    logits = logits.detach().float().requires_grad_()
    torch.testing.assert_close(
        everything(ours, logits, targets.float()), everything(theirs, logits, targets.float())
    )


def test_a_weight_of_1_changes_nothing():
    logits, targets = batch()
    weighted, plain = AsymmetricLoss(pos_weight=1.0), AsymmetricLoss()
    assert torch.equal(weighted(logits, targets), plain(logits, targets))
    # A checkpoint of a run without the argument has nothing of it.
    assert not plain.state_dict()


def test_the_weights_of_positives_must_be_of_the_classes():
    counts = LabelCounts(torch.ones(4), torch.ones(4))
    loss = AsymmetricLoss(pos_weight="auto", label_counts=lambda: counts)
    with pytest.raises(ConfigError, match=r"loss\.pos_weight has 4 values for 11 classes"):
        loss(*batch())
