"""The asymmetric loss, for several labels per image and for one (arXiv 2009.14119).

Reference: the official src_files/loss_functions/losses.py.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from mldec.losses.common import CountLabels, check_range, positive_weight, prepare


class AsymmetricLoss(nn.Module):
    """Binary cross-entropy with separate focusing of positives and negatives.

    With p = sigmoid(logit) and q = min(1 - p + clip, 1), the loss is
    -y (1 - p)^gamma_pos log(p) - (1 - y) (1 - q)^gamma_neg log(q): easy negatives, with p <= clip,
    do not count at all. Defaults are the COCO recipe of the paper.

    For a target y between 0 and 1 (mixed or smoothed labels) the loss is that of the official code:
    both terms have the weight (1 - y p - (1 - y) q)^(y gamma_pos + (1 - y) gamma_neg). Without
    `focal_grad`, its gradient is 0 at p = y (1 + clip), if that is above the clip and below 1.

    Args:
        gamma_neg: focusing of negatives, >= 0.
        gamma_pos: focusing of positives, >= 0.
        clip: probability added to 1 - p of negatives, in [0, 1): those with p <= clip have loss 0.
        focal_grad: let the gradient flow through the focal weight too; off in the official recipe.
        pos_weight: factor of the loss of positives: a number, "auto" (negatives / positives of each
            class in the training labels), or None for 1, as officially.
        pos_weight_cap: largest factor of "auto".
        reduction: "sum" over batch and classes, as officially (the paper's learning rates assume
            it), or "mean".
        eps: lower bound of a probability inside the logarithm.
        label_counts: counts the training labels, for "auto".
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
        reduction: Literal["sum", "mean"] = "sum",
        eps: float = 1e-8,
        label_counts: CountLabels | None = None,
    ) -> None:
        super().__init__()
        check_range(0, gamma_neg=gamma_neg, gamma_pos=gamma_pos)
        check_range(0, 1, clip=clip)

        self.gamma_neg, self.gamma_pos, self.clip = gamma_neg, gamma_pos, clip
        self.focal_grad, self.reduction, self.eps = focal_grad, reduction, eps

        # A buffer, so that it follows the loss to the device.
        self.pos_weight: Tensor | None
        self.register_buffer(
            "pos_weight", positive_weight(pos_weight, pos_weight_cap, label_counts)
        )

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] from 0 to 1 to the loss [], float32."""
        logits, targets = prepare(logits, targets, soft=True)

        # The clip raises the probability of a negative, so that easy negatives reach 1 and loss 0.
        positive = logits.sigmoid()
        negative = (1 - positive + self.clip).clamp(max=1)
        log_positive = positive.clamp(min=self.eps).log()
        if self.pos_weight is not None:
            log_positive = self.pos_weight * log_positive
        log_likelihood = targets * log_positive + (1 - targets) * negative.clamp(min=self.eps).log()

        if self.gamma_neg > 0 or self.gamma_pos > 0:
            right = positive * targets + negative * (1 - targets)
            if not self.focal_grad:
                right = right.detach()

            # At 0 a power below 1 has an infinite gradient. The bound changes no loss: the
            # logarithm that it multiplies is 0 there.
            wrong = (1 - right).clamp(min=self.eps)
            gamma = self.gamma_pos * targets + self.gamma_neg * (1 - targets)
            log_likelihood = log_likelihood * wrong**gamma

        return -log_likelihood.sum() if self.reduction == "sum" else -log_likelihood.mean()


class AsymmetricLossSingleLabel(nn.Module):
    """The asymmetric loss over a softmax, averaged over the batch (reference ASLSingleLabel).

    Args:
        gamma_neg: focusing of the other classes, >= 0; without smoothing it has no effect.
        gamma_pos: focusing of the true class, >= 0.
        smoothing: label smoothing in [0, 1), applied after the focal weight.
    """

    reduction = "mean"
    exclusive = True

    def __init__(
        self, *, gamma_neg: float = 4.0, gamma_pos: float = 0.0, smoothing: float = 0.1
    ) -> None:
        super().__init__()
        check_range(0, gamma_neg=gamma_neg, gamma_pos=gamma_pos)
        check_range(0, 1, smoothing=smoothing)

        self.gamma_neg, self.gamma_pos, self.smoothing = gamma_neg, gamma_pos, smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and one-hot targets [B, K] to the loss [], float32."""
        logits, targets = prepare(logits, targets)
        log_probability = logits.log_softmax(-1)
        probability = log_probability.exp()

        # Unlike in the loss above, the focal weight has a gradient here, as officially.
        wrong = torch.where(targets == 1, 1 - probability, probability).clamp(min=1e-8)
        weight = wrong ** (self.gamma_pos * targets + self.gamma_neg * (1 - targets))
        smooth = targets * (1 - self.smoothing) + self.smoothing / logits.shape[-1]

        # A log-probability can be -inf, and 0 times -inf is NaN: terms without weight are set to 0.
        losses = (smooth * weight * log_probability).masked_fill(smooth == 0, 0)
        return -losses.sum(-1).mean()
