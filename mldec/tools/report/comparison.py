"""Comparison of two models on the same images: paired intervals and changed decisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mldec.tools.report.statistics import Interval, Predictions, ResampledMetrics, interval_bounds

MAX_CHANGES = 30  # for each direction


@dataclass(frozen=True)
class Change:
    """An image and a class that only one of two models predicts correctly.

    The class is always the label if the images are single-label.
    """

    class_index: int
    row: int  # row of the image in the scores
    present: bool  # whether the image has the label
    score: float  # score of model A in [0, 1]
    other_score: float  # score of model B in [0, 1]
    fixed: bool  # whether A is right; otherwise B is right


@dataclass(frozen=True)
class Comparison:
    """Model A, the subject of the report, compared with model B."""

    other: str  # path of the checkpoint of B
    metric: str  # name of the main metric
    metrics: dict[str, tuple[Interval, Interval, Interval]]  # A, B and A - B, in percent
    p_value: float  # two-sided, for the main metric; NaN if it has no interval
    # Difference of the average precision A - B in percent, with bounds: value, low, high [3, K].
    per_class: np.ndarray
    changed: list[Change]  # the largest score differences
    fixed: int  # number of decisions where only A is right
    broken: int  # number of decisions where only B is right

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the comparison for `report --json`; `names` are the K class names."""
        metrics = {}
        for name, (own, other, gap) in self.metrics.items():
            values = {"value": own.value, "other": other.value, "difference": gap.value}
            metrics[name] = values | {"low": gap.low, "high": gap.high}
        keys = ("difference", "low", "high")
        columns = zip(names, self.per_class.T.tolist(), strict=True)
        return {
            "checkpoint": self.other,
            "metric": self.metric,
            "p_value": self.p_value,
            "metrics": metrics,
            "per_class": {name: dict(zip(keys, column, strict=True)) for name, column in columns},
        }


def compare(
    other_path: str,
    own_predictions: Predictions,
    own: ResampledMetrics,
    other_predictions: Predictions,
    other: ResampledMetrics,
) -> Comparison:
    """Compare two models whose resamples have the same weights."""
    gaps = {}
    metrics = {}
    other_intervals = other.with_intervals()
    for name, interval in own.with_intervals().items():
        if name not in other_intervals:
            continue
        gap = Interval(interval.value - other_intervals[name].value)
        if name in own.resampled and name in other.resampled:
            gaps[name] = own.resampled[name] - other.resampled[name]
            gap = Interval(gap.value, *interval_bounds(gaps[name]).tolist())
        metrics[name] = (interval, other_intervals[name], gap)

    main_metric = next(iter(own.metrics))
    p_value = significance(gaps[main_metric]) if main_metric in gaps else np.nan
    low, high = interval_bounds(own.resampled_ap - other.resampled_ap)
    changed, fixed, broken = changed_decisions(own_predictions, other_predictions)
    return Comparison(
        other=other_path,
        metric=main_metric,
        metrics=metrics,
        p_value=p_value,
        per_class=100 * np.stack([own.class_ap - other.class_ap, low, high]),
        changed=changed,
        fixed=fixed,
        broken=broken,
    )


def significance(gaps: np.ndarray) -> float:
    """Return the two-sided p-value of resampled differences [R].

    It is below 0.05 if and only if the 95 % percentile interval does not contain 0.
    """
    rarer = min((gaps <= 0).sum(), (gaps >= 0).sum())
    return float(min(1, 2 * (1 + rarer) / (1 + len(gaps))))


def changed_decisions(first: Predictions, second: Predictions) -> tuple[list[Change], int, int]:
    """Find the decisions where only one of two models is right.

    Returns those with the largest score differences, and the numbers of decisions where only the
    first and only the second model is right.
    """
    blocks = []
    for columns in first.class_slices():
        logits, labels = first.of_classes(columns)
        other_logits, _ = second.of_classes(columns)
        present = labels == 1
        right = first.decided(columns, logits) == present
        other_right = second.decided(columns, other_logits) == present
        changed = (right != other_right) & (labels >= 0)
        if first.exclusive:
            changed &= present & ~(first.top_is_right & second.top_is_right)

        cells = np.nonzero(changed)
        scores = first.probabilities(logits[cells])
        other_scores = second.probabilities(other_logits[cells])
        classes = columns.start + cells[0]
        blocks.append((classes, cells[1], present[cells], scores, other_scores, right[cells]))

    # Class, row, label, both scores, and whether the first model is right.
    values = [np.concatenate(arrays) for arrays in zip(*blocks, strict=True)]
    fixed = values[-1]
    order = np.argsort(-np.abs(values[3] - values[4]), kind="stable")
    largest = []
    for is_right in (True, False):
        for index in order[fixed[order] == is_right][:MAX_CHANGES]:
            largest.append(Change(*(array[index].item() for array in values)))
    num_fixed = int(fixed.sum())
    return largest, num_fixed, len(fixed) - num_fixed
