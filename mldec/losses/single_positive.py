"""Losses for missing labels with a state per training image: ROLE, EM+APL and LL-Cp.

Their `forward` also takes the dataset indices of the images. Targets have the same meaning as in
`mldec.losses.missing`. Values and gradients match the official code of each paper.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mldec.losses.base import Loss
from mldec.losses.common import check_above_0, check_range, check_targets
from mldec.losses.missing import EntropyMaximization, LargeLoss, bounded_log


class ROLE(Loss):
    """Regularized online label estimation (ROLE).

    A label estimator has one parameter for each training image and class, the logit of the
    estimated label. Let f and g be the probabilities of model and estimator, and

        H(q, p) = -q log(p + eps) - (1 - q) log(1 - p + eps)

    the cross-entropy, whose first argument has no gradient. The losses of an unobserved label and
    of an observed positive are

        (H(g, f) + H(f, g)) / 2
        (H(g, f) + H(f, g) + H(1, f) + H(1, g)) / 2

    Each of f and g has a further term, for m positives per image of the micro-batch on average:

        (m - expected_positives)^2 / (2 K^2)

    Source: Cole et al., "Multi-Label Learning from Single Positive Labels" (CVPR 2021, arXiv
    2106.09708), and the official code, trained end to end (without its linear initialization).

    Args:
        expected_positives: Mean number of positives per image, > 0.
        lr_factor: Learning rate of the estimator, relative to `optim.lr`, > 0.
        eps: Added to a probability inside the logarithm, in [0, 1).
        train_labels: Labels of the N training images, [N, K].
    """

    exclusive = False
    per_image = True

    def __init__(
        self,
        *,
        expected_positives: float = 2.9,
        lr_factor: float = 10.0,
        eps: float = 1e-5,
        train_labels: Tensor,
    ) -> None:
        super().__init__()
        check_above_0(expected_positives=expected_positives, lr_factor=lr_factor)
        check_range(0, 1, eps=eps)
        self.expected_positives = expected_positives
        self.lr_factor = lr_factor
        self.eps = eps

        # Unobserved labels start between 0.4 and 0.6, observed positives at 0.995.
        observed = train_labels == 1
        bound = math.log(0.6 / 0.4)
        random = torch.empty(observed.shape).uniform_(-bound, bound)
        self.estimator = nn.Parameter(random.masked_fill(observed, math.log(0.995 / 0.005)))

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K], targets [B, K] and dataset indices [B]."""
        logits, targets = check_targets(logits, targets, unknown=True)
        assert index is not None
        estimated = self.estimator[index].to(logits.dtype)
        one = self._half(logits, estimated.detach(), targets == 1)
        other = self._half(estimated, logits.detach(), targets == 1)
        return (one + other) / 2

    def _half(self, logits: Tensor, others: Tensor, observed: Tensor) -> Tensor:
        """Return the loss of the model, given the logits of the estimator, or vice versa."""
        positive = -bounded_log(logits, self.eps)
        negative = -bounded_log(-logits, self.eps)
        losses = torch.lerp(negative, positive, others.sigmoid()) + positive * observed

        number = logits.sigmoid().sum(1).mean()
        excess = (number - self.expected_positives) / logits.shape[1]
        return losses.mean() + excess**2


