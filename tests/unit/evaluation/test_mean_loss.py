"""The mean loss of validation images: its scale, and what it leaves unchanged."""

import copy
import math

import pytest
import torch
from support import assert_equal, in_processes
from torch import nn

from mldec.evaluation.run import MeanLoss
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.cross_entropy import BinaryCrossEntropy
from mldec.losses.missing import SPLC
from mldec.losses.partial import PartialAsymmetricLoss

CPU = torch.device("cpu")
LOGITS = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(3))  # of two models
TARGETS = (torch.arange(44).view(11, 4) % 3 == 0).to(torch.int8)
RUN = {"batch_size": 8, "models": 2, "device": CPU}


class Restless(nn.Module):
    """A loss that changes its state in every call."""

    reduction = "mean"

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, targets):
        self.calls += 1
        return (logits - targets).abs().mean()


def mean(loss, *sizes, targets=TARGETS, progress=0.5):
    """Return the mean loss over batches of these sizes."""
    mean_loss = MeanLoss(loss, progress=progress, **RUN)
    for logits, labels in zip(LOGITS.split(sizes, 1), targets.split(sizes), strict=True):
        mean_loss.update(list(logits), labels)
    return mean_loss.compute()


@pytest.mark.parametrize(
    ("loss", "factor"),
    [
        (BinaryCrossEntropy(reduction="mean"), 1),
        (BinaryCrossEntropy(reduction="sum"), 8 / 11),
        (AsymmetricLoss(), 8 / 11),
    ],
)
def test_scale_equals_training_loss(loss, factor):
    expected = [factor * loss(logits, TARGETS).item() for logits in LOGITS]
    for sizes in ((11,), (5, 5, 1)):
        assert mean(loss, *sizes) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", [Restless(), PartialAsymmetricLoss(class_prior="estimate")])
def test_loss_and_random_state_are_unchanged(loss):
    loss.train()
    loss(LOGITS[0], TARGETS)
    state = copy.deepcopy(loss.state_dict())
    random_state = torch.get_rng_state()
    assert all(map(math.isfinite, mean(loss, 11)))
    assert_equal(loss.state_dict(), state)
    assert loss.training
    assert torch.equal(torch.get_rng_state(), random_state)


def test_loss_has_the_progress_of_the_run():
    # SPLC treats probable labels as positives after its start.
    early, late = (mean(SPLC(start=0.4), 11, progress=progress) for progress in (0.1, 0.5))
    assert early != late


def test_unsupported_labels_give_nan():
    targets = TARGETS.clone()
    targets[7] = -1
    assert all(map(math.isnan, mean(AsymmetricLoss(), 5, 6, targets=targets)))
    assert all(map(math.isfinite, mean(BinaryCrossEntropy(), 5, 6, targets=targets)))


def on_rank(rank, count, expected):
    """Add all images on rank 0, and none on rank 1."""
    loss = MeanLoss(AsymmetricLoss(), progress=0.5, **RUN)
    if rank == 0:
        loss.update(list(LOGITS[:, :5]), TARGETS[:5])
        loss.update(list(LOGITS[:, 5:]), TARGETS[5:])
    assert loss.compute() == expected

    # Only rank 0 has labels that the loss does not support.
    loss = MeanLoss(AsymmetricLoss(), progress=0.5, **RUN)
    loss.update(list(LOGITS), TARGETS - (1 - rank))
    assert all(map(math.isnan, loss.compute()))


def test_mean_covers_all_ranks():
    in_processes(on_rank, 2, mean(AsymmetricLoss(), 5, 6))
