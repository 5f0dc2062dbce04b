"""The distribution-balanced loss for long-tailed classes (arXiv 2007.09654)."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from mldec.losses.label_counts import CountLabels, check_class_count, counted
from mldec.losses.targets import check_reduction, prepare


class DistributionBalancedLoss(nn.Module):
    """Binary cross-entropy that rare classes and co-occurring labels do not distort.

    Re-balanced weighting: of class i, which n_i training images show, in an image with targets y,
    the weight is alpha + sigmoid(beta (r - mu)), where r = (1 / n_i) / sum_j (y_j / n_j) compares
    how often sampling by classes would draw the image for this class and for all of its classes.

    Negative-tolerant regularisation: with lambda = `negative_scale`, logits are shifted to z = s -
    kappa log(N_i / n_i) / lambda, where N_i images do not show the class, and a negative has the
    loss log(1 + exp(lambda z)) / lambda, which has a smaller gradient where z is below 0 already.
    The division of the shift by lambda is the official code's.

    Each term has a focal weight, (1 - p)^gamma with the probability p of the right answer.

    The authors sample the training images by classes ("class-aware"), which this project does not.

    Source: Wu et al., ECCV 2020, the sections of these two names; focal weight and defaults from
    the official code (wutong16/DistributionBalancedLoss, configs/coco/LT_resnet50_pfc_DB.py).

    Args:
        alpha: smallest weight, >= 0.
        beta: steepness of the weight, > 0.
        mu: ratio r in the middle between smallest and largest weight.
        negative_scale: factor of the logits of negatives, > 0; 1 turns it off.
        kappa: factor of the shift by the class frequency, >= 0; 0 turns it off.
        gamma: focusing, >= 0; 0 turns it off.
        scale: factor of the whole loss, > 0; the official code has 2 with its focal weight.
        reduction: "mean" over batch and classes, or "sum".
        label_counts: counts the training labels.

    Raises:
        ConfigError: for another reduction.
        ValueError: for any other value out of its range, or without `label_counts`.
    """

    exclusive = False

    inverse_count: Tensor
    shift: Tensor

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        beta: float = 10.0,
        mu: float = 0.2,
        negative_scale: float = 2.0,
        kappa: float = 0.05,
        gamma: float = 2.0,
        scale: float = 2.0,
        reduction: Literal["sum", "mean"] = "mean",
        label_counts: CountLabels | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("alpha", alpha), ("kappa", kappa), ("gamma", gamma)):
            if value < 0:
                raise ValueError(f"{name} is {value}: it must be 0 or more")
        for name, value in (("beta", beta), ("negative_scale", negative_scale), ("scale", scale)):
            if value <= 0:
                raise ValueError(f"{name} is {value}: it must be above 0")
        check_reduction(reduction)

        self.alpha, self.beta, self.mu = alpha, beta, mu
        self.negative_scale, self.gamma, self.scale = negative_scale, gamma, scale
        self.reduction = reduction

        # Buffers, so that they follow the loss to the device.
        counts = counted(label_counts, "the distribution-balanced loss").at_least_one()
        shift = kappa / negative_scale * (counts.negatives / counts.positives).log()
        self.register_buffer("inverse_count", (1 / counts.positives).float())
        self.register_buffer("shift", shift.float())

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] of 0 and 1 to the loss [], float32.

        Raises:
            DataError: for any other target.
            ConfigError: if the counted labels are not of K classes.
        """
        logits, targets = prepare(logits, targets)
        check_class_count("label_counts", self.shift, logits)

        # An image without a label has the ratio inf, and therefore the largest weight, as
        # officially.
        per_image = (targets * self.inverse_count).sum(1, keepdim=True)
        weight = self.alpha + (self.beta * (self.inverse_count / per_image - self.mu)).sigmoid()

        # Both terms are of the logit for the right answer: z for a positive, -lambda z for others.
        factor = targets - self.negative_scale * (1 - targets)
        right = factor * (logits - self.shift)
        losses = -F.logsigmoid(right) / factor.abs()

        # (1 - p)^gamma by its logarithm, whose gradient is finite for any gamma.
        focal = (self.gamma * F.logsigmoid(-right)).exp()
        losses = self.scale * weight * focal * losses
        return losses.sum() if self.reduction == "sum" else losses.mean()
