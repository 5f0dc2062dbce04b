"""Compare two models on the same images: paired intervals, a test, and images that changed sides.

The scores of both models do not fit in memory together, if images and classes are many. So one
model is asked after the other, and of the first one a summary is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mldec.report.statistics import Answers, Interval, Numbers, interval

MOST_CHANGED = 60


@dataclass(frozen=True)
class Kept:
    """What is kept of the answers of the first model; K is 1 if an image has one label."""

    scores: np.ndarray  # from 0 to 1 (with one label, those of the label), float16 [N, K]
    is_right: np.ndarray  # the decisions on the same pairs, as bits along the images [K, N / 8]


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


def compare(other: str, kept: Kept, own: Numbers, answers: Answers, numbers: Numbers) -> Comparison:
    """Compare the first model, of which there are a summary and numbers, with another one.

    Its answers are about the same images and classes, and its resamples have the same weights.
    """
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
    changed, fixed, broken = changes(kept, answers)
    return Comparison(
        other=other,
        metrics=metrics,
        p_value=p_value,
        test=test,
        per_class=per_class(own, numbers),
        changed=changed,
        fixed=fixed,
        broken=broken,
    )


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

    for columns, logits, labels in answers.blocks():
        right = answers.decided(columns, logits) == (labels == 1)
        yield columns, answers.probabilities(logits), right


def p_value(gaps: np.ndarray) -> float:
    """Return the two-sided p-value of a difference from its R resamples.

    It is twice the share of the resamples on the rarer side of 0, at least 2 / (R + 1): a 95 %
    percentile interval leaves out 0 if, and only if, this is below 0.05.
    """
    rarer = min((gaps <= 0).sum(), (gaps >= 0).sum())
    return float(min(1, 2 * (1 + rarer) / (1 + len(gaps))))


def significance(main: str, gaps: dict[str, np.ndarray]) -> tuple[float, str]:
    """Return the p-value of the main metric's resampled difference, and how it was computed."""
    if main not in gaps:
        return np.nan, f"{main} has no intervals: its difference is not tested."

    resamples = len(gaps[main])
    test = (
        f"Paired Bayesian bootstrap of {main}: {resamples:,} resamples of the images, the same for "
        f"both models. p is twice the share of those on the rarer side of 0, at least "
        f"{2 / (1 + resamples):.3f}. It tells what other images would change, not what another "
        f"seed of training would."
    )
    return p_value(gaps[main]), test


def per_class(first: Numbers, second: Numbers) -> list[Interval]:
    """Return the difference of the average precision of each class in percent."""
    gaps = 100 * (first.precision - second.precision)
    low, high = interval(first.resampled_precision - second.resampled_precision)
    columns = (gaps.tolist(), (100 * low).tolist(), (100 * high).tolist())
    return [Interval(*values) for values in zip(*columns, strict=True)]


def changes(first: Kept, second: Answers) -> tuple[list[Change], int, int]:
    """Find the pairs that one model decides right and the other one wrong.

    If an image has one label, only its own label is such a pair, and right means top-1. The answers
    are those of the other model about the same images and classes.

    Returns:
        Those whose two scores differ most, the number of pairs that only the first model decides
        right, and the number of those that only the second one does.
    """
    images = len(second.labels)
    counts = {True: 0, False: 0}
    surest: dict[bool, list[Change]] = {True: [], False: []}

    for columns, other_scores, other_right in _decisions(second):
        right = np.unpackbits(first.is_right[columns], axis=1, count=images).astype(bool)
        scores = first.scores[:, columns].T.astype(float)
        if second.exclusive:
            classes = second.labels.argmax(1)[None]
            annotated = second.has_label[None]
        else:
            classes = np.broadcast_to(np.arange(second.labels.shape[1])[columns, None], right.shape)
            annotated = second.labels[:, columns].T >= 0

        for fixed in (True, False):
            chosen = annotated & (right == fixed) & (other_right != fixed)
            counts[fixed] += int(chosen.sum())

            # Of this block, and of all until now, half of what is shown.
            lines, rows = np.nonzero(chosen)
            gaps = np.abs(scores[lines, rows] - other_scores[lines, rows])
            best = np.argsort(-gaps, kind="stable")[: MOST_CHANGED // 2]
            for line, row in zip(lines[best], rows[best], strict=True):
                index = int(classes[line, row])
                present = bool(second.labels[row, index] == 1)
                pair = float(scores[line, row]), float(other_scores[line, row])
                surest[fixed].append(Change(index, int(row), present, *pair, fixed))
            surest[fixed] = sorted(surest[fixed], key=_gap)[: MOST_CHANGED // 2]

    return sorted(surest[True] + surest[False], key=_gap), counts[True], counts[False]


def _gap(change: Change) -> float:
    """Return what changes are sorted by: the largest difference of the scores comes first."""
    return -abs(change.score - change.other_score)
