"""Losses for missing labels: some positives are observed, all other labels are unknown.

Each loss has a term for observed positives and a term for all other labels. The other labels are 0
or -1, with the same meaning, and most of them are true negatives. Values and gradients match the
official code of each paper.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mldec.losses.base import Loss
from mldec.losses.common import check_above_0, check_range, check_targets


class MissingLabels(Loss):
    """Base class: a term for observed positives and a term for all other labels."""

    exclusive = False

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and targets [B, K]; only targets of 1 are known."""
        logits, targets = check_targets(logits, targets, unknown=True)
        return self.reduce(self._losses(logits, targets == 1, index))

    def _losses(self, logits: Tensor, observed: Tensor, index: Tensor | None) -> Tensor:
        """Return the loss of each label, [B, K]. `observed` is True for observed positives."""
        return torch.where(observed, self._positive(logits), self._unobserved(logits, observed))

    def _positive(self, logits: Tensor) -> Tensor:
        """Return the loss of each label if it is an observed positive, [B, K]."""
        raise NotImplementedError

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        """Return the loss of each label if it is unobserved, [B, K]."""
        raise NotImplementedError


def bounded_log(logits: Tensor, eps: float) -> Tensor:
    """Return log(p + eps), which is bounded below by log(eps)."""
    return (logits.sigmoid() + eps).log()


def _focal(logits: Tensor, gamma: float) -> Tensor:
    """Return the focal loss of positives, -(1 - p)^gamma log(p). The weight has a gradient."""
    # The power (1 - p)^gamma has an infinite gradient at p = 1 for gammas below 1. Its logarithm
    # is multiplied instead.
    return -(gamma * F.logsigmoid(-logits)).exp() * F.logsigmoid(logits)


