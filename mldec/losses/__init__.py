"""Losses: map logits and targets to one number, computed in float32."""

from typing import Protocol

from torch import Tensor

from mldec import lazily
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel

# A run has one loss: it does not import the others.
__getattr__ = lazily(
    __name__,
    {
        "PartialAsymmetricLoss": "partial",
        **dict.fromkeys(("BinaryCrossEntropy", "CrossEntropy"), "cross_entropy"),
        **dict.fromkeys(("DistributionBalancedLoss", "TwoWayLoss", "ZLPR"), "from_timm"),
        **dict.fromkeys(("AssumeNegative", "EntropyMaximization", "HillLoss"), "missing"),
        **dict.fromkeys(("SPLC", "GeneralizedRobustLoss", "LargeLoss"), "missing"),
    },
)

__all__ = [
    "SPLC",
    "ZLPR",
    "AssumeNegative",
    "AsymmetricLoss",
    "AsymmetricLossSingleLabel",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "DistributionBalancedLoss",
    "EntropyMaximization",
    "GeneralizedRobustLoss",
    "HillLoss",
    "LargeLoss",
    "Loss",
    "PartialAsymmetricLoss",
    "TwoWayLoss",
]


class Loss(Protocol):
    """What every loss offers; its constructor takes keyword arguments only.

    `build.check_together` compares `exclusive` and `soft` with the data and the `mix` settings.
    """

    # "sum" or "mean" over the batch: the learner rescales by it, so that a batch has the same
    # gradient on any number of processes and micro-batches.
    reduction: str

    # Whether the loss is for one label per image (True), for several (False), or for both (None).
    exclusive: bool | None = None

    # Whether targets may lie between 0 and 1: `mix.labels=weighted` and `mix.smoothing` make such.
    soft: bool = False

    # The share of the run that is done, in [0, 1): the learner sets it before each step. It is all
    # that a loss learns of the run, and is rebuilt from the step when a run is resumed.
    progress: float = 0.0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits float32 [B, K] and targets [B, K] to the loss []."""
        ...
