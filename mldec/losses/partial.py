"""Asymmetric loss for partially annotated data (arXiv 2110.10955), and its class priors.

A class prior is the mean prediction of a model for the class. Reference:
Alibaba-MIIL/PartialLabelingCSL.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from mldec.losses.base import Loss
from mldec.losses.common import AllReduce, check_class_count, check_range, check_targets, identity
from mldec.runtime.devices import as_float64

Mode = Literal["negative", "ignore", "ignore_normalized", "selective"]


class PartialAsymmetricLoss(Loss):
    """Asymmetric loss with a separate term for unannotated labels (targets of -1).

    Let p = sigmoid(logit) and q = min(1 - p + clip, 1). The loss of a positive, of an annotated
    negative and of an unannotated label, which is a true negative in most cases, are

        -alpha_pos (1 - p)^gamma_pos log(p)
        -alpha_neg (1 - q)^gamma_neg log(q)
        -alpha_unannotated (1 - q)^gamma_unannotated log(q)

    Source: Alibaba-MIIL/PartialLabelingCSL, partial_asymmetric_loss.py.

    Args:
        mode: Handling of unannotated labels. "negative": negatives. "ignore": weight 0.
            "ignore_normalized": weight 0, and the n annotated labels of an image have the weight
            1 + 1 / (1 + n). "selective": negatives, but probable positives have weight 0.
        gamma_pos: Focusing of positives, >= 0.
        gamma_neg: Focusing of annotated negatives, >= 0.
        gamma_unannotated: Focusing of unannotated labels, >= 0.
        alpha_pos: Weight of positives.
        alpha_neg: Weight of annotated negatives.
        alpha_unannotated: Weight of unannotated labels.
        clip: Probability added to 1 - p of annotated negatives and unannotated labels, in [0, 1).
        likelihood_top_k: Mean number of labels per image that "selective" ignores, >= 0: the
            unannotated labels with the highest probability in the batch.
        class_prior: Class priors for "selective": K numbers in [0, 1], or None if unknown.
            "estimate" computes the mean prediction during this training, in every mode (see
            `PriorEstimate`). A config can also name a CSV file, whose numbers `build.loss` reads.
            The official procedure is a first run with mode "ignore" and "estimate", and a second
            run with the resulting file.
        prior_threshold: Prior above which "selective" ignores all unannotated labels of a class.
        eps: Lower bound of a probability inside the logarithm.
        all_reduce: Function that sums a tensor over all ranks, for "estimate".
    """

    reduction = "sum"
    exclusive = False

    def __init__(
        self,
        *,
        mode: Mode = "negative",
        gamma_pos: float = 0.0,
        gamma_neg: float = 1.0,
        gamma_unannotated: float = 2.0,
        alpha_pos: float = 1.0,
        alpha_neg: float = 1.0,
        alpha_unannotated: float = 1.0,
        clip: float = 0.0,
        likelihood_top_k: int = 0,
        class_prior: Sequence[float] | str | None = None,
        prior_threshold: float = 0.5,
        eps: float = 1e-8,
        all_reduce: AllReduce = identity,
    ) -> None:
        super().__init__()
        check_range(0, gamma_pos=gamma_pos, gamma_neg=gamma_neg)
        check_range(0, gamma_unannotated=gamma_unannotated, likelihood_top_k=likelihood_top_k)
        check_range(0, 1, clip=clip)

        self.mode = mode
        self.clip = clip
        self.eps = eps
        self.likelihood_top_k = likelihood_top_k
        self.prior_threshold = prior_threshold

        # For targets of 1, 0 and -1.
        self.gammas = (gamma_pos, gamma_neg, gamma_unannotated)
        self.alphas = (alpha_pos, alpha_neg, alpha_unannotated)

        # The priors are either given or estimated in this training.
        self.estimate: PriorEstimate | None = None
        self.class_prior: Tensor | None
        self.register_buffer("class_prior", None)
        if class_prior == "estimate":
            self.estimate = PriorEstimate(forgetting=mode == "selective", all_reduce=all_reduce)
        elif isinstance(class_prior, str):
            raise ValueError(
                f"class_prior is {class_prior!r}: it must be numbers or 'estimate'; read a file "
                f"with mldec.files.class_prior.read_prior"
            )
        elif class_prior is not None:
            self.class_prior = torch.tensor(list(class_prior))

    def prior(self) -> Tensor | None:
        """Return the given or estimated class priors [K] in [0, 1]; None if unknown."""
        return self.estimated_prior() if self.estimate else self.class_prior

    def estimated_prior(self) -> Tensor | None:
        """Return the estimated class priors [K] in [0, 1]; None before the first batch."""
        return self.estimate.value() if self.estimate else None

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the loss of logits [B, K] and targets [B, K] of 1, 0 or -1 (unannotated)."""
        logits, targets = check_targets(logits, targets, unknown=True)
        positive = logits.sigmoid()
        if self.estimate and self.training:
            self.estimate.update(positive.detach())
        negative = (1 - positive + self.clip).clamp(max=1)

        # The weight and the focusing depend on the target.
        alpha = torch.zeros_like(logits)
        gamma = torch.zeros_like(logits)
        for target, weight, focusing in zip((1, 0, -1), self.alphas, self.gammas, strict=True):
            alpha = alpha.masked_fill(targets == target, weight)
            gamma = gamma.masked_fill(targets == target, focusing)

        # The focal weight has no gradient, as in the official code.
        right = torch.where(targets == 1, positive, negative)
        focal = (1 - right.detach()) ** gamma
        losses = -alpha * right.clamp(min=self.eps).log() * focal
        return self.reduce(losses * self._weights(positive.detach(), targets))

    def _weights(self, probability: Tensor, targets: Tensor) -> Tensor:
        """Return the weight of each label, [B, K]. Ignored labels have weight 0."""
        unannotated = targets == -1
        weights = torch.ones_like(probability)

        if self.mode.startswith("ignore"):
            if self.mode == "ignore_normalized":
                weights = weights * (1 + 1 / (1 + (~unannotated).sum(1, keepdim=True)))
            return weights.masked_fill(unannotated, 0)

        if self.mode == "negative":
            return weights

        # "selective": ignore the unannotated labels of frequent classes.
        prior = self.prior()
        if prior is not None:
            check_class_count("class_prior", prior, targets)
            common = prior.to(targets.device) > self.prior_threshold
            weights = weights.masked_fill(unannotated & common, 0)

        # Also ignore the unannotated labels with the highest predictions.
        if self.likelihood_top_k:
            likely = probability.masked_fill(~unannotated, -1).flatten()
            count = min(self.likelihood_top_k * len(targets), len(likely))
            chosen = likely.topk(count).indices
            # Annotated labels keep their weight. Their entry in `likely` is -1.
            kept = weights.flatten()[chosen] * (likely[chosen] < 0)
            weights = weights.flatten().index_copy(0, chosen, kept).view_as(weights)
        return weights


