"""Losses of timm, for several labels per image; see `timm.loss` for their formulas."""

from typing import Any, Literal

import timm.loss
from torch import Tensor, nn

from mldec.losses.common import CountLabels, check_above_0, check_range, prepare, required


class _FromTimm(nn.Module):
    """A loss of timm, in float32, for targets of 0 and 1 that are checked as ours are."""

    reduction = "mean"

    def __init__(self, name: str, *args: Any, **settings: Any) -> None:
        super().__init__()
        self.loss = getattr(timm.loss, name)(*args, **settings)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] of 0 and 1 to the loss [], float32."""
        loss: Tensor = self.loss(*prepare(logits, targets))
        return loss


class TwoWayLoss(_FromTimm):
    """Compare positives with negatives in two ways: within each image, and within each class.

    The second mean compares the images of a micro-batch of one process with each other. So unlike
    with other losses, a run depends on `train.accumulate` and on the number of processes. Logits
    rank; their sigmoids are no probabilities, and 0 is no threshold.

    Source: Kobayashi, "Two-way Multi-Label Loss" (CVPR 2023).

    Args:
        positive_temperature: of the softened lowest positive, above 0.
        negative_temperature: of the softened highest negative, above 0.
    """

    def __init__(
        self, *, positive_temperature: float = 4.0, negative_temperature: float = 1.0
    ) -> None:
        check_above_0(
            positive_temperature=positive_temperature, negative_temperature=negative_temperature
        )
        super().__init__("TwoWayLoss", tp=positive_temperature, tn=negative_temperature)


class ZLPR(_FromTimm):
    """Rank every positive of an image above 0, and 0 above every negative; nothing to tune.

    Source: Su et al., "ZLPR: A Novel Loss for Multi-label Classification" (arXiv 2208.02955).
    """

    exclusive = False

    def __init__(self) -> None:
        super().__init__("ZlprLoss")


class DistributionBalancedLoss(_FromTimm):
    """Binary cross-entropy that rare classes and co-occurring labels do not distort.

    The authors sample the training images by classes ("class-aware"), which this project does not.

    Source: Wu et al., ECCV 2020 (arXiv 2007.09654); defaults from the official code
    (wutong16/DistributionBalancedLoss, configs/coco/LT_resnet50_pfc_DB.py).

    Args:
        alpha: smallest weight of re-balancing, >= 0.
        beta: steepness of the weight, > 0.
        mu: ratio of frequencies in the middle between smallest and largest weight.
        negative_scale: factor of the logits of negatives, > 0; 1 turns it off.
        kappa: factor of the shift by the class frequency, >= 0; 0 turns it off.
        gamma: focusing, 0 (off) or from 1 on: a power below 1 has an infinite gradient at 0.
        scale: factor of the loss with focusing, > 0.
        reduction: "mean" over batch and classes, or "sum".
        label_counts: counts the training labels; needed.
    """

    exclusive = False

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

        # Labels of -1 are refused, so that every class has the labels of all images.
        counts = required(label_counts)()
        images = int((counts.positives + counts.negatives).max())
        super().__init__(
            "DistributionBalancedLoss",
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
        self.reduction = reduction
