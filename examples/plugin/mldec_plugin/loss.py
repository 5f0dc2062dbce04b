"""Squared hinge loss per class."""

from typing import Literal

from torch import Tensor

from mldec.losses import Loss


class SquaredHinge(Loss):
    """max(0, m - y l)^2 for a logit l, the margin m, and y = 1 (present) or -1 (absent).

    Args:
        margin: m > 0.
        positive_weight: Factor of the loss of present classes, > 0.
    """

    reduction: Literal["sum", "mean"] = "mean"  # over the batch

    def __init__(self, *, margin: float = 1.0, positive_weight: float = 1.0) -> None:
        super().__init__()
        self.margin = margin
        self.positive_weight = positive_weight

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits float32 [B, K] and targets [B, K] of 0 and 1."""
        signs = 2.0 * targets - 1.0
        losses = (self.margin - signs * logits).clamp(min=0).square()
        weights = 1.0 + (self.positive_weight - 1.0) * targets
        return (weights * losses).mean()
