"""Compare two models on the same images: paired intervals, a test, and images that changed sides.

The scores of both models do not fit in memory together, if images and classes are many. So one
model is asked after the other, and of the first one a summary is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mldec.report.answers import Answers
from mldec.report.content import Interval
from mldec.report.resampling import blocks, interval
from mldec.report.statistics import Numbers

MOST_CHANGED = 60


@dataclass(frozen=True)
class Kept:
    """What is kept of the answers of the first model.

    Attributes:
        scores: from 0 to 1, rounded to float16, as pictures are labelled with them, [N, K]; if an
            image has one label, those of the label, [N, 1].
        is_right: the decisions on the same pairs, as bits along the images, uint8 [K or 1, N / 8].
    """

    scores: np.ndarray
    is_right: np.ndarray


@dataclass(frozen=True)
class Change:
    """An image that changed sides; its attributes are those of `ChangedImage`."""

    class_index: int
    row: int  # of the answers
    present: bool
    score: float
    other_score: float
    fixed: bool


@dataclass(frozen=True)
class Changes:
    """The pairs of an image and a class that one model decides right and the other one wrong.

    Attributes:
        fixed: number of pairs that only the first model decides right.
        broken: number of those that only the second one does.
        surest: of both kinds those whose two scores differ most.
    """

    fixed: int
    broken: int
    surest: list[Change]


def keep(answers: Answers) -> Kept:
    """Keep what `changes` needs of the answers of the first model, which may be dropped then."""
    num_images, num_classes = answers.logits.shape
    scores = np.zeros((num_images, 1 if answers.exclusive else num_classes), np.float16)
    is_right = np.zeros((scores.shape[1], -(-num_images // 8)), np.uint8)
    for columns, own_scores, right in _decisions(answers):
        scores[:, columns] = own_scores.T
        is_right[columns] = np.packbits(right, axis=1)
    return Kept(scores, is_right)


def _decisions(answers: Answers) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield a block of columns, their scores from 0 to 1 [k, N], and which are decided right."""
    if answers.exclusive:
        rows = np.arange(len(answers.labels))
        right = answers.labels[rows, answers.predicted] == 1
        own = answers.logits[rows, answers.labels.argmax(1)]
        yield slice(0, 1), answers.probabilities(own)[None], right[None]
        return

    for columns, logits, labels in blocks(answers.logits, answers.labels):
        right = answers.decided(columns, logits) == (labels == 1)
        yield columns, answers.probabilities(logits), right


def differences(first: Numbers, second: Numbers) -> dict[str, tuple[Interval, Interval, Interval]]:
    """Return each metric of two models, and the difference, with paired intervals.

    Args:
        first: of the first model.
        second: of the other one, whose resamples have the same weights.
    """
    own, others = first.with_intervals(), second.with_intervals()
    metrics = {}
    for name in first.metrics.keys() & second.metrics.keys():
        gap = Interval(first.metrics[name] - second.metrics[name], np.nan, np.nan)
        if np.isfinite(own[name].low):
            gaps = first.resampled.metrics[name] - second.resampled.metrics[name]
            gap = Interval(gap.value, *map(float, interval(gaps)))
        metrics[name] = (own[name], others[name], gap)
    return {name: metrics[name] for name in first.metrics if name in metrics}


def p_value(gaps: np.ndarray) -> float:
    """Return the two-sided p-value of a difference from its R resamples.

    It is twice the share of the resamples on the rarer side of 0, at least 2 / (R + 1): a 95 %
    percentile interval leaves out 0 if, and only if, this is below 0.05.
    """
    rarer = min((gaps <= 0).sum(), (gaps >= 0).sum())
    return float(min(1, 2 * (1 + rarer) / (1 + len(gaps))))


def significance(first: Numbers, second: Numbers) -> tuple[float, str]:
    """Return the p-value of the difference of the main metric, and how it was computed."""
    main = next(iter(first.metrics))
    if main not in first.resampled.metrics:
        return np.nan, f"{main} is of an evaluator that cannot be resampled: nothing is tested."

    gaps = first.resampled.metrics[main] - second.resampled.metrics[main]
    test = (
        f"Paired Bayesian bootstrap of {main}: {len(gaps):,} resamples of the images, the same for "
        f"both models. p is twice the share of those on the rarer side of 0, at least "
        f"{2 / (1 + len(gaps)):.3f}. It tells what other images would change, not what another "
        f"seed of training would."
    )
    return p_value(gaps), test


def per_class(first: Numbers, second: Numbers) -> list[Interval]:
    """Return the difference of the average precision of each class in percent.

    Args:
        first: of the first model.
        second: of the other one, whose resamples have the same weights.
    """
    gaps = 100 * (first.precision - second.precision)
    low, high = interval(first.resampled.precision - second.resampled.precision)
    columns = (gaps.tolist(), (100 * low).tolist(), (100 * high).tolist())
    return [Interval(*values) for values in zip(*columns, strict=True)]


def changes(first: Kept, second: Answers) -> Changes:
    """Find the pairs that one model decides right and the other one wrong.

    If an image has one label, only its own label is such a pair, and right means top-1.

    Args:
        first: of the first model.
        second: answers of the other one about the same N images and K classes.
    """
    images = len(second.labels)
    counts = {True: 0, False: 0}
    surest: dict[bool, list[Change]] = {True: [], False: []}

    for columns, other_scores, other_right in _decisions(second):
        right = np.unpackbits(first.is_right[columns], axis=1, count=images).astype(bool)
        scores = first.scores[:, columns].T.astype(float)
        if second.exclusive:
            classes = second.labels.argmax(1)[None]
            annotated = second.has_label()[None]
        else:
            classes = np.broadcast_to(np.arange(second.labels.shape[1])[columns, None], right.shape)
            annotated = second.labels[:, columns].T >= 0

        for fixed in (True, False):
            chosen = annotated & (right == fixed) & (other_right != fixed)
            counts[fixed] += int(chosen.sum())
            surest[fixed] += _surest(chosen, scores, other_scores, classes, second, fixed)
            surest[fixed] = sorted(surest[fixed], key=_gap)[: MOST_CHANGED // 2]

    return Changes(counts[True], counts[False], sorted(surest[True] + surest[False], key=_gap))


def _gap(change: Change) -> float:
    """Return what changes are sorted by: the largest difference of the scores comes first."""
    return -abs(change.score - change.other_score)


def _surest(
    chosen: np.ndarray,
    scores: np.ndarray,
    other_scores: np.ndarray,
    classes: np.ndarray,
    answers: Answers,
    fixed: bool,
) -> list[Change]:
    """Return the chosen pairs [k, N] whose two scores [k, N] differ most."""
    lines, rows = np.nonzero(chosen)
    gaps = np.abs(scores[lines, rows] - other_scores[lines, rows])
    best = np.argsort(-gaps, kind="stable")[: MOST_CHANGED // 2]

    found = []
    for line, row in zip(lines[best], rows[best], strict=True):
        index = int(classes[line, row])
        found.append(
            Change(
                index,
                int(row),
                bool(answers.labels[row, index] == 1),
                float(scores[line, row]),
                float(other_scores[line, row]),
                fixed,
            )
        )
    return found
