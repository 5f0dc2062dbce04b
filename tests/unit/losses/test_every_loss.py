"""What holds for every loss, over the option files."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from random_weights import with_gradient
from support import loss_of_option

from mldec.errors import ConfigError, DataError
from mldec.losses import (
    SPLC,
    AssumeNegative,
    AsymmetricLoss,
    BinaryCrossEntropy,
    CrossEntropy,
    DistributionBalancedLoss,
    EntropyMaximization,
    GeneralizedRobustLoss,
    HillLoss,
    LargeLoss,
    PartialAsymmetricLoss,
    TwoWayLoss,
)
from mldec.losses.common import LabelCounts, positive_weight

OPTIONS = sorted((Path(__file__).parents[3] / "configs" / "loss").glob("*.yaml"))
ONE_LABEL = F.one_hot(torch.arange(8) % 5, 5)
LOGITS = 4 * torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=OPTIONS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def loss(path):
    return loss_of_option(path)


def test_an_option_says_what_it_is_and_its_value_falls_along_its_gradient(path, loss):
    assert path.read_text(encoding="utf-8").startswith("# ")
    value, gradient = with_gradient(loss, LOGITS.float(), ONE_LABEL)
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert gradient.any()
    step = 0.01 / gradient.abs().max()
    assert loss(LOGITS.float() - step * gradient, ONE_LABEL) < value
    with torch.no_grad():
        assert not loss(LOGITS, ONE_LABEL).requires_grad


def test_the_reduction_is_what_the_value_does_when_the_batch_is_doubled(path, loss):
    if path.stem == "two_way":
        pytest.skip("it also compares the images of a batch with each other")
    once, twice = loss(LOGITS, ONE_LABEL), loss(LOGITS.repeat(2, 1), ONE_LABEL.repeat(2, 1))
    torch.testing.assert_close(twice, once * {"sum": 2, "mean": 1}[loss.reduction])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_formats_give_a_finite_float32_loss_near_the_exact_one(loss, dtype):
    value, gradient = with_gradient(loss, LOGITS.to(dtype), ONE_LABEL.to(torch.int8))
    assert (value.dtype, gradient.dtype) == (torch.float32, dtype)
    assert gradient.isfinite().all()
    exact = loss(LOGITS.to(dtype).double(), ONE_LABEL)
    assert value.item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_logits_give_finite_losses_and_gradients(loss, dtype):
    rows = [[100, -100, 0, 100, -100], [-100] * 5, [30, -30, 20, -20, 17], [0.0] * 5]
    for right in range(5):
        targets = F.one_hot(torch.full((4,), right), 5)
        value, gradient = with_gradient(loss, torch.tensor(rows, dtype=dtype), targets)
        assert 0 <= value < math.inf
        assert gradient.isfinite().all()


@pytest.mark.parametrize("wrong", [2.0, -0.5, math.nan, -1.0, 0.5])
def test_other_targets_are_refused_with_their_value(loss, wrong):
    takes_unknown = isinstance(loss, BinaryCrossEntropy | PartialAsymmetricLoss) or (
        type(loss).__module__ == "mldec.losses.missing"
    )
    is_taken = (wrong == 0.5 and getattr(loss, "soft", False)) or (wrong == -1 and takes_unknown)
    targets = ONE_LABEL.double()
    targets[2, 3] = wrong
    if isinstance(loss, CrossEntropy) and wrong == 0.5:
        targets[2] = torch.tensor([0, 0, 0.5, 0.5, 0])
    if is_taken:
        assert loss(LOGITS, targets).isfinite()
        return
    with pytest.raises(DataError, match=f"^target {wrong:g} is not allowed: this loss takes 0 "):
        loss(LOGITS, targets)


def test_targets_of_another_shape_are_refused(loss):
    with pytest.raises(DataError, match=r"targets \(8, 1\) do not have .* logits \(8, 5\)"):
        loss(LOGITS, ONE_LABEL[:, :1])


# Settings

COUNTS = LabelCounts(torch.tensor([50, 10, 1, 0]), torch.tensor([50, 90, 99, 100]))
WRONG = [
    (AsymmetricLoss, {"gamma_neg": -1.0}, "gamma_neg is -1.0: it must be 0 or more"),
    (AsymmetricLoss, {"clip": 1.0}, r"clip is 1.0: it must lie in \[0, 1\)"),
    (AsymmetricLoss, {"pos_weight": -1}, "pos_weight is -1: it must be above 0"),
    (AsymmetricLoss, {"pos_weight_cap": 0}, "pos_weight_cap is 0: it must be above 0"),
    (BinaryCrossEntropy, {"target_threshold": 1.0}, "target_threshold is 1.0"),
    (CrossEntropy, {"smoothing": 1.0}, "smoothing is 1.0"),
    (PartialAsymmetricLoss, {"gamma_unannotated": -1}, "gamma_unannotated is -1"),
    (TwoWayLoss, {"negative_temperature": 0}, "negative_temperature is 0: it must be above 0"),
    (DistributionBalancedLoss, {"kappa": -0.1}, "kappa is -0.1: it must be 0 or more"),
    (DistributionBalancedLoss, {"gamma": 0.5}, "gamma is 0.5: it must be 1 or more"),
    (AssumeNegative, {"weight": 0}, "weight is 0: it must be above 0"),
    (EntropyMaximization, {"alpha": -0.1}, "alpha is -0.1: it must be above 0"),
    (HillLoss, {"lam": 0.5}, "lam is 0.5: it must be 1 or more"),
    (SPLC, {"tau": 1.5}, r"tau is 1.5: it must lie in \[0, 1\)"),
    (LargeLoss, {"stages": 0}, "stages is 0: it must be 1 or more"),
    (GeneralizedRobustLoss, {"sigma": [2.0, 0.0]}, "sigma is 0.0: it must be above 0"),
    (GeneralizedRobustLoss, {"w": [2.0]}, r"w is \[2.0\]: it must be its value at start and end"),
]


@pytest.mark.parametrize(("target", "settings", "fault"), WRONG)
def test_a_wrong_setting_is_one_line_with_its_name_and_value(target, settings, fault):
    with pytest.raises(ValueError, match=fault):
        target(**settings)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (BinaryCrossEntropy(class_weights=[1.0] * 4), "class_weights"),
        (PartialAsymmetricLoss(mode="selective", class_prior=[0.1] * 4), "class_prior"),
    ],
)
def test_values_must_be_one_per_class(loss, name):
    with pytest.raises(ConfigError, match=rf"^loss\.{name} has 4 values for 5 classes$"):
        loss(LOGITS, ONE_LABEL)


def test_auto_is_the_ratio_of_negatives_to_positives_of_each_class():
    # A class without a positive counts as if it had one.
    assert positive_weight("auto", 99.5, lambda: COUNTS).tolist() == [1, 9, 99, 99.5]
    always = LabelCounts(torch.tensor([20]), torch.tensor([0]))
    assert positive_weight("auto", 10, lambda: always).tolist() == [pytest.approx(1 / 20)]
    for pos_weight in (2.5, None):
        positive_weight(pos_weight, 100, lambda: pytest.fail("it counted"))
