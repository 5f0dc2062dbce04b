"""The metrics of the data's evaluator, resampled, and the table of classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from mldec.evaluation.command import COUNT
from mldec.evaluators import Evaluator
from mldec.evaluators.average_precision import INTERPOLATIONS, average_precision
from mldec.evaluators.multi_label import MultiLabelEvaluator, top_k
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import TOP_K, ZeroShotEvaluator
from mldec.report.answers import ROWS, Answers, Columns
from mldec.report.content import ClassTable, Histograms, Interval
from mldec.report.histograms import calibration_errors
from mldec.report.resampling import (
    ResampledCounts,
    count,
    counts_of_classes,
    interval,
    precision_of_classes,
)

# The metrics of resample number i.
Compute = Callable[[int], dict[str, float]]


@dataclass(frozen=True)
class Numbers:
    """What the answers of a model come to.

    Attributes:
        metrics: percentages by name, and numbers of classes, as `mldec.evaluate` prints them.
        precision: average precision of each class, float64 [K] in [0, 1]; NaN without a positive.
        resampled: both of them in resamples of the images.
    """

    metrics: dict[str, float]
    precision: np.ndarray
    resampled: "Resampled"

    def with_intervals(self) -> dict[str, Interval]:
        """Return the metrics with their intervals; a number of classes has none."""
        return {name: self._interval(name, value) for name, value in self.metrics.items()}

    def _interval(self, name: str, value: float) -> Interval:
        values = self.resampled.metrics.get(name)
        if values is None or not np.isfinite(value) or name.startswith(COUNT):
            return Interval(value, np.nan, np.nan)
        return Interval(value, *map(float, interval(values)))


@dataclass(frozen=True)
class Resampled:
    """The numbers of R resamples.

    Attributes:
        metrics: percentages by name, each float64 [R]; none of an evaluator that is not known.
        precision: average precision of each class, float32 [R, K] in [0, 1].
    """

    metrics: dict[str, np.ndarray]
    precision: np.ndarray


def resample(evaluator: Evaluator, answers: Answers, weights: np.ndarray) -> Resampled:
    """Compute the metrics of an evaluator, and the average precision per class, in each resample.

    Args:
        evaluator: of the data; its formulas and settings are used, not its state.
        answers: of N images and K classes.
        weights: of R resamples, see `mldec.report.resampling.draw`.
    """
    interpolations: Sequence[str] = ("none",)
    if isinstance(evaluator, MultiLabelEvaluator):
        interpolations = INTERPOLATIONS
    precision = precision_of_classes(answers.logits, answers.labels, weights, interpolations)

    compute: Compute | None = None
    if isinstance(evaluator, MultiLabelEvaluator):
        compute = _of_several(evaluator, answers, weights, precision)
    elif isinstance(evaluator, PartialLabelEvaluator):
        compute = _of_partial(evaluator, answers, weights, precision["none"])
    elif isinstance(evaluator, ZeroShotEvaluator):
        compute = _of_zero_shot(evaluator, answers, weights, precision["none"])
    elif isinstance(evaluator, SingleLabelEvaluator):
        compute = _of_one(evaluator, answers, weights)

    metrics: dict[str, np.ndarray] = {}
    if compute is not None:
        rows = [compute(number) for number in range(count(weights))]
        metrics = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return Resampled(metrics, precision["none"])


def precision_of(answers: Answers) -> np.ndarray:
    """Return the average precision of each class, float64 [K]; NaN without a positive."""
    logits, labels = torch.from_numpy(answers.logits), torch.from_numpy(answers.labels)
    return average_precision(logits, labels)["none"].numpy()


def class_table(
    names: tuple[str, ...], answers: Answers, histograms: Histograms, numbers: Numbers
) -> ClassTable:
    """Return the columns of the table of classes.

    Args:
        names: of the K classes.
        answers: of N images.
        histograms: of their scores.
        numbers: for the average precision and its intervals.
    """
    # Every image counts once.
    once = np.ones((1, len(answers.labels), 1), np.float32)
    counts = counts_of_classes(answers.logits, answers.labels, once, answers.decided).of(0)
    decisions = {name: 100 * column.numpy() for name, column in counts.per_class().items()}

    columns: dict[str, np.ndarray] = {
        "positives": counts.positives.numpy(),
        "AP": 100 * numbers.precision,
        "precision": decisions["precision"],
        "recall": decisions["recall"],
        "F1": decisions["f1"],
    }
    thresholds = answers.thresholds()
    if thresholds is not None:
        columns["threshold"] = thresholds
    columns["calibration error"] = 100 * calibration_errors(histograms)

    low, high = interval(numbers.resampled.precision)
    return ClassTable(
        names,
        {name: column.tolist() for name, column in columns.items()},
        ((100 * low).tolist(), (100 * high).tolist()),
    )


def _by_threshold(answers: Answers, weights: np.ndarray) -> ResampledCounts:
    """Count what is predicted at the thresholds."""
    return counts_of_classes(answers.logits, answers.labels, weights, answers.decided)


def _by_top_k(answers: Answers, weights: np.ndarray, k: int) -> ResampledCounts:
    """Count what is predicted if the k highest logits of each image are."""
    chosen = np.concatenate(
        [
            top_k(torch.from_numpy(answers.logits[first : first + ROWS]), k)
            .nonzero()[:, 1]
            .view(-1, min(k, answers.logits.shape[1]))
            for first in range(0, len(answers.logits), ROWS)
        ]
    )

    def decide(columns: Columns, scores: np.ndarray) -> np.ndarray:
        classes = np.arange(answers.logits.shape[1])[columns]
        return (chosen == classes[:, None, None]).any(2)

    return counts_of_classes(answers.logits, answers.labels, weights, decide)


def _of_several(
    evaluator: MultiLabelEvaluator,
    answers: Answers,
    weights: np.ndarray,
    precision: dict[str, np.ndarray],
) -> Compute:
    """Return what computes the metrics of several labels per image."""
    at_threshold = _by_threshold(answers, weights)
    at_top_k = _by_top_k(answers, weights, evaluator.top_k)

    def compute(number: int) -> dict[str, float]:
        per_class_ap = {name: _tensor(values[number]) for name, values in precision.items()}
        return evaluator.metrics(per_class_ap, at_threshold.of(number), at_top_k.of(number))

    return compute


def _of_partial(
    evaluator: PartialLabelEvaluator, answers: Answers, weights: np.ndarray, precision: np.ndarray
) -> Compute:
    """Return what computes the metrics of partial labels."""
    naive_labels = answers.labels.clip(min=0)
    naive = precision_of_classes(answers.logits, naive_labels, weights)["none"]

    # If all classes are predicted, what is predicted is what is annotated.
    at_threshold = _by_threshold(answers, weights)
    annotated = counts_of_classes(
        answers.logits, answers.labels, weights, lambda _, scores: np.ones(scores.shape, bool)
    )

    def compute(number: int) -> dict[str, float]:
        counts = at_threshold.of(number)
        return evaluator.metrics(
            _tensor(precision[number]),
            _tensor(naive[number]),
            counts,
            counts.positives,
            annotated.of(number).predicted - counts.positives,
        )

    return compute


def _of_zero_shot(
    evaluator: ZeroShotEvaluator, answers: Answers, weights: np.ndarray, precision: np.ndarray
) -> Compute:
    """Return what computes the metrics of seen and unseen classes."""
    unseen = evaluator.unseen.numpy()
    lowest = answers.lowest
    among_unseen = replace(
        answers,
        logits=answers.logits[:, unseen],
        labels=answers.labels[:, unseen],
        lowest=lowest[unseen] if isinstance(lowest, torch.Tensor) and len(lowest) > 1 else lowest,
    )

    # Images without an unseen label are left out as if they were not annotated.
    left_out = ~among_unseen.has_label()[:, None]
    labels = np.where(left_out, -1, among_unseen.labels).astype(np.int8)
    views = {"zsl": replace(among_unseen, labels=labels), "gzsl": answers}
    if evaluator.all_images:
        views["zsl_all"] = among_unseen
    else:
        every_label = np.where(left_out, -1, answers.labels).astype(np.int8)
        views["gzsl"] = replace(answers, labels=every_label)

    of_views = {}
    for kind, view in views.items():
        if view is answers:
            of_views[kind] = precision
        else:
            of_views[kind] = precision_of_classes(view.logits, view.labels, weights)["none"]

    at_threshold = {kind: _by_threshold(view, weights) for kind, view in views.items()}
    at_top_k = {
        (kind, k): _by_top_k(view, weights, k) for kind, view in views.items() for k in TOP_K
    }

    def compute(number: int) -> dict[str, float]:
        return evaluator.metrics(
            _tensor(of_views["gzsl"][number]),
            {kind: _tensor(values[number]) for kind, values in of_views.items()},
            {key: counts.of(number) for key, counts in at_top_k.items()},
            {kind: counts.of(number) for kind, counts in at_threshold.items()},
        )

    return compute


def _of_one(evaluator: SingleLabelEvaluator, answers: Answers, weights: np.ndarray) -> Compute:
    """Return what computes the metrics of one label per image, from the rows of the evaluator."""
    has_label = answers.has_label()
    rows = torch.cat(evaluator.rows, dim=1)

    # Resample by resample; the weights of images without a label are of no use.
    columns = chain.from_iterable(step[has_label].T for step in weights)
    values = [evaluator.metrics(rows, _tensor(column)) for column in columns]
    return values.__getitem__


def _tensor(values: Any) -> torch.Tensor:
    """Return numbers as the evaluators take them, float64."""
    return torch.from_numpy(np.asarray(values, np.float64))