class PseudoNegatives(EntropyMaximization):
    """Entropy maximization with asymmetric pseudo-labels (EM+APL).

    At the start of each epoch after the warmup, the model scores all training images. In each
    class, the unlabeled images with the lowest scores get a pseudo-label, which is the score p' and
    is kept by later epochs. Its loss is the cross-entropy

        -beta (p' log(p + eps) + (1 - p') log(1 - p + eps))

    and all other labels have the loss of `EntropyMaximization`. The number of new pseudo-labels of
    a class is its number of unobserved labels times `share`, divided by the number of epochs after
    the warmup, rounded down.

    Source: same as `EntropyMaximization`. As in the official code, the images are scored in
    evaluation mode, with the augmentation of the training.

    Args:
        alpha: Weight of unobserved labels without a pseudo-label, > 0.
        beta: Weight of pseudo-labels, > 0.
        share: Share of the unobserved labels that get a pseudo-label until the end, in (0, 1].
        warmup_epochs: Number of epochs without pseudo-labels, >= 0.
        eps: Added to a probability inside the logarithm, in [0, 1).
        train_labels: Labels of the N training images, [N, K].
    """

    per_image = True
    unobserved: Tensor
    pseudo: Tensor
    last_epoch: Tensor

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        beta: float = 0.9,
        share: float = 0.9,
        warmup_epochs: int = 5,
        eps: float = 1e-5,
        train_labels: Tensor,
    ) -> None:
        super().__init__(alpha=alpha, eps=eps)
        check_above_0(beta=beta, share=share)
        check_range(0, warmup_epochs=warmup_epochs)
        self.beta = beta
        self.share = share
        self.warmup_epochs = warmup_epochs

        unobserved = train_labels != 1
        self.register_buffer("unobserved", unobserved, persistent=False)
        # Pseudo-labels in [0, 1], or -1.
        self.register_buffer("pseudo", torch.full(unobserved.shape, -1.0))
        # The last epoch that added pseudo-labels.
        self.register_buffer("last_epoch", torch.tensor(-1))

    def start_epoch(self, epoch: int, epochs: int, predict: Callable[[], Tensor]) -> None:
        """Add pseudo-labels; see `Loss.start_epoch`."""
        # An epoch can be started twice, if the run was stopped in between.
        if epoch < self.warmup_epochs or epoch <= self.last_epoch:
            return

        probability = predict().sigmoid()
        candidates = self.unobserved & (self.pseudo < 0) & probability.isfinite()
        total = self.unobserved.sum(0, dtype=torch.float64)
        counts = (self.share * total / (epochs - self.warmup_epochs)).floor()

        order = probability.masked_fill(~candidates, math.inf).argsort(dim=0, stable=True)
        chosen = candidates & (order.argsort(dim=0) < counts)
        self.pseudo.copy_(torch.where(chosen, probability, self.pseudo))
        self.last_epoch.fill_(epoch)

    def _losses(self, logits: Tensor, observed: Tensor, index: Tensor | None) -> Tensor:
        assert index is not None
        pseudo = self.pseudo[index].to(logits.dtype)
        losses = super()._losses(logits, observed, index)
        positive = bounded_log(logits, self.eps)
        negative = bounded_log(-logits, self.eps)
        labeled = self.beta * -torch.lerp(negative, positive, pseudo)
        return torch.where(observed | (pseudo < 0), losses, labeled)


class PermanentCorrection(LargeLoss):
    """Binary cross-entropy with permanent correction of large losses (LL-Cp).

    The loss is `LargeLoss` with mode "correct", but a corrected label is a positive for the rest of
    the run. Except in the first stage, each micro-batch of B images corrects `delta` B K further
    labels, rounded up.

    Source: same as `LargeLoss`, and the authors' second repository,
    youngwk/BridgeGapExplanationPAMC. In the first one, the condition for LL-Cp compares strings by
    identity, which selects LL-Ct, and its LL-Cp would keep one correction fewer per batch.

    Args:
        delta: Fraction of corrected labels, in [0, 1).
        stages: Number of stages of the run, >= 1.
        train_labels: Labels of the N training images, [N, K].
    """

    per_image = True
    corrections: Tensor

    def __init__(self, *, delta: float = 0.001, stages: int = 10, train_labels: Tensor) -> None:
        super().__init__(mode="correct", delta=delta, stages=stages)
        # Number of corrections. It is above 1 if the same images are several times in a batch.
        self.register_buffer("corrections", torch.zeros(train_labels.shape, dtype=torch.uint8))

    def _growth(self) -> int:
        return min(super()._growth(), 1)

    def _losses(self, logits: Tensor, observed: Tensor, index: Tensor | None) -> Tensor:
        assert index is not None
        observed = observed | (self.corrections[index] > 0)
        if self.training:
            large = self._large(logits, observed)
            self.corrections.index_add_(0, index, large.to(torch.uint8))
        return super()._losses(logits, observed, index)
