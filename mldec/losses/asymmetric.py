"""Asymmetric losses for multi-label and single-label data (arXiv 2009.14119).

Reference: src_files/loss_functions/losses.py of the official code.
"""

from typing import Literal

import torch
from torch import Tensor

from mldec.losses.base import Loss
from mldec.losses.common import (
    CountLabels,
    check_range,
    check_targets,
    positive_weight,
    scaled_log_odds,
)


class AsymmetricLoss(Loss):
    """Binary cross-entropy with separate focusing of positives and negatives.

    Let p = sigmoid(logit) and q = min(1 - p + clip, 1). The loss of a label y of 1 or 0 is

        -y (1 - p)^gamma_pos log(p) - (1 - y) (1 - q)^gamma_neg log(q)

    so that easy negatives, with p <= clip, have the loss 0. Defaults follow the COCO recipe of the
    paper. For targets between 0 and 1 (mixed or smoothed labels), both logarithms have the same
    weight, as in the official code:

        (1 - y p - (1 - y) q)^(y gamma_pos + (1 - y) gamma_neg)

    For such targets without `focal_grad`, the gradient is 0 at p = y (1 + clip), if clip < p < 1.

    Args:
        gamma_neg: Focusing of negatives, >= 0.
        gamma_pos: Focusing of positives, >= 0.
        clip: Probability added to 1 - p of negatives, in [0, 1).
        focal_grad: Also backpropagate through the focal weight. Off in the official recipe.
        pos_weight: Factor of the loss of positives: a number, "auto" (negatives / positives of each
            class in the training labels), or None for 1. The official code has no factor.
        pos_weight_cap: Upper bound of the factors of "auto", > 0.
        logit_adjustment: Strength tau >= 0 of the logit adjustment, see `BinaryCrossEntropy`.
        reduction: "sum" over batch and classes, or "mean". The learning rates of the paper assume
            "sum".
        eps: Lower bound of a probability inside the logarithm.
        label_counts: Function that counts the training labels. Required for "auto" and for the
            logit adjustment.
    """

    exclusive = False
    soft = True

    def __init__(
        self,
        *,
        gamma_neg: float = 4.0,
        gamma_pos: float = 0.0,
        clip: float = 0.05,
        focal_grad: bool = False,
        pos_weight: float | Literal["auto"] | None = None,
        pos_weight_cap: float = 100.0,
        logit_adjustment: float = 0.0,
        reduction: Literal["sum", "mean"] = "sum",
        eps: float = 1e-8,
        label_counts: CountLabels | None = None,
    ) -> None:
        super().__init__()
        check_range(0, gamma_neg=gamma_neg, gamma_pos=gamma_pos)
        check_range(0, 1, clip=clip)

        self.gamma_neg = gamma_neg
        self.gamma_pos = gamma_pos
        self.clip = clip
        self.focal_grad = focal_grad
        self.reduction = reduction
        self.eps = eps

        # Buffers move to the device with the loss.
        self.pos_weight: Tensor | None
        self.register_buffer(
            "pos_weight", positive_weight(pos_weight, pos_weight_cap, label_counts)
        )
        self.logit_adjustment = scaled_log_odds(logit_adjustment, label_counts)

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and targets [B, K] in [0, 1]."""
        logits, targets = check_targets(logits, targets, soft=True)
        if self.logit_adjustment is not None:
            logits = logits + self.logit_adjustment

        # The clip increases the probability of a negative. Easy negatives reach 1 and loss 0.
        positive = logits.sigmoid()
        negative = (1 - positive + self.clip).clamp(max=1)
        log_positive = positive.clamp(min=self.eps).log()
        if self.pos_weight is not None:
            log_positive = self.pos_weight * log_positive
        log_negative = negative.clamp(min=self.eps).log()
        log_likelihood = targets * log_positive + (1 - targets) * log_negative

        if self.gamma_neg > 0 or self.gamma_pos > 0:
            right = positive * targets + negative * (1 - targets)
            if not self.focal_grad:
                right = right.detach()

            # A power below 1 has an infinite gradient at 0. The lower bound does not change the
            # loss, because the logarithm is 0 there.
            wrong = (1 - right).clamp(min=self.eps)
            gamma = self.gamma_pos * targets + self.gamma_neg * (1 - targets)
            log_likelihood = log_likelihood * wrong**gamma

        return -self.reduce(log_likelihood)


class AsymmetricLossSingleLabel(Loss):
    """Asymmetric loss over a softmax, averaged over the batch (reference ASLSingleLabel).

    Let p be the softmax probability of a class, y its label of 1 or 0, and s = y (1 - smoothing) +
    smoothing / K its smoothed label. The loss of an image is the sum over the classes of

        -s (1 - p)^gamma_pos log(p)    if y = 1
        -s p^gamma_neg log(p)          if y = 0

    Args:
        gamma_neg: Focusing of the other classes, >= 0. It has no effect without smoothing.
        gamma_pos: Focusing of the true class, >= 0.
        smoothing: Label smoothing in [0, 1), applied after the focal weight.
    """

    exclusive = True

    def __init__(
        self, *, gamma_neg: float = 4.0, gamma_pos: float = 0.0, smoothing: float = 0.1
    ) -> None:
        super().__init__()
        check_range(0, gamma_neg=gamma_neg, gamma_pos=gamma_pos)
        check_range(0, 1, smoothing=smoothing)

        self.gamma_neg = gamma_neg
        self.gamma_pos = gamma_pos
        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and one-hot targets [B, K]."""
        logits, targets = check_targets(logits, targets)
        log_probability = logits.log_softmax(-1)
        probability = log_probability.exp()

        # The focal weight has a gradient, as in the official code and unlike in AsymmetricLoss.
        wrong = torch.where(targets == 1, 1 - probability, probability).clamp(min=1e-8)
        weight = wrong ** (self.gamma_pos * targets + self.gamma_neg * (1 - targets))
        smooth = targets * (1 - self.smoothing) + self.smoothing / logits.shape[-1]

        # A log-probability can be -inf, and 0 * -inf is NaN. Terms without weight are set to 0.
        losses = (smooth * weight * log_probability).masked_fill(smooth == 0, 0)
        return -losses.sum(-1).mean()
