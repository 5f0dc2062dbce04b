"""Two models on the same images: paired intervals, a test, and images that changed sides."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mldec.tools.report.statistics import Answers, Interval, Numbers, interval

MOST_CHANGED = 60


@dataclass(frozen=True)
class Change:
    """An image whose decision for a class differs between two models.

    If an image has one label, only its own class counts, which is decided right by top-1.
    """

    class_index: int
    row: int  # of the image among those that are scored
    present: bool  # what the label says
    score: float  # of this model
    other_score: float
    fixed: bool  # whether only this model decides right; otherwise only the other one does


@dataclass(frozen=True)
class Comparison:
    """This model (A) against another one (B) on the same images."""

    other: str  # path of the other checkpoint
    metrics: dict[str, tuple[Interval, Interval, Interval]]  # A, B and A - B, in percent
    p_value: float  # two-sided, of the main metric's difference; NaN if it cannot be tested
    test: str  # how it was computed, one sentence
    per_class: list[Interval]  # difference of the average precision A - B in percent
    changed: list[Change]  # a sample of the surest
    fixed: int  # number of pairs of image and class that only A decides right
    broken: int  # number of those that only B decides right


def compare(
    other_path: str, own_answers: Answers, own: Numbers, answers: Answers, numbers: Numbers
) -> Comparison:
    """Compare a model with another one, whose resamples have the same weights."""
    gaps = {
        name: own.resampled[name] - numbers.resampled[name]
        for name in own.resampled
        if name in numbers.resampled
    }
    metrics = {}
    others = numbers.with_intervals()
    for name, value in own.with_intervals().items():
        if name in others:
            bounds = map(float, interval(gaps[name])) if name in gaps else ()
            gap = Interval(value.value - others[name].value, *bounds)
            metrics[name] = (value, others[name], gap)

    p_value, test = significance(next(iter(own.metrics)), gaps)
    found = changes(own_answers, answers)
    return Comparison(other_path, metrics, p_value, test, per_class(own, numbers), *found)


def significance(main: str, gaps: dict[str, np.ndarray]) -> tuple[float, str]:
    """Return the p-value of the main metric's resampled difference, and how it was computed.

    A 95 % percentile interval leaves out 0 if, and only if, the p-value is below 0.05.
    """
    if main not in gaps:
        return np.nan, f"{main} has no intervals: its difference is not tested."

    resamples = len(gaps[main])
    test = (
        f"Paired Bayesian bootstrap of {main}: {resamples:,} resamples of the images, the same for "
        f"both models. p is twice the share of those on the rarer side of 0, at least "
        f"{2 / (1 + resamples):.3f}. It tells what other images would change, not what another "
        f"seed of training would."
    )
    rarer = min((gaps[main] <= 0).sum(), (gaps[main] >= 0).sum())
    return float(min(1, 2 * (1 + rarer) / (1 + resamples))), test


def per_class(first: Numbers, second: Numbers) -> list[Interval]:
    """Return the difference of the average precision of each class in percent."""
    gaps = 100 * (first.precision - second.precision)
    low, high = interval(first.resampled_precision - second.resampled_precision)
    columns = (gaps.tolist(), (100 * low).tolist(), (100 * high).tolist())
    return [Interval(*values) for values in zip(*columns, strict=True)]


def changes(first: Answers, second: Answers) -> tuple[list[Change], int, int]:
    """Find the pairs of an image and a class that only one of two models decides right.

    Returns those whose two scores differ most, and the number of pairs that only the first model
    decides right, and that only the second one does.
    """
    counts = {True: 0, False: 0}
    surest: dict[bool, list[Change]] = {True: [], False: []}
    for (classes, scores, right), (_, other_scores, other_right) in zip(
        _decisions(first), _decisions(second), strict=True
    ):
        for fixed in (True, False):
            lines, rows = np.nonzero((right == fixed) & (other_right != fixed))
            present = first.labels[rows, classes[lines, rows]]
            lines, rows, present = (array[present >= 0] for array in (lines, rows, present))
            counts[fixed] += len(rows)

            # Of this block, and of all until now, half of what is shown.
            gaps = np.abs(scores[lines, rows] - other_scores[lines, rows])
            for place in np.argsort(-gaps, kind="stable")[: MOST_CHANGED // 2]:
                pair = lines[place], rows[place]
                image = int(rows[place]), bool(present[place])
                both = float(scores[pair]), float(other_scores[pair])
                surest[fixed].append(Change(int(classes[pair]), *image, *both, fixed))
            surest[fixed] = sorted(surest[fixed], key=_gap)[: MOST_CHANGED // 2]

    return sorted(surest[True] + surest[False], key=_gap), counts[True], counts[False]


def _decisions(answers: Answers) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield classes, their scores from 0 to 1, and which are decided right, each [k, N]."""
    if answers.exclusive:
        # An image without a label is decided right by both models.
        rows, classes = np.arange(len(answers.labels)), answers.labels.argmax(1)
        right = (answers.labels[rows, answers.predicted] == 1) | ~answers.has_label
        scores = answers.probabilities(answers.logits[rows, classes])
        yield classes[None], scores[None], right[None]
        return

    for columns in answers.slices():
        logits, labels = answers.block(columns)
        right = answers.decided(columns, logits) == (labels == 1)
        numbers = columns.start + np.arange(len(right))
        classes = np.broadcast_to(numbers[:, None], right.shape)
        yield classes, answers.probabilities(logits), right


def _gap(change: Change) -> float:
    """Return what changes are sorted by: the largest difference of the scores comes first."""
    return -abs(change.score - change.other_score)
