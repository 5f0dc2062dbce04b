"""Losses: float32 logits and targets in, one number out."""

from typing import Protocol

from torch import Tensor


class Loss(Protocol):
    """Constructor: keyword arguments only. `build.check_together` holds the last two against the data and `mix`."""

    reduction: str  # "sum" or "mean" over the batch: the trainer needs it so that a batch means the same on any machine
    exclusive: bool | None = (
        None  # it is for data with one label an image, with several (False), or for both
    )
    soft: bool = False  # it takes targets between 0 and 1

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits float32 [B, K] and targets [B, K] to the loss []."""
        ...
