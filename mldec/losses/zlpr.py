"""ZLPR, the zero-bounded log-sum-exp and pairwise rank-based loss (arXiv 2208.02955)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.losses.targets import check_reduction, prepare


class ZLPR(nn.Module):
    """Rank every positive of an image above 0, and 0 above every negative.

    Per image, the loss is log(1 + sum_i y_i exp(-s_i)) + log(1 + sum_i (1 - y_i) exp(s_i)), for
    logits s and targets y. For targets of 0 and 1 it compares each positive with each negative;
    targets in between are the soft version of the paper. A class is predicted if its logit is above
    0. There is nothing to tune, and no factor that grows with the number of negatives.

    Source: Su et al., "ZLPR: A Novel Loss for Multi-label Classification" (2022): the definition
    and the section on the soft version.

    Args:
        reduction: "mean" over the images of the batch, or "sum".

    Raises:
        ConfigError: for another reduction.
    """

    exclusive = False
    soft = True

    def __init__(self, *, reduction: Literal["sum", "mean"] = "mean") -> None:
        super().__init__()
        check_reduction(reduction)

        self.reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] from 0 to 1 to the loss [], float32.

        Raises:
            DataError: for any other target.
        """
        logits, targets = prepare(logits, targets, soft=True)

        # The logarithm of a target of 0 is -inf, which leaves the class out of the sum.
        positives = _log_one_plus_sum(targets.log() - logits)
        negatives = _log_one_plus_sum((1 - targets).log() + logits)

        losses = positives + negatives
        return losses.sum() if self.reduction == "sum" else losses.mean()


def _log_one_plus_sum(exponents: Tensor) -> Tensor:
    """Map exponents [B, K] to log(1 + sum exp(exponents)), [B]."""
    # The 1 is exp(0): a further column of zeros keeps each sum above 0.
    return torch.logsumexp(F.pad(exponents, (0, 1)), dim=1)
