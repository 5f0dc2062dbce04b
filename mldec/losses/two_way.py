"""The two-way multi-label loss (Kobayashi, CVPR 2023)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.losses.targets import prepare


class TwoWayLoss(nn.Module):
    """Compare positives with negatives in two ways: within each image, and within each class.

    The comparison of a row of logits s is softplus(Tn log sum_n exp(s_n / Tn) + Tp log sum_p
    exp(-s_p / Tp)), with n over the negatives and p over the positives: the highest negative minus
    the lowest positive, both softened by a temperature. The loss is its mean over the images of the
    batch that have a positive, plus its mean over the classes that have one. With one label per
    image and Tn = 1 the first mean is softmax cross-entropy.

    The second mean compares the images of a micro-batch of one process with each other. So unlike
    with other losses, a run depends on `train.accumulate` and on the number of processes.

    Logits rank; their sigmoids are no probabilities, and 0 is no threshold.

    Source: Kobayashi, "Two-way Multi-Label Loss" (CVPR 2023), and the official code
    (tk1980/TwowayMultiLabelLoss), whose temperatures are the defaults.

    Args:
        positive_temperature: Tp, above 0.
        negative_temperature: Tn, above 0.

    Raises:
        ValueError: for a value out of its range.
    """

    reduction = "mean"

    def __init__(
        self, *, positive_temperature: float = 4.0, negative_temperature: float = 1.0
    ) -> None:
        super().__init__()
        for name, temperature in (
            ("positive_temperature", positive_temperature),
            ("negative_temperature", negative_temperature),
        ):
            if temperature <= 0:
                raise ValueError(f"{name} is {temperature}: it must be above 0")

        self.positive_temperature = positive_temperature
        self.negative_temperature = negative_temperature

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] of 0 and 1 to the loss [], float32.

        Raises:
            DataError: for any other target.
        """
        logits, targets = prepare(logits, targets)
        positive = targets == 1

        return self._mean_of_rows(logits, positive) + self._mean_of_rows(logits.T, positive.T)

    def _mean_of_rows(self, logits: Tensor, positive: Tensor) -> Tensor:
        """Return the mean comparison of the rows [R, C] that have a positive, []."""
        has_positive = positive.any(1)

        # A row without a negative counts as 0.
        comparable = has_positive & ~positive.all(1)
        logits, positive = logits[comparable], positive[comparable]

        positives = (-logits / self.positive_temperature).masked_fill(~positive, -math.inf)
        negatives = (logits / self.negative_temperature).masked_fill(positive, -math.inf)
        lowest_positive = -self.positive_temperature * torch.logsumexp(positives, dim=1)
        highest_negative = self.negative_temperature * torch.logsumexp(negatives, dim=1)

        losses = F.softplus(highest_negative - lowest_positive)
        return losses.sum() / has_positive.sum().clamp(min=1)
