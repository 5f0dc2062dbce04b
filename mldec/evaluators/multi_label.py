"""Metrics for multi-label classification, computed in one pass over the predictions."""

import math

import torch
from torch import Tensor

from mldec.errors import ConfigError
from mldec.evaluators.average_precision import INTERPOLATIONS, Predictions, average_precision_of_all
from mldec.runtime import distributed
from mldec.runtime.devices import as_float64


class Counts:
    """True positives, predictions, positives and negatives per class, for one decision rule.

    Targets of -1 are ignored. The counts are float64 [K], on the device of the last batch. Without
    float64 on this device, they are on the CPU.
    """

    def __init__(self, num_classes: int) -> None:
        self._set(torch.zeros(4, num_classes, dtype=torch.float64))

    @classmethod
    def of(cls, sums: Tensor) -> "Counts":
        """Create counts from float64 [4, K]: true positives, predictions, positives, negatives."""
        counts = cls(0)
        counts._set(sums)
        return counts

    def _set(self, sums: Tensor) -> None:
        self._sums = sums
        self.hits, self.predicted, self.positives, self.negatives = sums  # views

    def over_ranks(self) -> "Counts":
        """Return the sums over all ranks. Sums of integers do not depend on the order."""
        # All-reduce on the CPU: the counts of a rank without images are there.
        return Counts.of(distributed.total(self._sums.to("cpu", copy=True)))

    def of_classes(self, chosen: Tensor) -> "Counts":
        """Return the counts of the classes with these indices, or with True in bool [K]."""
        return Counts.of(self._sums[:, chosen])

    def update(self, decided: Tensor, targets: Tensor) -> None:
        """Add a batch: predicted classes, bool [B, K], and targets [B, K] of 1, 0 or -1."""
        positive = targets == 1
        decided = decided & (targets >= 0)
        new = as_float64(torch.stack([decided & positive, decided, positive, targets == 0]).sum(1))
        self._set(self._sums.to(new.device) + new)

    def per_class(self) -> dict[str, Tensor]:
        """Return precision, recall and F1 per class, [K] in [0, 1] each; 0 if undefined."""
        precision = _share(self.hits, self.predicted)
        recall = _share(self.hits, self.positives)
        return {"precision": precision, "recall": recall, "f1": _harmonic(precision, recall)}

    def summary(self, suffix: str = "") -> dict[str, float]:
        """Return the per-class (C) and overall (O) precision, recall and F1 in percent.

        CF1 is the harmonic mean of CP and CR, as in most papers. CF1_mean is the mean F1 of the
        classes, as in the official validate.py. `suffix` is appended to the names.
        """
        classes = self.per_class()
        c_precision = classes["precision"].mean()
        c_recall = classes["recall"].mean()

        # Overall metrics use the sums of the counts over the classes.
        o_precision = _share(self.hits.sum(), self.predicted.sum())
        o_recall = _share(self.hits.sum(), self.positives.sum())

        values = {
            "CP": c_precision,
            "CR": c_recall,
            "CF1": _harmonic(c_precision, c_recall),
            "CF1_mean": classes["f1"].mean(),
            "OP": o_precision,
            "OR": o_recall,
            "OF1": _harmonic(o_precision, o_recall),
        }
        return {name + suffix: 100 * value.item() for name, value in values.items()}

    def summary_at(self, k: int) -> dict[str, float]:
        """Return `summary` at top-k, and N+, the number of classes with a recall above 0.

        CP@k, CR@k, CF1@k and N+@k are P, R, F1 and N+ in papers on image annotation.
        """
        recalled = (self.hits > 0).sum().item()
        return {**self.summary(f"@{k}"), f"N+@{k}": float(recalled)}


def logit_of(threshold: float) -> float:
    """Return the logit of a threshold in (0, 1). Comparing logits avoids the sigmoid."""
    if not 0 < threshold < 1:
        raise ConfigError(f"data.threshold is {threshold}: it must lie in (0, 1)")
    return math.log(threshold / (1 - threshold))


