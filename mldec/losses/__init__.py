"""Losses: float32 logits and targets in, one number out."""

from typing import Protocol

from torch import Tensor


class Loss(Protocol):
    """Constructor: keyword arguments only."""

    reduction: str  # "sum" or "mean" over the batch: the trainer needs it so that a batch means the same on any machine

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits float32 [B, K] and targets [B, K] to the loss []."""
        ...