class PriorEstimate(nn.Module):
    """Running mean of the probability of each class over the training images, on all ranks.

    The estimate is part of the `state_dict` of the loss.

    Args:
        forgetting: Only average over the newest half to three quarters of the images. This removes
            the predictions of the untrained model, which are near 0.5.
        all_reduce: Function that sums a tensor over all ranks.
    """

    def __init__(self, *, forgetting: bool = False, all_reduce: AllReduce = identity) -> None:
        super().__init__()
        self.forgetting = forgetting
        self.all_reduce = all_reduce

        # float64 [K + 1]: the sum of the probabilities per class, and the number of images.
        self.sums: Tensor | None = None
        self.before: Tensor | None = None  # same for the previous window
        self.updates = 0

    def update(self, probability: Tensor) -> None:
        """Add the probabilities [B, K] of a batch. All ranks must call this equally often."""
        # Skip images with non-finite probabilities, as a single NaN would invalidate the estimate.
        # They are masked, because boolean indexing would require a host sync.
        finite = probability.isfinite().all(1, keepdim=True)
        probability = as_float64(probability)
        finite = finite.to(probability.device)
        sums = probability.masked_fill(~finite, 0).sum(0)
        batch_sums = torch.cat([sums, finite.double().sum(0)])
        batch_sums = self.all_reduce(batch_sums)

        # The sums of a resumed run may be on another device.
        if self.sums is None:
            self.sums = batch_sums
        else:
            self.sums = self.sums.to(batch_sums.device) + batch_sums

        # A new window starts each time the number of batches has doubled.
        self.updates += 1
        if self.forgetting and self.updates & (self.updates - 1) == 0:
            self.before = self.sums
            self.sums = torch.zeros_like(self.before)

    def value(self) -> Tensor | None:
        """Return the estimated priors, float32 [K] in [0, 1]; None before the first batch."""
        if self.sums is None:
            return None

        sums = self.sums
        if self.before is not None:
            sums = sums + self.before.to(sums.device)
        return (sums[:-1] / sums[-1].clamp(min=1)).float()

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the sums. They are not buffers, because K is unknown in the constructor."""
        state = {"sums": self.sums, "before": self.before, "updates": torch.tensor(self.updates)}
        return {name: value for name, value in state.items() if value is not None}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the sums of a `state_dict`."""
        self.sums = state.get("sums")
        self.before = state.get("before")
        self.updates = int(state["updates"])
