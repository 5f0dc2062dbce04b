"""Detection of classes with the same score for all images."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mldec.runtime import distributed
from mldec.runtime.devices import as_float64, to_device

EXTREME = math.log(0.999 / 0.001)  # logit of a probability of 0.999
NEARLY_ALL = 0.99  # fraction of the images
MIN_DEVIATION = 0.01  # minimum standard deviation of the logits of a class
LEARNED_AP = 50.0  # a class with a higher AP in percent ranks its images well and was learned


class ConstantScores:
    """Find the classes that have the same score for nearly all images.

    A class is constant if the standard deviation of its logits is below 0.01. It is also constant
    if 99 % of its probabilities are within 1e-3 of 1, or of 0, and its log loss exceeds log 2, the
    loss of a constant probability of 0.5. The loss separates untrained classes from rare classes,
    whose scores are near 0 for good reason. Classes with only one label value are ignored. The
    limits are our choice.
    """

    def __init__(self, num_classes: int) -> None:
        self.sums = torch.zeros(7, num_classes, dtype=torch.float64)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits [B, K], targets [B, K] of 1, 0 or -1 (not annotated)."""
        logits = as_float64(logits)
        targets = to_device(targets, logits.device)
        positives = (targets == 1).double()
        losses = softplus(logits) - positives * logits
        values = [torch.ones_like(logits), positives, losses, logits, logits**2]
        values += [(logits > EXTREME).double(), (logits < -EXTREME).double()]
        sums = torch.stack([torch.where(targets >= 0, value, 0).sum(0) for value in values])
        self.sums = self.sums.to(sums.device) + sums

    def classes(self) -> list[int]:
        """Return the indices of the constant classes over the images of all ranks."""
        images, positives, losses, logits, squares, high, low = distributed.total(self.sums.cpu())
        has_both = (positives > 0) & (positives < images)
        is_extreme = torch.maximum(high, low) >= NEARLY_ALL * images
        is_wrong = losses > math.log(2) * images
        variance = squares / images - (logits / images) ** 2
        found = has_both & ((is_extreme & is_wrong) | (variance < MIN_DEVIATION**2))
        return torch.nonzero(found).flatten().tolist()
