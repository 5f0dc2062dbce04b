"""Everything the literature reports for multi-label classification, from one pass over the predictions."""

import math

import torch
from torch import Tensor

from mldec import distributed
from mldec.errors import ConfigError
from mldec.evaluators.average_precision import INTERPOLATIONS, average_precision


class Counts:
    """True positives, predictions and positives of each class for one way of deciding; -1 targets are left out."""

    def __init__(self) -> None:
        self.hits: Tensor | float = 0.0
        self.predicted: Tensor | float = 0.0
        self.positives: Tensor | float = 0.0

    def over_processes(self) -> "Counts":
        """Return the sums over all processes: whole numbers, so the same whatever their number."""
        sums = Counts()
        stacked = torch.stack([torch.as_tensor(part) for part in (self.hits, self.predicted, self.positives)])
        sums.hits, sums.predicted, sums.positives = distributed.total(stacked)
        return sums

    def update(self, decided: Tensor, targets: Tensor) -> None:
        """Add decisions bool [B, K] and targets [B, K]."""
        decided = decided & (targets >= 0)
        self.hits = self.hits + (decided & (targets == 1)).sum(0).double()
        self.predicted = self.predicted + decided.sum(0).double()
        self.positives = self.positives + (targets == 1).sum(0).double()

    def per_class(self) -> dict[str, Tensor]:
        """Return precision, recall and F1 of each class [K] in [0, 1]; 0 where undefined."""
        precision, recall = _share(self.hits, self.predicted), _share(self.hits, self.positives)
        return {"precision": precision, "recall": recall, "f1": _harmonic(precision, recall)}

    def summary(self, suffix: str = "") -> dict[str, float]:
        """Return the per-class (C) and overall (O) means in percent.

        CF1 is the harmonic mean of CP and CR, as most papers; CF1_mean is the mean of the classes' F1, as the
        official validate.py.
        """
        classes = self.per_class()
        c_precision, c_recall = classes["precision"].mean(), classes["recall"].mean()
        hits = torch.as_tensor(self.hits).sum()
        o_precision = _share(hits, torch.as_tensor(self.predicted).sum())
        o_recall = _share(hits, torch.as_tensor(self.positives).sum())
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


class MultiLabelEvaluator:
    """mAP in its variants, and precision, recall and F1 at a threshold and at top-k.

    Args:
        threshold: a class is predicted if its probability (sigmoid of the logit) is above it; in (0, 1).
        top_k: the other way of deciding: the k highest logits of an image; equal logits go to the lower class.

    Raises:
        ConfigError: for a value out of its range.
    """

    def __init__(self, *, threshold: float = 0.5, top_k: int = 3) -> None:
        if not 0 < threshold < 1:
            raise ConfigError(f"data.threshold {threshold} is not in (0, 1)")
        if top_k < 1:
            raise ConfigError(f"top_k is {top_k}: it must be at least 1")
        self.logit_threshold = math.log(threshold / (1 - threshold))
        self.top_k = top_k
        self.logits: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.at_threshold, self.at_top_k = Counts(), Counts()

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits float [B, K], kept in float32 so that close scores stay apart; targets [B, K]."""
        logits, targets = logits.float().cpu(), targets.to(torch.int8).cpu()
        self.logits.append(logits)
        self.targets.append(targets)
        self.at_threshold.update(logits > self.logit_threshold, targets)
        self.at_top_k.update(top_k(logits, self.top_k), targets)

    def compute(self) -> dict[str, float]:
        """Return percentages: mAP (a class without a positive counts as 0), its variants, then P, R and F1."""
        logits, targets = distributed.share_columns(self.logits), distributed.share_columns(self.targets)
        classes = {
            name: distributed.join_columns(values)
            for name, values in average_precision(logits, targets, interpolations=INTERPOLATIONS).items()
        }
        at_threshold, at_top_k = self.at_threshold.over_processes(), self.at_top_k.over_processes()
        self._per_class = {"AP": classes["none"], **at_threshold.per_class()}
        self._positives = torch.as_tensor(at_threshold.positives)
        return {
            "mAP": 100 * classes["none"].nan_to_num(0).mean().item(),
            "mAP_skip_empty": 100 * classes["none"].nanmean().item(),
            "mAP_interpolated": 100 * classes["envelope"].nan_to_num(0).mean().item(),
            "mAP_11point": 100 * classes["11point"].nan_to_num(0).mean().item(),
            **at_threshold.summary(),
            **at_top_k.summary(f"@{self.top_k}"),
        }

    def per_class(self) -> dict[str, list[float]]:
        """Return AP, precision, recall and F1 in percent, and the number of positives, of each class."""
        rows = {name: (100 * column).tolist() for name, column in self._per_class.items()}
        return {**rows, "positives": self._positives.tolist()}


def top_k(logits: Tensor, k: int) -> Tensor:
    """Return bool [B, K]: the k highest logits of each row; among equal ones the lower classes first."""
    k = min(k, logits.shape[1])
    edge = logits.topk(k, dim=1).values[:, -1:]
    above, level = logits > edge, logits == edge
    free = k - above.sum(1, keepdim=True)
    return above | (level & (level.cumsum(1) <= free))


def _share(part: Tensor | float, whole: Tensor | float) -> Tensor:
    part, whole = torch.as_tensor(part), torch.as_tensor(whole)
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)


def _harmonic(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a + b > 0, 2 * a * b / (a + b).clamp(min=1e-12), 0.0)
