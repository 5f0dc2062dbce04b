"""Multi-label losses of timm. See `timm.loss` for their formulas."""

from typing import Literal

import timm.loss
from torch import Tensor, nn

from mldec.losses.base import Loss
from mldec.losses.common import CountLabels, check_above_0, check_range, check_targets, count


class _FromTimm(Loss):
    """Base class: a multi-label loss of timm in float32, with checked targets of 0 and 1."""

    exclusive = False

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and targets [B, K] of 0 and 1."""
        loss: Tensor = self.loss(*check_targets(logits, targets))
        return loss


class ZLPR(_FromTimm):
    """Rank all positives of an image above 0, and all negatives below 0. It has no hyperparameters.

    Source: Su et al., "ZLPR: A Novel Loss for Multi-label Classification" (arXiv 2208.02955).
    """

    def __init__(self) -> None:
        super().__init__(timm.loss.ZlprLoss())


class DistributionBalancedLoss(_FromTimm):
    """Binary cross-entropy that compensates for rare classes and co-occurring labels.

    The official code samples the training images by class (data.sampler=class_aware).

    Source: Wu et al., ECCV 2020 (arXiv 2007.09654); defaults from the official code
    (wutong16/DistributionBalancedLoss, configs/coco/LT_resnet50_pfc_DB.py).

    Args:
        alpha: Minimum re-balancing weight, >= 0.
        beta: Slope of the re-balancing weight, > 0.
        mu: Frequency ratio halfway between the minimum and maximum weight.
        negative_scale: Factor of the logits of negatives, > 0. 1 turns it off.
        kappa: Factor of the logit shift by class frequency, >= 0. 0 turns it off.
        gamma: Focusing, 0 (off) or >= 1. A power below 1 has an infinite gradient at 0.
        scale: Factor of the loss with focusing, > 0.
        reduction: "mean" over batch and classes, or "sum".
        label_counts: Function that counts the training labels. Required.
    """

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
        check_range(0, alpha=alpha, kappa=kappa)
        if gamma != 0:
            check_range(1, gamma=gamma)
        check_above_0(beta=beta, negative_scale=negative_scale, scale=scale)

        # Labels of -1 are not allowed, so each class has a label for every image.
        counts = count(label_counts)
        images = int((counts.positives + counts.negatives).max())
        loss = timm.loss.DistributionBalancedLoss(
            counts.positives,
            images,
            map_alpha=alpha,
            map_beta=beta,
            map_mu=mu,
            neg_scale=negative_scale,
            init_bias=kappa,
            focal_gamma=gamma,
            focal_balance=scale,
            reduction=reduction,
        )
        super().__init__(loss)
        self.reduction = reduction
