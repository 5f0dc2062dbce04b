"""Cross-entropy: per class, for several labels per image or one, and of a softmax, for one.

Paper section 3 uses the binary one for both kinds of data.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.losses.common import (
    CountLabels,
    check_class_count,
    check_range,
    positive_weight,
    prepare,
    require,
)


class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy per class; labels of -1 (not annotated) have loss 0.

    Args:
        smoothing: targets move towards 1/2 by this share, in [0, 1).
        target_threshold: soft targets (mixup) above it become 1, the others 0; None keeps them
            soft.
        class_weights: K factors, one per class; None for 1.
        pos_weight: factor of the loss of positives: a number, "auto" (negatives / positives of each
            class in the training labels), or None for 1.
        pos_weight_cap: largest factor of "auto".
        reduction: "mean" over batch and classes (unannotated entries count as 0), or "sum".
        label_counts: counts the training labels, for "auto".
    """

    soft = True

    def __init__(
        self,
        *,
        smoothing: float = 0.0,
        target_threshold: float | None = None,
        class_weights: Sequence[float] | None = None,
        pos_weight: float | Literal["auto"] | None = None,
        pos_weight_cap: float = 100.0,
        reduction: Literal["sum", "mean"] = "mean",
        label_counts: CountLabels | None = None,
    ) -> None:
        super().__init__()
        check_range(0, 1, smoothing=smoothing)
        if target_threshold is not None:
            check_range(0, 1, target_threshold=target_threshold)

        self.smoothing = smoothing
        self.target_threshold = target_threshold
        self.reduction = reduction

        # Buffers, so that they follow the loss to the device.
        self.class_weights: Tensor | None
        self.pos_weight: Tensor | None
        weights = None
        if class_weights is not None:
            weights = torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", weights)
        self.register_buffer(
            "pos_weight", positive_weight(pos_weight, pos_weight_cap, label_counts)
        )

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] from 0 to 1, or -1, to the loss [], float32."""
        logits, targets = prepare(logits, targets, unknown=True, soft=True)
        check_class_count("class_weights", self.class_weights, logits)

        # Before thresholding and smoothing, which would turn -1 into a target like any other.
        annotated = targets >= 0
        if self.target_threshold is not None:
            targets = (targets > self.target_threshold).to(logits.dtype)
        targets = targets * (1 - self.smoothing) + self.smoothing / 2

        losses = F.binary_cross_entropy_with_logits(
            logits,
            targets,
            weight=self.class_weights,
            pos_weight=self.pos_weight,
            reduction="none",
        )

        # Filled, not multiplied: an infinite loss times 0 would be NaN.
        losses = losses.masked_fill(~annotated, 0)
        return losses.sum() if self.reduction == "sum" else losses.mean()


class CrossEntropy(nn.Module):
    """Cross-entropy of the softmax with targets that sum to 1, averaged over the batch.

    Args:
        smoothing: targets move towards 1/K by this share, in [0, 1).
    """

    reduction = "mean"
    exclusive = True
    soft = True

    def __init__(self, *, smoothing: float = 0.0) -> None:
        super().__init__()
        check_range(0, 1, smoothing=smoothing)
        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and distributions [B, K] as targets to the loss [], float32."""
        logits, targets = prepare(logits, targets, soft=True)
        total = targets.sum(-1)

        def fault() -> str:
            worst = total[(total - 1).abs().argmax()].item()
            return (
                f"the labels of an image sum to {worst:g}: "
                f"cross-entropy needs one label per image; use loss=asl"
            )

        near_1 = torch.isclose(total, torch.ones_like(total), atol=1e-3)
        logits = require(near_1[:, None], logits, fault)
        return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