class MultiLabelEvaluator:
    """mAP in several variants, and precision, recall and F1 at a threshold and at top-k.

    Args:
        num_classes: Number of classes K.
        threshold: Probability (sigmoid of the logit) above which a class is predicted, in (0, 1).
        top_k: Number k of highest logits that the second decision rule predicts per image, from 1
            to K. Ties go to the lower class index. None selects 3; at most K classes are predicted.
        skip_empty: Return mAP_skip_empty as the first metric, unless no class has a positive.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        threshold: float = 0.5,
        top_k: int | None = None,
        skip_empty: bool = False,
    ) -> None:
        self.logit_threshold: float | Tensor = logit_of(threshold)
        self.top_k = checked_top_k(top_k, num_classes)
        self.skip_empty = skip_empty
        # Whether top-k ranks the logits by their margin above the threshold of the class.
        self.ranks_by_margin = False

        self.predictions = Predictions(num_classes)
        self.at_threshold = Counts(num_classes)
        self.at_top_k = Counts(num_classes)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits [B, K], targets [B, K] of 1, 0 or -1 (not annotated)."""
        logits, targets = self.predictions.add(logits, targets)
        self.logit_threshold = on_device(self.logit_threshold, logits.device)
        self.at_threshold.update(logits > self.logit_threshold, targets)
        ranked = logits - self.logit_threshold if self.ranks_by_margin else logits
        self.at_top_k.update(top_k(ranked, self.top_k), targets)

    def compute(self) -> dict[str, float]:
        """Compute mAP and its variants, then P, R and F1 at the threshold and at top-k, in percent.

        Classes without positives count as 0 in mAP. They are ignored in mAP_skip_empty. A logit
        that is not finite raises DataError.
        """
        logits, targets = self.predictions.shared_by_classes()
        per_class_ap = average_precision_of_all(logits, targets, interpolations=INTERPOLATIONS)
        at_threshold = self.at_threshold.over_ranks()
        at_top_k = self.at_top_k.over_ranks()

        self._per_class = {"AP": per_class_ap["none"], **at_threshold.per_class()}
        self._positives = at_threshold.positives
        means = {
            "mAP": 100 * per_class_ap["none"].nan_to_num(0).mean().item(),
            "mAP_skip_empty": 100 * per_class_ap["none"].nanmean().item(),
        }
        # The first metric selects the best checkpoint.
        if self.skip_empty and not math.isnan(means["mAP_skip_empty"]):
            means = {"mAP_skip_empty": means["mAP_skip_empty"], "mAP": means["mAP"]}
        return {
            **means,
            "mAP_interpolated": 100 * per_class_ap["envelope"].nan_to_num(0).mean().item(),
            "mAP_11point": 100 * per_class_ap["11point"].nan_to_num(0).mean().item(),
            **self.summary(at_threshold),
            **at_top_k.summary_at(self.top_k),
        }

    def valid_classes(self, counts: Counts) -> Tensor:
        """Return which classes precision, recall and F1 include, bool [K]: all classes."""
        return torch.ones_like(counts.positives, dtype=torch.bool)

    def summary(self, counts: Counts) -> dict[str, float]:
        """Return precision, recall and F1 over the valid classes; see `Counts.summary`."""
        return counts.of_classes(self.valid_classes(counts)).summary()

    def per_class(self) -> dict[str, list[float]]:
        """Return AP, precision, recall and F1 in percent, and the positives, per class."""
        percentages = {name: (100 * column).tolist() for name, column in self._per_class.items()}
        return {**percentages, "positives": self._positives.tolist()}


def on_device(threshold: float | Tensor, device: torch.device) -> float | Tensor:
    """Move a threshold tensor to the device of the logits. Floats are returned as they are."""
    if not isinstance(threshold, Tensor):
        return threshold

    # MPS has no float64.
    if device.type == "mps":
        threshold = threshold.float()
    return threshold.to(device)


def checked_top_k(k: int | None, num_classes: int, *, default: int = 3, lowest: int = 1) -> int:
    """Return the k of metrics at top-k. Raises ConfigError unless lowest <= k <= K."""
    if k is None:
        return default
    if k < lowest:
        raise ConfigError(f"data.top_k is {k}: it must be at least {lowest}")
    if k > num_classes:
        raise ConfigError(f"data.top_k is {k}: the data has only {num_classes} classes")
    return k


def top_k(logits: Tensor, k: int) -> Tensor:
    """Mark the k highest logits of each row: [B, K] -> bool. Ties go to the lower class index."""
    k = min(k, logits.shape[1])
    lowest_marked = logits.topk(k, dim=1).values[:, -1:]
    above = logits > lowest_marked
    level = logits == lowest_marked

    # The order of ties in torch.topk is undefined, so they are resolved here.
    remaining = k - above.sum(1, keepdim=True)
    return above | (level & (level.cumsum(1, dtype=torch.int32) <= remaining))


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Divide counts. The result is 0 where `whole` is 0."""
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1), 0.0)


def _harmonic(a: Tensor, b: Tensor) -> Tensor:
    """Return the harmonic mean of two values; 0 where both are 0."""
    return torch.where(a + b > 0, 2 * a * b / (a + b).clamp(min=1e-12), 0.0)
