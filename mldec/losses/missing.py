"""Losses for missing labels: only some positives are observed, and all other labels are unknown.

Each has one term for an observed positive and one for every other label, 0 and -1 alike, of which
most are negative in truth. Values and gradients are those of the authors' code.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.losses.common import check_above_0, check_range, prepare


class _MissingLabels(nn.Module):
    """A term for observed positives, another for all other labels, and their sum or mean."""

    reduction = "mean"
    exclusive = False
    progress = 0.0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] of 1, 0 and -1 to the loss [], float32."""
        logits, targets = prepare(logits, targets, unknown=True)
        observed = targets == 1
        losses = torch.where(observed, self._positive(logits), self._unobserved(logits, observed))
        return losses.sum() if self.reduction == "sum" else losses.mean()

    def _positive(self, logits: Tensor) -> Tensor:
        """Return the losses of labels that are observed to be positive, [B, K]."""
        raise NotImplementedError

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        """Return the losses of all other labels, [B, K]."""
        raise NotImplementedError


def _bounded_log(logits: Tensor, eps: float) -> Tensor:
    """Return log(p + eps) of the probabilities, which is bounded below by log(eps)."""
    return (logits.sigmoid() + eps).log()


def _focal(logits: Tensor, gamma: float) -> Tensor:
    """Return the focal loss of positives, -(1 - p)^gamma log(p), whose weight has a gradient."""
    # As a power of 1 - p, the weight would have an infinite gradient at 0 for gammas below 1.
    return -(gamma * F.logsigmoid(-logits)).exp() * F.logsigmoid(logits)