class AssumeNegative(MissingLabels):
    """Binary cross-entropy that treats all unobserved labels as negatives: AN, WAN and AN-LS.

    Let p = sigmoid(logit) and s = `smoothing`. The loss of an observed positive is

        -(1 - s) log(p + eps) - s log(1 - p + eps)

    and the loss of an unobserved label is `weight` times the same with p and 1 - p exchanged.

    Source: Cole et al., "Multi-Label Learning from Single Positive Labels" (CVPR 2021, arXiv
    2106.09708), and the official code.

    Args:
        weight: Weight of unobserved labels, > 0. None for 1 / (K - 1), the "weak" form for K
            classes: positives and negatives have equal weight if each image has one observed
            positive.
        smoothing: Share of the opposite label, in [0, 1). It is half of the smoothing of
            `BinaryCrossEntropy`.
        eps: Added to a probability inside the logarithm, in [0, 1).
    """

    def __init__(
        self, *, weight: float | None = 1.0, smoothing: float = 0.0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        check_range(0, 1, smoothing=smoothing, eps=eps)
        if weight is not None:
            check_above_0(weight=weight)
        self.weight = weight
        self.smoothing = smoothing
        self.eps = eps

    def _positive(self, logits: Tensor) -> Tensor:
        opposite = bounded_log(-logits, self.eps)
        return -torch.lerp(bounded_log(logits, self.eps), opposite, self.smoothing)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        weight = self.weight
        if weight is None:
            weight = 1 / max(logits.shape[-1] - 1, 1)
        return weight * self._positive(-logits)


class EntropyMaximization(MissingLabels):
    """Entropy maximization of unobserved labels (EM).

    The loss of an observed positive is the cross-entropy, that of an unobserved label the negative
    entropy, whose gradient is small at p = 1/2 and at both ends:

        -log(p + eps)
        alpha (p log(p + eps) + (1 - p) log(1 - p + eps))

    Source: Zhou et al., "Acknowledging the Unknown for Multi-label Learning with Single Positive
    Labels" (ECCV 2022, arXiv 2203.16219), and the official code, without its pseudo-labels (APL).

    Args:
        alpha: Weight of unobserved labels, > 0. The official code uses 0.1 for MS-COCO and
            NUS-WIDE, 0.2 for VOC and 0.01 for CUB.
        eps: Added to a probability inside the logarithm, in [0, 1).
    """

    def __init__(self, *, alpha: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        check_above_0(alpha=alpha)
        check_range(0, 1, eps=eps)
        self.alpha = alpha
        self.eps = eps

    def _positive(self, logits: Tensor) -> Tensor:
        return -bounded_log(logits, self.eps)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        positive = logits.sigmoid() * bounded_log(logits, self.eps)
        negative = (-logits).sigmoid() * bounded_log(-logits, self.eps)
        return self.alpha * (positive + negative)


class HillLoss(MissingLabels):
    """Focal loss with a margin for positives, and a hill-shaped loss for unobserved labels (Hill).

    The loss of an unobserved label is

        (lam - p) p^2

    whose gradient decreases again for high p, where the label is probably a missing positive. The
    loss of an observed positive is the focal loss, with p = sigmoid(logit - margin):

        -(1 - p)^gamma log(p)

    Source: Zhang et al., "Simple and Robust Loss Design for Multi-Label Learning with Missing
    Labels" (arXiv 2112.07368), and the official code.

    Args:
        lam: Height of the hill, >= 1. The gradient is 0 at p = 2/3 lam.
        margin: Margin subtracted from the logits of positives. 0.5 to 1 in the paper.
        gamma: Focusing of positives, >= 0.
    """

    reduction = "sum"

    def __init__(self, *, lam: float = 1.5, margin: float = 1.0, gamma: float = 2.0) -> None:
        super().__init__()
        check_range(1, lam=lam)
        check_range(0, gamma=gamma)
        self.lam = lam
        self.margin = margin
        self.gamma = gamma

    def _positive(self, logits: Tensor) -> Tensor:
        return _focal(logits - self.margin, self.gamma)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        probability = logits.sigmoid()
        return (self.lam - probability) * probability**2


class SPLC(MissingLabels):
    """Self-paced loss correction: focal loss with a margin and online pseudo-labels.

    The focal loss is -(1 - p)^gamma log(p). Unobserved labels with p > tau are treated as positives
    and the others as negatives. The margin applies to observed positives only, as in `HillLoss`.

    Source: same as `HillLoss`.

    Args:
        tau: Probability above which an unobserved label is treated as positive, in [0, 1). The
            official code uses 0.6, and 0.65 for MS-COCO with 75 % of the labels.
        start: Progress of the run, in [0, 1), from which `tau` is applied. Before that, all
            unobserved labels are negatives. The official code starts after the first of 80 epochs.
        margin: Margin subtracted from the logits of observed positives.
        gamma: Focusing, >= 0.
    """

    reduction = "sum"

    def __init__(
        self, *, tau: float = 0.6, start: float = 0.0125, margin: float = 1.0, gamma: float = 2.0
    ) -> None:
        super().__init__()
        check_range(0, 1, tau=tau, start=start)
        check_range(0, gamma=gamma)
        self.tau = tau
        self.start = start
        self.margin = margin
        self.gamma = gamma

    def _positive(self, logits: Tensor) -> Tensor:
        return _focal(logits - self.margin, self.gamma)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        negative = _focal(-logits, self.gamma)
        if self.progress < self.start:
            return negative
        missing = logits.sigmoid() > self.tau
        return torch.where(missing, _focal(logits, self.gamma), negative)


class LargeLoss(MissingLabels):
    """Binary cross-entropy that rejects or corrects the unobserved labels with the largest losses.

    Unobserved labels are treated as negatives, except for those with the largest losses in each
    micro-batch, which are ignored (LL-R) or treated as positives (LL-Ct). Their number grows in
    equal stages. In stage s, counted from 0, it is

        delta s B K

    for B images and K classes, rounded up. `PermanentCorrection` is LL-Cp.

    Source: Kim et al., "Large Loss Matters in Weakly Supervised Multi-Label Classification" (CVPR
    2022, arXiv 2206.03740), and the official code, which has one stage per epoch. The number of
    labels is exact here. The official code rounds a sum of floats up, which adds one label in 101
    of 450 combinations of batch size, number of classes, `delta` and epoch.

    Args:
        mode: "reject" (LL-R) or "correct" (LL-Ct).
        delta: Growth per stage as a fraction of all labels, in [0, 1). The official values were
            tuned between 0.001 and 0.005.
        stages: Number of stages of the run, >= 1.
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
        self.mode = mode
        self.delta = delta
        self.stages = stages

    def _positive(self, logits: Tensor) -> Tensor:
        return F.softplus(-logits)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        negative = F.softplus(logits)
        replacement = torch.zeros_like(negative)
        if self.mode == "correct":
            replacement = self._positive(logits)
        return torch.where(self._large(logits, observed), replacement, negative)

    def _growth(self) -> int:
        """Return the number of stages with a growth of `delta` until now."""
        return current_stage(self.progress, self.stages)

    def _large(self, logits: Tensor, observed: Tensor) -> Tensor:
        """Return which unobserved labels are rejected or corrected, bool [B, K]."""
        # The exact decimal number. A product of floats may be rounded up to one label more.
        exact = Fraction(str(self.delta)) * self._growth() * logits.numel()
        count = min(math.ceil(exact), logits.numel())
        if not count:
            return torch.zeros_like(observed)

        losses = F.softplus(logits.detach()).masked_fill(observed, 0)
        smallest = losses.flatten().topk(count).values[-1]
        return (losses >= smallest) & ~observed


def current_stage(progress: float, stages: int) -> int:
    """Return the stage, from 0 to `stages` - 1, of a run with equal stages."""
    # Without the offset, a rounding error at a boundary would select the previous stage.
    return math.floor(progress * stages + 1e-9)


class GeneralizedRobustLoss(MissingLabels):
    """Weighted combination of a positive and a negative loss for each unobserved label (GR).

    The loss of an observed positive is -log(p + eps). The loss of an unobserved label is

        v (k (1 - p^q2) / q2 + (1 - k) (1 - (1 - p)^q3) / q3)

    where the probability k of a missing positive and the weight v have no gradient:

        k = sigmoid(w p + b)
        v = exp(-(p - mu)^2 / (2 sigma^2))

    Source: Chen et al., "Boosting Single Positive Multi-label Classification with Generalized
    Robust Loss" (IJCAI 2024, arXiv 2405.03501), and the official code, which has the same defaults.

    Args:
        w: Slope of k at the start and at the end of the run, with linear interpolation.
        b: Offset of k at the start and at the end of the run.
        mu: Probability with the largest weight at the start and at the end of the run.
        sigma: Width of the weight at the start and at the end of the run, > 0.
        q2: Power of positives, > 0. Near 0 it is the cross-entropy, at 1 the absolute error.
        q3: Power of negatives, > 0.
        eps: Added to a probability inside the logarithm, in [0, 1).
        stages: Number of equal stages of the run, >= 1, in which w, b, mu and sigma are constant.
            mu and sigma have the values of the next stage, as in the official code, which has one
            stage per epoch. None: all of them change with each step.
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
        stages: int | None = None,
    ) -> None:
        super().__init__()
        check_above_0(q2=q2, q3=q3, sigma=min(sigma))
        check_range(0, 1, eps=eps)
        self.ramps = {"w": w, "b": b, "mu": mu, "sigma": sigma}
        for name, ramp in self.ramps.items():
            if len(ramp) != 2:
                raise ValueError(f"{name} is {list(ramp)}: it must be the values at start and end")
        self.q2 = q2
        self.q3 = q3
        self.eps = eps
        if stages is not None:
            check_range(1, stages=stages)
        self.stages = stages

    def _positive(self, logits: Tensor) -> Tensor:
        return -bounded_log(logits, self.eps)

    def _unobserved(self, logits: Tensor, observed: Tensor) -> Tensor:
        progress = self.progress
        next_progress = progress
        if self.stages is not None:
            stage = current_stage(progress, self.stages)
            progress = stage / self.stages
            next_progress = (stage + 1) / self.stages

        values: dict[str, float] = {}
        for name, (start, end) in self.ramps.items():
            share = next_progress if name in ("mu", "sigma") else progress
            values[name] = start + (end - start) * share

        probability = logits.detach().sigmoid()
        missing = (values["w"] * probability + values["b"]).sigmoid()
        weight = (-0.5 * ((probability - values["mu"]) / values["sigma"]) ** 2).exp()

        positive = _power_loss(logits, self.q2)
        negative = _power_loss(-logits, self.q3)
        return weight * torch.lerp(negative, positive, missing)


def _power_loss(logits: Tensor, q: float) -> Tensor:
    """Return (1 - p^q) / q, the generalized cross-entropy of positives (arXiv 1805.07836)."""
    # expm1 is accurate for powers near 1, and the gradient is finite at p = 0.
    return -torch.expm1(q * F.logsigmoid(logits)) / q
