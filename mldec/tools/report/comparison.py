"""Comparison of two models on the same images: paired intervals and changed decisions."""

from dataclasses import dataclass

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
    metrics: dict[str, tuple[Interval, Interval, Interval]]  # A, B and A - B, in percent
    p_value: float  # two-sided, for the main metric; NaN if it has no interval
    # Difference of the average precision A - B in percent, with bounds: value, low, high [3, K].
    per_class: np.ndarray
    changed: list[Change]  # the largest score differences
    fixed: int  # number of decisions where only A is right
    broken: int  # number of decisions where only B is right


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
    counts = {True: 0, False: 0}
    largest: dict[bool, list[Change]] = {True: [], False: []}
    for columns in first.class_slices():
        logits, labels = first.of_classes(columns)
        other_logits, _ = second.of_classes(columns)
        present = labels == 1
        right = first.decided(columns, logits) == present
        other_right = second.decided(columns, other_logits) == present
        changed = (right != other_right) & (labels >= 0)
        if first.exclusive:
            changed &= present & ~(first.top_is_right & second.top_is_right)

        lines, rows = np.nonzero(changed)
        scores = first.probabilities(logits[lines, rows])
        other_scores = second.probabilities(other_logits[lines, rows])
        order = np.argsort(-np.abs(scores - other_scores), kind="stable")
        for fixed in (True, False):
            mask = right[lines, rows] == fixed
            counts[fixed] += int(mask.sum())
            for index in order[mask[order]][:MAX_CHANGES].tolist():
                change = Change(
                    class_index=columns.start + int(lines[index]),
                    row=int(rows[index]),
                    present=bool(present[lines[index], rows[index]]),
                    score=float(scores[index]),
                    other_score=float(other_scores[index]),
                    fixed=fixed,
                )
                largest[fixed].append(change)
            largest[fixed].sort(key=lambda change: -abs(change.score - change.other_score))
            del largest[fixed][MAX_CHANGES:]
    return largest[True] + largest[False], counts[True], counts[False]
