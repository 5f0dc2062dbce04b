import pytest
import torch

from mldec.errors import ConfigError, DataError
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.partial import PartialAsymmetricLoss

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0], [-2.0, 0.0, 1.0, -0.5]])
TARGETS = torch.tensor([[1, 0, -1, -1], [0, -1, 1, -1]])


def test_fully_annotated_data_costs_what_the_asymmetric_loss_says() -> None:
    targets = TARGETS.clamp(min=0)
    partial = PartialAsymmetricLoss(gamma_pos=1, gamma_neg=4, clip=0.05)
    torch.testing.assert_close(
        partial(LOGITS, targets), AsymmetricLoss(gamma_pos=1, gamma_neg=4)(LOGITS, targets)
    )


def test_ignored_labels_have_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    PartialAsymmetricLoss(mode="ignore")(logits, TARGETS).backward()
    assert (logits.grad[TARGETS == -1] == 0).all()
    assert (logits.grad[TARGETS != -1] != 0).all()


def test_the_likely_ones_of_the_whole_batch_are_left_out() -> None:
    logits = LOGITS.clone().requires_grad_()
    PartialAsymmetricLoss(mode="selective", likelihood_top_k=1)(logits, TARGETS).backward()
    left_out = (logits.grad == 0) & (TARGETS == -1)
    assert left_out.nonzero().tolist() == [
        [0, 2],
        [0, 3],
    ]  # the two highest of four, both in the first image


def test_more_than_all_unannotated_labels_is_all_of_them() -> None:
    many = PartialAsymmetricLoss(mode="selective", likelihood_top_k=9)(LOGITS, TARGETS)
    torch.testing.assert_close(many, PartialAsymmetricLoss(mode="ignore")(LOGITS, TARGETS))


def test_common_classes_are_left_out_by_their_prior() -> None:
    logits = LOGITS.clone().requires_grad_()
    loss = PartialAsymmetricLoss(mode="selective", class_prior=[0.1, 0.9, 0.1, 0.6])
    loss(logits, TARGETS).backward()
    assert ((logits.grad == 0) & (TARGETS == -1)).nonzero().tolist() == [[0, 3], [1, 1], [1, 3]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "selektive"},
        {"mode": "selective"},
        {"mode": "ignore", "likelihood_top_k": 3},
        {"mode": "negative", "class_prior": [0.1]},
        {"gamma_unannotated": -1},
        {"clip": 1.0},
    ],
)
def test_settings_out_of_range_or_without_effect_are_refused(arguments: dict) -> None:
    with pytest.raises(ConfigError, match=r"^loss"):
        PartialAsymmetricLoss(**arguments)


def test_targets_and_priors_are_checked() -> None:
    with pytest.raises(DataError, match="target 2 is not allowed"):
        PartialAsymmetricLoss()(LOGITS, TARGETS + 1)
    with pytest.raises(ConfigError, match="class_prior has 1 values for 4 classes"):
        PartialAsymmetricLoss(mode="selective", class_prior=[0.1])(LOGITS, TARGETS)
