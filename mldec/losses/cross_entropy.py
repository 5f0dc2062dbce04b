"""Binary cross-entropy per class, and cross-entropy of the softmax.

Paper section 3 uses binary cross-entropy for both multi-label and single-label data.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mldec.losses.base import Loss
from mldec.losses.common import (
    CountLabels,
    check_class_count,
    check_range,
    check_targets,
    check_valid,
    positive_weight,
    scaled_log_odds,
)


class BinaryCrossEntropy(Loss):
    """Binary cross-entropy per class. Unannotated labels (targets of -1) have loss 0.

    Args:
        smoothing: Label smoothing towards 1/2, in [0, 1).
        target_threshold: Threshold in [0, 1) that binarizes soft targets (mixup): targets above it
            become 1, the others 0. None keeps soft targets.
        class_weights: K factors, one per class. None for 1.
        pos_weight: Factor of the loss of positives: a number, "auto" (negatives / positives of each
            class in the training labels), or None for 1.
        pos_weight_cap: Upper bound of the factors of "auto", > 0.
        gamma_neg: Focusing of negatives, >= 0, as in `AsymmetricLoss`: the loss of a negative is
            multiplied by score^gamma_neg, without a gradient.
        logit_adjustment: Strength tau >= 0 of the logit adjustment, which favors rare classes. The
            loss adds tau log(positives / negatives) of each class to its logit, see
            `scaled_log_odds`. Scores are then not probabilities; `mldec calibrate` corrects them.
        reduction: "mean" over batch and classes, including unannotated labels, or "sum".
        label_counts: Function that counts the training labels. Required for "auto" and for the
            logit adjustment.
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
        gamma_neg: float = 0.0,
        logit_adjustment: float = 0.0,
        reduction: Literal["sum", "mean"] = "mean",
        label_counts: CountLabels | None = None,
    ) -> None:
        super().__init__()
        check_range(0, 1, smoothing=smoothing)
        check_range(0, gamma_neg=gamma_neg)
        if target_threshold is not None:
            check_range(0, 1, target_threshold=target_threshold)

        self.smoothing = smoothing
        self.target_threshold = target_threshold
        self.gamma_neg = gamma_neg
        self.reduction = reduction

        # Buffers move to the device together with the loss.
        self.class_weights: Tensor | None
        self.pos_weight: Tensor | None
        weights = None
        if class_weights is not None:
            weights = torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", weights)
        self.register_buffer(
            "pos_weight", positive_weight(pos_weight, pos_weight_cap, label_counts)
        )
        self.logit_adjustment = scaled_log_odds(logit_adjustment, label_counts)

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and targets [B, K] in [0, 1] or -1 (unannotated)."""
        logits, targets = check_targets(logits, targets, unknown=True, soft=True)
        check_class_count("class_weights", self.class_weights, logits)
        if self.logit_adjustment is not None:
            logits = logits + self.logit_adjustment

        # Compute the mask before thresholding and smoothing, which change targets of -1.
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
        if self.gamma_neg > 0:
            losses = losses * logits.detach().sigmoid() ** (self.gamma_neg * (1 - targets))

        # Not a product, because an infinite loss times 0 is NaN.
        return self.reduce(losses.masked_fill(~annotated, 0))


class CrossEntropy(Loss):
    """Cross-entropy of the softmax for targets that sum to 1, averaged over the batch.

    Args:
        smoothing: Label smoothing towards 1/K, in [0, 1).
    """

    exclusive = True
    soft = True

    def __init__(self, *, smoothing: float = 0.0) -> None:
        super().__init__()
        check_range(0, 1, smoothing=smoothing)
        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and class probabilities [B, K].

        A row that does not sum to 1 raises DataError. On a GPU, the loss is NaN instead.
        """
        logits, targets = check_targets(logits, targets, soft=True)
        total = targets.sum(-1)

        def message() -> str:
            worst = total[(total - 1).abs().argmax()].item()
            return (
                f"the labels of an image sum to {worst:g}, and cross-entropy requires "
                f"one label per image; use loss=asl"
            )

        near_1 = torch.isclose(total, torch.ones_like(total), atol=1e-3)
        logits = check_valid(near_1[:, None], logits, message)
        return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
