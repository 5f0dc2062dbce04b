"""The counts of the training labels, and the weights that follow from them."""

import pytest
import torch
from timm.loss.class_weights import compute_class_weights

from mldec.errors import ConfigError
from mldec.losses.common import (
    LabelCounts,
    check_class_count,
    counted,
    positive_weight,
)


def counts() -> LabelCounts:
    return LabelCounts(torch.tensor([50, 10, 1, 0]), torch.tensor([50, 90, 99, 100]))


def test_auto_is_the_ratio_of_negatives_to_positives_of_each_class() -> None:
    weights = positive_weight("auto", 1000, counts)
    assert weights is not None
    assert weights.dtype == torch.float32
    # A class without a positive counts as if it had one.
    assert weights.tolist() == [1, 9, 99, 100]
    _, theirs = compute_class_weights([50, 10, 1], 100)
    assert torch.equal(weights[:3], theirs)


def test_auto_is_capped_and_never_0() -> None:
    always = LabelCounts(torch.tensor([20, 1]), torch.tensor([0, 19]))
    weights = positive_weight("auto", 10, lambda: always)
    assert weights is not None
    assert weights.tolist() == [pytest.approx(1 / 20), 10]


def test_a_number_and_none_count_nothing() -> None:
    weight = positive_weight(2.5, 100, lambda: pytest.fail("it counted"))
    assert weight is not None
    assert (weight.item(), weight.shape) == (2.5, ())
    assert positive_weight(None, 100, lambda: pytest.fail("it counted")) is None


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"^pos_weight is -1: it must be above 0, or auto$"):
        positive_weight(-1, 100, counts)
    with pytest.raises(ValueError, match=r"^pos_weight_cap is 0: it must be above 0$"):
        positive_weight(None, 0, counts)
    with pytest.raises(ValueError, match=r"^pos_weight auto needs the counts of the training"):
        positive_weight("auto", 100, None)
    with pytest.raises(ValueError, match=r"^this needs the counts of the training labels"):
        counted(None, "this")


def test_values_must_be_one_per_class() -> None:
    logits = torch.zeros(2, 3)
    for good in (None, torch.tensor(2.0), torch.ones(3)):
        check_class_count("pos_weight", good, logits)
    with pytest.raises(ConfigError, match=r"^loss\.pos_weight has 4 values for 3 classes$"):
        check_class_count("pos_weight", torch.ones(4), logits)
