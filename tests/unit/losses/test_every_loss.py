"""Properties of all losses, over the option files."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from random_weights import with_gradient
from support import loss_of_option

from mldec.errors import ConfigError, DataError
from mldec.losses import (
    AsymmetricLoss,
    BinaryCrossEntropy,
    CrossEntropy,
    DistributionBalancedLoss,
    GeneralizedRobustLoss,
    PartialAsymmetricLoss,
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


def test_loss_decreases_along_negative_gradient(path, loss):
    assert path.read_text(encoding="utf-8").startswith("# ")
    value, gradient = with_gradient(loss, LOGITS.float(), ONE_LABEL)
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert gradient.any()
    step = 0.01 / gradient.abs().max()
    assert loss(LOGITS.float() - step * gradient, ONE_LABEL) < value
    with torch.no_grad():
        assert not loss(LOGITS, ONE_LABEL).requires_grad


def test_reduction_describes_doubled_batch(path, loss):
    if path.stem == "two_way":
        pytest.skip("compares the images of a batch")
    expected = loss(LOGITS, ONE_LABEL) * {"sum": 2, "mean": 1}[loss.reduction]
    twice = loss(LOGITS.repeat(2, 1), ONE_LABEL.repeat(2, 1))
    torch.testing.assert_close(twice, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_have_accurate_float32_loss(loss, dtype):
    value, gradient = with_gradient(loss, LOGITS.to(dtype), ONE_LABEL.to(torch.int8))
    assert (value.dtype, gradient.dtype) == (torch.float32, dtype)
    assert gradient.isfinite().all()
    exact = loss(LOGITS.to(dtype).double(), ONE_LABEL)
    assert value.item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_logits_have_finite_loss_and_gradient(loss, dtype):
    rows = [[100, -100, 0, 100, -100], [-100] * 5, [30, -30, 20, -20, 17], [0.0] * 5]
    for right in range(5):
        targets = F.one_hot(torch.full((4,), right), 5)
        value, gradient = with_gradient(loss, torch.tensor(rows, dtype=dtype), targets)
        assert 0 <= value < math.inf
        assert gradient.isfinite().all()


@pytest.mark.parametrize("wrong", [2.0, -0.5, math.nan, -1.0, 0.5])
def test_invalid_targets_raise_an_error(loss, wrong):
    allows_unknown = isinstance(loss, BinaryCrossEntropy | PartialAsymmetricLoss)
    allows_unknown |= type(loss).__module__ in (
        "mldec.losses.missing",
        "mldec.losses.single_positive",
    )
    is_soft = wrong == 0.5 and loss.soft
    targets = ONE_LABEL.double()
    targets[2, 3] = wrong
    if isinstance(loss, CrossEntropy) and wrong == 0.5:
        targets[2] = torch.tensor([0, 0, 0.5, 0.5, 0])
    if is_soft or (wrong == -1 and allows_unknown):
        assert loss(LOGITS, targets).isfinite()
    else:
        with pytest.raises(DataError, match=f"{wrong:g}"):
            loss(LOGITS, targets)
    with pytest.raises(DataError, match=r"\(8, 1\)"):
        loss(LOGITS, ONE_LABEL[:, :1])


COUNTS = LabelCounts(torch.tensor([50, 10, 1, 0]), torch.tensor([50, 90, 99, 100]))
WRONG = [
    (lambda: AsymmetricLoss(gamma_neg=-1.0), ValueError, "gamma_neg is -1.0"),
    (lambda: AsymmetricLoss(pos_weight="auto"), ValueError, "label_counts"),
    (lambda: BinaryCrossEntropy(gamma_neg=-1.0), ValueError, "gamma_neg is -1.0"),
    (lambda: BinaryCrossEntropy(logit_adjustment=-0.1), ValueError, "logit_adjustment is -0.1"),
    (lambda: AsymmetricLoss(logit_adjustment=1), ValueError, "label_counts"),
    (lambda: CrossEntropy(smoothing=1.0), ValueError, "smoothing is 1.0"),
    (lambda: DistributionBalancedLoss(), ValueError, "label_counts"),
    (lambda: GeneralizedRobustLoss(w=[2.0]), ValueError, "w is"),
    (
        lambda: BinaryCrossEntropy(class_weights=[1.0] * 4)(LOGITS, ONE_LABEL),
        ConfigError,
        r"loss\.class_weights",
    ),
    (
        lambda: PartialAsymmetricLoss(mode="selective", class_prior=[0.1] * 4)(LOGITS, ONE_LABEL),
        ConfigError,
        r"loss\.class_prior",
    ),
    (lambda: CrossEntropy()(LOGITS, 0 * ONE_LABEL), DataError, "sum to 0"),
]


@pytest.mark.parametrize(("call", "error", "name"), WRONG)
def test_errors_name_the_argument(call, error, name):
    with pytest.raises(error, match=name):
        call()


def test_auto_weight_is_ratio_of_negatives_to_positives():
    # A class without positives counts as if it had one.
    assert positive_weight("auto", 99.5, lambda: COUNTS).tolist() == [1, 9, 99, 99.5]
    always = LabelCounts(torch.tensor([20]), torch.tensor([0]))
    assert positive_weight("auto", 10, lambda: always).tolist() == [pytest.approx(1 / 20)]
    for pos_weight in (2.5, None):
        positive_weight(pos_weight, 100, lambda: pytest.fail("called"))
