"""The asymmetric loss for partly annotated data (arXiv 2110.10955), and the priors of its classes.

A prior is the mean prediction of a model per class. Source: Alibaba-MIIL/PartialLabelingCSL.
"""

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from mldec.errors import DataError, refusing
from mldec.files.text import open_text
from mldec.losses.common import AllReduce, check_class_count, check_range, identity, prepare
from mldec.runtime.devices import in_double

log = logging.getLogger("mldec")

COLUMNS = ["Classes", "avg_pred"]

Mode = Literal["negative", "ignore", "ignore_normalized", "selective"]


class PartialAsymmetricLoss(nn.Module):
    """The asymmetric loss with separate terms for labels of -1 (not annotated).

    Most of the unannotated labels are negative in truth.

    Source: Alibaba-MIIL/PartialLabelingCSL, partial_asymmetric_loss.py.

    Args:
        mode: how unannotated labels count. "negative": all as negatives. "ignore": not at all.
            "ignore_normalized": not at all, and the annotated labels of an image weigh 1 + 1 / (1 +
            their number). "selective": as negatives, except for those that are likely to be
            positive.
        gamma_pos: focusing of positives, >= 0.
        gamma_neg: of annotated negatives, >= 0.
        gamma_unannotated: of the unannotated, >= 0.
        alpha_pos: weight of positives.
        alpha_neg: of annotated negatives.
        alpha_unannotated: of the unannotated.
        clip: probability added to 1 - p of negatives of both kinds, in [0, 1).
        likelihood_top_k: "selective": the B x likelihood_top_k unannotated labels with the highest
            probability in a batch of B images do not count.
        class_prior: "selective": the fraction of images that show each class, K numbers or a CSV
            file, see `read_prior`, or None for unknown. "estimate", in every mode: the mean
            prediction during this training, see `PriorEstimate`; the official way is to estimate
            with mode "ignore" and to pass the file to a second run.
        prior_threshold: "selective": unannotated labels of classes with a higher prior do not
            count.
        eps: lower bound of a probability inside the logarithm.
        all_reduce: sums a tensor over all processes, for "estimate".
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

        self.mode, self.clip, self.eps = mode, clip, eps
        self.gammas = gamma_pos, gamma_neg, gamma_unannotated  # for targets of 1, 0 and -1
        self.alphas = alpha_pos, alpha_neg, alpha_unannotated
        self.likelihood_top_k, self.prior_threshold = likelihood_top_k, prior_threshold

        # The priors are either given, and fixed, or estimated in this training.
        self.estimate: PriorEstimate | None = None
        self.class_prior: Tensor | None
        prior: Sequence[float] | None = None
        if class_prior == "estimate":
            self.estimate = PriorEstimate(forgetting=mode == "selective", all_reduce=all_reduce)
        elif isinstance(class_prior, str):
            prior = read_prior(class_prior)
        else:
            prior = class_prior
        self.register_buffer("class_prior", None if prior is None else torch.tensor(list(prior)))

    def prior(self) -> Tensor | None:
        """Return the given class priors or the estimate so far, [K] in [0, 1], or None."""
        return self.estimate.value() if self.estimate else self.class_prior

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K] of 1, 0 and -1 to the summed loss [], float32."""
        logits, targets = prepare(logits, targets, unknown=True)
        positive = logits.sigmoid()
        if self.estimate and self.training:
            self.estimate.update(positive.detach())
        negative = (1 - positive + self.clip).clamp(max=1)

        # Each of the three kinds of labels has a weight and a focusing of its own.
        alpha = gamma = torch.zeros_like(logits)
        for kind, alpha_of_kind, gamma_of_kind in zip(
            (1, 0, -1), self.alphas, self.gammas, strict=True
        ):
            alpha = alpha.masked_fill(targets == kind, alpha_of_kind)
            gamma = gamma.masked_fill(targets == kind, gamma_of_kind)

        # The focal weight has no gradient, as officially.
        right = torch.where(targets == 1, positive, negative)
        focal = (1 - right.detach()) ** gamma
        losses = -alpha * right.clamp(min=self.eps).log() * focal
        return (losses * self._weights(positive.detach(), targets)).sum()

    def _weights(self, probability: Tensor, targets: Tensor) -> Tensor:
        """Return the weight of each label, [B, K]: 0 for those that do not count."""
        unannotated = targets == -1
        weights = torch.ones_like(probability)

        if self.mode.startswith("ignore"):
            if self.mode == "ignore_normalized":
                weights = weights * (1 + 1 / (1 + (~unannotated).sum(1, keepdim=True)))
            return weights.masked_fill(unannotated, 0)

        if self.mode == "negative":
            return weights

        # "selective": drop the unannotated labels of classes that many images show ...
        prior = self.prior()
        if prior is not None:
            check_class_count("class_prior", prior, targets)
            common = prior.to(targets.device) > self.prior_threshold
            weights = weights.masked_fill(unannotated & common, 0)

        # ... and those that the model itself thinks are positive.
        if self.likelihood_top_k:
            likely = probability.masked_fill(~unannotated, -1).flatten()
            chosen = likely.topk(min(self.likelihood_top_k * len(targets), len(likely))).indices
            # The annotated ones, which are -1 here, keep their weight.
            kept = weights.flatten()[chosen] * (likely[chosen] < 0)
            weights = weights.flatten().index_copy(0, chosen, kept).view_as(weights)
        return weights


