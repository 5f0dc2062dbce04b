"""Two-way multi-label loss. timm's version causes a host sync in each step (boolean indexing)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mldec.losses.base import Loss
from mldec.losses.common import check_above_0, check_targets

IGNORED = -1e4  # logit without a share in a logsumexp; an infinite one has gradients of NaN


class TwoWayLoss(Loss):
    """Compare positives with negatives within each image and within each class.

    Let l be the logits, and P and N the positives and negatives of an image, or of a class in the
    batch. Its loss is

        softplus(T_n log sum_N exp(l / T_n) + T_p log sum_P exp(-l / T_p))

    It is averaged over the images with a positive, and over the classes with a positive. The result
    is the sum of both means.

    The comparison within a class uses the images of one micro-batch on one rank. The result of a
    run therefore depends on `train.accumulate` and on the number of ranks, unlike with other
    losses. The logits are only trained for ranking: their sigmoids are not probabilities, and 0 is
    not a threshold.

    Source: Kobayashi, "Two-way Multi-Label Loss" (CVPR 2023).

    Args:
        positive_temperature: Temperature T_p of the soft minimum over positives, > 0.
        negative_temperature: Temperature T_n of the soft maximum over negatives, > 0.
    """

    def __init__(
        self, *, positive_temperature: float = 4.0, negative_temperature: float = 1.0
    ) -> None:
        super().__init__()
        check_above_0(
            positive_temperature=positive_temperature, negative_temperature=negative_temperature
        )
        self.positive_temperature = positive_temperature
        self.negative_temperature = negative_temperature

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and targets [B, K] of 0 and 1."""
        logits, targets = check_targets(logits, targets)
        positive = targets == 1
        return self._mean(logits, positive, dim=0) + self._mean(logits, positive, dim=1)

    def _mean(self, logits: Tensor, positive: Tensor, *, dim: int) -> Tensor:
        """Return the mean loss of the rows or columns with a positive, or 0 without any."""
        scaled = -logits / self.positive_temperature
        scaled = scaled.masked_fill(~positive, IGNORED)
        lowest_positive = self.positive_temperature * scaled.logsumexp(dim)

        scaled = logits / self.negative_temperature
        scaled = scaled.masked_fill(positive, IGNORED)
        highest_negative = self.negative_temperature * scaled.logsumexp(dim)

        loss = F.softplus(highest_negative + lowest_positive)
        has_positive = positive.any(dim)
        return torch.where(has_positive, loss, 0).sum() / has_positive.sum().clamp(min=1)
