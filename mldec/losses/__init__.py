"""Losses: map logits and targets to a scalar, computed in float32."""

from typing import Protocol

from torch import Tensor

from mldec import lazily
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel

# Losses are imported on first use, because a run has only one.
__getattr__ = lazily(
    __name__,
    {
        "PartialAsymmetricLoss": "partial",
        "BinaryCrossEntropy": "cross_entropy",
        "CrossEntropy": "cross_entropy",
        "DistributionBalancedLoss": "from_timm",
        "TwoWayLoss": "from_timm",
        "ZLPR": "from_timm",
        "AssumeNegative": "missing",
        "EntropyMaximization": "missing",
        "GeneralizedRobustLoss": "missing",
        "HillLoss": "missing",
        "LargeLoss": "missing",
        "SPLC": "missing",
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
    """Interface of all losses. The constructor has keyword arguments only.

    `build.check_together` compares `exclusive` and `soft` with the data and the `mix` settings.
    """

    # "sum" or "mean" over the batch. The learner rescales the loss accordingly, so that the
    # gradient of a batch does not depend on the number of ranks and micro-batches.
    reduction: str

    # True for single-label losses, False for multi-label losses, None for losses of both kinds.
    exclusive: bool | None = None

    # Whether targets between 0 and 1 are allowed (`mix.labels=weighted`, `mix.smoothing`).
    soft: bool = False

    # Finished fraction of the run, in [0, 1). The learner sets it before each step. A loss must
    # not use any other state of the run, because only the step is restored on resume.
    progress: float = 0.0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss in float32.

        Args:
            logits: Logits [B, K].
            targets: Targets [B, K].

        Returns:
            Scalar loss.
        """