# Class priors: estimated, read and written


class PriorEstimate(nn.Module):
    """The mean probability of each class over the training images so far, on all processes.

    It is part of the loss's `state_dict`. With `forgetting` it is over the newer images only, at
    least half and at most three quarters of them: what an untrained model predicts, near 0.5 for
    every class, must not count for ever.
    """

    def __init__(self, *, forgetting: bool = False, all_reduce: AllReduce = identity) -> None:
        super().__init__()
        self.forgetting = forgetting
        self.all_reduce = all_reduce

        # float64 [K + 1]: the sum of the probabilities per class, and the number of images.
        self.sums: Tensor | None = None
        self.before: Tensor | None = None  # of the window before, which counts too
        self.updates = 0

    def update(self, probability: Tensor) -> None:
        """Add the probabilities of a batch, [B, K]; all processes must call this equally often."""
        # One NaN would spoil the estimate for good; the learner skips such a step as well. Taking
        # these images out would need their number, for which a GPU had to be waited for.
        finite = probability.isfinite().all(1, keepdim=True)
        probability = in_double(probability)
        finite = finite.to(probability.device)
        sums = probability.masked_fill(~finite, 0).sum(0)
        batch_sums = torch.cat([sums, finite.double().sum(0)])
        batch_sums = self.all_reduce(batch_sums)

        # After a resumption the sums so far may be on another device.
        if self.sums is None:
            self.sums = batch_sums
        else:
            self.sums = self.sums.to(batch_sums.device) + batch_sums

        # A window ends whenever the number of batches has doubled.
        self.updates += 1
        if self.forgetting and self.updates & (self.updates - 1) == 0:
            self.before, self.sums = self.sums, torch.zeros_like(self.sums)

    def value(self) -> Tensor | None:
        """Return the estimate, float32 [K] in [0, 1]; None before the first batch."""
        if self.sums is None:
            return None

        sums = self.sums
        if self.before is not None:
            sums = sums + self.before.to(sums.device)
        return (sums[:-1] / sums[-1].clamp(min=1)).float()

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the sums: no buffer, as the number of classes is unknown in the constructor."""
        state = {"sums": self.sums, "before": self.before, "updates": torch.tensor(self.updates)}
        return {name: value for name, value in state.items() if value is not None}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the sums of a state_dict."""
        self.sums, self.before = state.get("sums"), state.get("before")
        self.updates = int(state["updates"])


def read_prior(path: str | Path) -> list[float]:
    """Read the priors of a file: K numbers in its order, which must be that of the classes."""
    form = f"a CSV file with the header {','.join(COLUMNS)} and a number from 0 to 1 per class"
    with refusing(f"loss.class_prior {path}", DataError, remedy=f"give {form}"):
        with open_text(path, newline="") as file:
            _, *rows = csv.reader(file, strict=True)
        prior = [float(text) for _, text in rows]
        # NaN fails these comparisons too.
        if not all(0 <= value <= 1 for value in prior):
            raise ValueError("a number outside of this range")
        return prior


def save_estimate(loss: nn.Module, path: Path, names: Sequence[str]) -> None:
    """Write the class priors that a loss has estimated in training, if it has."""
    estimate = getattr(loss, "estimate", None)
    prior = estimate.value() if isinstance(estimate, PriorEstimate) else None
    if prior is None:
        return

    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(names, prior.tolist(), strict=True))
    log.info(f"class priors, for loss.class_prior of another run: {path}")
