"""The logits and targets of an evaluation, shared between processes by class."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mldec.evaluators.average_precision import average_precision
from mldec.runtime import distributed


class Predictions:
    """The logits and targets of this process's images, in main memory.

    Logits are kept in float32, so that close scores stay apart.

    Args:
        num_classes: K.
    """

    def __init__(self, num_classes: int) -> None:
        # A block without rows: a process that gets no image still takes part in every exchange.
        self.logits = [torch.zeros(0, num_classes)]
        self.targets = [torch.zeros(0, num_classes, dtype=torch.int8)]

    def add(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Add a batch, and return it as it is kept: float32 [B, K] and int8 [B, K]."""
        logits = logits.float().cpu()
        targets = targets.to(torch.int8).cpu()

        self.logits.append(logits)
        self.targets.append(targets)
        return logits, targets

    def shared_by_classes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits and targets of all images, for this process's share of the classes."""
        return distributed.share_columns(self.logits), distributed.share_columns(self.targets)


def average_precision_of_all(
    logits: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    interpolations: Sequence[str] = ("none",),
) -> dict[str, Tensor]:
    """Compute the average precision of all K classes from blocks that are shared by classes.

    Args:
        logits: blocks float [n, K / processes], as `Predictions.shared_by_classes` returns them.
        targets: blocks [n, K / processes] of 1, 0 or -1 (left out of its class).
        interpolations: see `average_precision`.

    Returns:
        For each interpolation, float64 [K] in [0, 1], the same on every process; NaN for a class
        without a positive.
    """
    own_classes = average_precision(logits, targets, interpolations=interpolations)
    return {name: distributed.join_columns(values) for name, values in own_classes.items()}