class AssumeNegative(_MissingLabels):
    """Binary cross-entropy that takes every unobserved label for a negative: AN, WAN and AN-LS.

    With p = sigmoid(logit), the loss of an observed positive is -(1 - s) log(p + eps) - s log(1 - p
    + eps), that of an unobserved label `weight` times the same with p and 1 - p exchanged, where s
    is `smoothing`.

    Source: Cole et al., "Multi-Label Learning from Single Positive Labels" (CVPR 2021, arXiv
    2106.09708), and the official code.

    Args:
        weight: of unobserved labels, > 0; None is 1 / (K - 1), the "weak" form for K classes: as
            many positives as negatives, if an image has one observed positive.
        smoothing: share of the opposite label, in [0, 1): half of that of `BinaryCrossEntropy`.
        eps: added to a probability inside the logarithm, in [0, 1).
    """

    def __init__(
        self, *, weight: float | None = 1.0, smoothing: float = 0.0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        check_range(0, 1, smoothing=smoothing, eps=eps)
        if weight is not None:
            check_above_0(weight=weight)
        self.weight, self.smoothing, self.eps = weight, smoothing, eps

    def _positive(self, logits: Tensor) -> Tensor:
        opposite = _bounded_log(-logits, self.eps)
        return -torch.lerp(_bounded_log(logits, self.eps), opposite, self.smoothing)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        weight = 1 / max(logits.shape[-1] - 1, 1) if self.weight is None else self.weight
        return weight * self._positive(-logits)


class EntropyMaximization(_MissingLabels):
    """Maximise the entropy of unobserved labels instead of taking them for negatives (EM).

    An observed positive has the loss -log(p + eps), an unobserved label alpha (p log(p + eps) + (1
    - p) log(1 - p + eps)), which is negative: its gradient is small at p = 1/2 and at both ends.

    Source: Zhou et al., "Acknowledging the Unknown for Multi-label Learning with Single Positive
    Labels" (ECCV 2022, arXiv 2203.16219), and the official code, without its pseudo-labels (APL).

    Args:
        alpha: weight of unobserved labels, > 0; officially 0.1 for MS-COCO and NUS-WIDE, 0.2 for
            VOC and 0.01 for CUB.
        eps: added to a probability inside the logarithm, in [0, 1).
    """

    def __init__(self, *, alpha: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        check_above_0(alpha=alpha)
        check_range(0, 1, eps=eps)
        self.alpha, self.eps = alpha, eps

    def _positive(self, logits: Tensor) -> Tensor:
        return -_bounded_log(logits, self.eps)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        positive = logits.sigmoid() * _bounded_log(logits, self.eps)
        negative = (-logits).sigmoid() * _bounded_log(-logits, self.eps)
        return self.alpha * (positive + negative)


class HillLoss(_MissingLabels):
    """Focal loss with a margin for positives, and a hill for unobserved labels (Hill).

    An unobserved label has the loss (lam - p) p^2, whose gradient falls again where p is so high
    that the label is probably a missing positive. A positive has the focal loss of its logit minus
    `margin`.

    Source: Zhang et al., "Simple and Robust Loss Design for Multi-Label Learning with Missing
    Labels" (arXiv 2112.07368), and the official code.

    Args:
        lam: height of the hill, at least 1; the gradient vanishes at p = 2/3 lam.
        margin: taken off the logit of positives; 0.5 to 1 in the paper.
        gamma: focusing of positives, >= 0.
    """

    reduction = "sum"

    def __init__(self, *, lam: float = 1.5, margin: float = 1.0, gamma: float = 2.0) -> None:
        super().__init__()
        check_range(1, lam=lam)
        check_range(0, gamma=gamma)
        self.lam, self.margin, self.gamma = lam, margin, gamma

    def _positive(self, logits: Tensor) -> Tensor:
        return _focal(logits - self.margin, self.gamma)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        probability = logits.sigmoid()
        return (self.lam - probability) * probability**2


class SPLC(_MissingLabels):
    """Focal loss with a margin, whose unobserved labels above a threshold count as positives.

    SPLC is self-paced loss correction. Source: as of `HillLoss`.

    Args:
        tau: probability above which an unobserved label counts as positive, in [0, 1); officially
            0.6, and 0.65 for MS-COCO with 75 % of the labels.
        start: share of the run after which this begins, in [0, 1): before that, unobserved labels
            are negatives. Officially after the first of 80 planned epochs.
        margin: taken off the logit of observed positives.
        gamma: focusing, >= 0.
    """

    reduction = "sum"

    def __init__(
        self, *, tau: float = 0.6, start: float = 0.0125, margin: float = 1.0, gamma: float = 2.0
    ) -> None:
        super().__init__()
        check_range(0, 1, tau=tau, start=start)
        check_range(0, gamma=gamma)
        self.tau, self.start, self.margin, self.gamma = tau, start, margin, gamma

    def _positive(self, logits: Tensor) -> Tensor:
        return _focal(logits - self.margin, self.gamma)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        negative = _focal(-logits, self.gamma)
        if self.progress < self.start:
            return negative
        missing = logits.sigmoid() > self.tau
        return torch.where(missing, _focal(logits, self.gamma), negative)


class LargeLoss(_MissingLabels):
    """Binary cross-entropy that distrusts the unobserved labels of the largest losses.

    Unobserved labels are negatives, but those with the largest losses of a micro-batch are left out
    (LL-R), or count as positives in this step (LL-Ct). Their number grows in equal stages from 0:
    in stage s, from 0, it is `delta` s B K of B images and K classes, rounded up.

    Source: Kim et al., "Large Loss Matters in Weakly Supervised Multi-Label Classification" (CVPR
    2022, arXiv 2206.03740), and the official code, whose stages are ten epochs. That code rounds a
    product of floats, which can count one label more.

    Args:
        mode: "reject" (LL-R) or "correct" (LL-Ct).
        delta: growth per stage, as a share of all labels, in [0, 1); officially one of 0.001 to
            0.005, tuned.
        stages: stages of the run, at least 1.
    """

    def __init__(
        self,
        *,
        mode: Literal["reject", "correct"] = "reject",
        delta: float = 0.002,
        stages: int = 10,
    ) -> None:
        super().__init__()
        check_range(0, 1, delta=delta)
        check_range(1, stages=stages)
        self.mode, self.delta, self.stages = mode, delta, stages
        # The decimal number that the user wrote: a product of floats may round up a label too many.
        self.growth = Fraction(str(delta))

    def _positive(self, logits: Tensor) -> Tensor:
        return F.softplus(-logits)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        negative = F.softplus(logits)

        # Rounding must not move a stage that begins at a decimal fraction of the run.
        stage = math.floor(self.progress * self.stages + 1e-9)
        count = min(math.ceil(self.growth * stage * logits.numel()), logits.numel())
        if not count:
            return negative

        losses = negative.detach().masked_fill(observed, 0)
        smallest = losses.flatten().topk(count).values[-1]
        other = self._positive(logits) if self.mode == "correct" else torch.zeros_like(negative)
        return torch.where(losses < smallest, negative, other)


class GeneralizedRobustLoss(_MissingLabels):
    """Weigh, for each unobserved label, a loss of positives against one of negatives (GR).

    An observed positive has the loss -log(p + eps), an unobserved label v (k (1 - p^q2) / q2 + (1 -
    k) (1 - (1 - p)^q3) / q3): k = sigmoid(w p + b) is the probability that it is a missing
    positive, and v = exp(-(p - mu)^2 / (2 sigma^2)) its weight. Both have no gradient.

    Source: Chen et al., "Boosting Single Positive Multi-label Classification with Generalized
    Robust Loss" (IJCAI 2024, arXiv 2405.03501), and the official code, which has these defaults.
    There w, b, mu and sigma change from epoch to epoch, mu and sigma one epoch ahead; here all of
    them change with each step.

    Args:
        w: slope of k at the start and at the end of the run; in between it changes linearly.
        b: offset of k, likewise.
        mu: probability with the largest weight, likewise.
        sigma: width of the weight, likewise, > 0.
        q2: power of positives, > 0: near 0 it is cross-entropy, at 1 the absolute error.
        q3: power of negatives, > 0.
        eps: added to a probability inside the logarithm, in [0, 1).
    """

    def __init__(
        self,
        *,
        w: Sequence[float] = (0.0, 2.0),
        b: Sequence[float] = (-2.0, -2.0),
        mu: Sequence[float] = (0.5, 0.8),
        sigma: Sequence[float] = (2.0, 0.5),
        q2: float = 0.01,
        q3: float = 1.0,
        eps: float = 1e-7,
    ) -> None:
        super().__init__()
        check_above_0(q2=q2, q3=q3, sigma=min(sigma))
        check_range(0, 1, eps=eps)
        self.ramps = {"w": w, "b": b, "mu": mu, "sigma": sigma}
        for name, ramp in self.ramps.items():
            if len(ramp) != 2:
                raise ValueError(f"{name} is {list(ramp)}: it must be its value at start and end")
        self.q2, self.q3, self.eps = q2, q3, eps

    def _positive(self, logits: Tensor) -> Tensor:
        return -_bounded_log(logits, self.eps)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        w, b, mu, sigma = (
            start + (end - start) * self.progress for start, end in self.ramps.values()
        )
        probability = logits.detach().sigmoid()
        missing = (w * probability + b).sigmoid()
        weight = (-0.5 * ((probability - mu) / sigma) ** 2).exp()

        positive = _power_loss(logits, self.q2)
        negative = _power_loss(-logits, self.q3)
        return weight * torch.lerp(negative, positive, missing)


def _power_loss(logits: Tensor, q: float) -> Tensor:
    """Return (1 - p^q) / q, the generalised cross-entropy of positives (arXiv 1805.07836)."""
    # expm1 keeps the digits of a power near 1, and the gradient is finite at p = 0.
    return -torch.expm1(q * F.logsigmoid(logits)) / q
