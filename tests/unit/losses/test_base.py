"""The adapter for modules and functions that do not inherit from `Loss`."""

import copy

import pytest
import torch
from timm.loss import AsymmetricLossMultiLabel
from torch import nn

from mldec.errors import ConfigError
from mldec.losses import AsymmetricLoss, Loss
from mldec.losses.base import as_loss

LOGITS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
TARGETS = (torch.arange(15) % 4 == 0).float().view(5, 3)
INDEX = torch.arange(5)


class Ramp(nn.Module):
    """A loss with all attributes, a parameter, a buffer and a hook."""

    reduction = "sum"
    exclusive = False
    soft = True
    per_image = True
    lr_factor = 3.0

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("logit_adjustment", torch.full((3,), 0.5))
        self.epochs = []

    def start_epoch(self, epoch, epochs, predict):
        self.epochs.append((epoch, epochs, predict()))

    def forward(self, logits, targets, index):
        return (self.progress * self.scale * (logits - targets) * index[:, None]).sum()


def absolute(logits, targets):
    return (logits - targets).abs().mean()


absolute.reduction = "mean"


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(reduction="sum"), absolute])
def test_defaults_belong_to_losses_of_other_libraries(loss):
    adapted = as_loss(loss)
    assert adapted(LOGITS, TARGETS, INDEX).equal(loss(LOGITS, TARGETS))
    assert adapted.reduction == loss.reduction
    defaults = (adapted.exclusive, adapted.soft, adapted.per_image, adapted.lr_factor)
    assert defaults == (None, False, False, 1.0)
    assert adapted.logit_adjustment is None
    assert adapted.estimated_prior() is None
    adapted.start_epoch(0, 1, lambda: pytest.fail("called"))
    assert adapted.state_dict() == {}
    adapted.load_state_dict({})


def test_attributes_and_state_of_a_module_are_its_own():
    loss = Ramp()
    adapted = as_loss(loss)
    own = (adapted.reduction, adapted.exclusive, adapted.soft, adapted.per_image, adapted.lr_factor)
    assert own == ("sum", False, True, True, 3.0)
    assert adapted.logit_adjustment is loss.logit_adjustment
    assert adapted.name == "Ramp"
    adapted.progress = 0.25
    expected = 0.25 * ((LOGITS - TARGETS) * INDEX[:, None]).sum()
    torch.testing.assert_close(adapted(LOGITS, TARGETS, INDEX), expected)
    adapted.start_epoch(2, 7, lambda: 5)
    assert loss.epochs == [(2, 7, 5)]

    # Checkpoints have the names of the module, so those of earlier versions load.
    saved = {"scale": torch.tensor([1.0, 2.0, 3.0]), "logit_adjustment": torch.zeros(3)}
    assert list(adapted.state_dict()) == list(loss.state_dict()) == list(saved)
    adapted.load_state_dict(saved)
    assert loss.scale.tolist() == [1, 2, 3]
    assert [value.shape for value in adapted.parameters()] == [(3,)]

    # The evaluation uses a copy.
    twin = copy.deepcopy(adapted).eval()
    twin.start_epoch(3, 7, lambda: 5)
    assert (len(loss.epochs), loss.training) == (1, True)


def test_losses_are_returned_unchanged():
    loss = AsymmetricLoss()
    assert as_loss(loss) is loss
    assert isinstance(loss, Loss)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (AsymmetricLossMultiLabel(), "AsymmetricLossMultiLabel"),
        (nn.BCEWithLogitsLoss(reduction="none"), "BCEWithLogitsLoss"),
        (lambda logits, targets: logits.sum(), "lambda"),
    ],
)
def test_reduction_is_required(loss, name):
    with pytest.raises(ConfigError, match=rf"{name}.* reduction"):
        as_loss(loss)
