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
    """An image whose decision for a class differs between two models.

    If an image has one label, only its own class counts, which is decided right by top-1.

    Attributes:
        class_index: of the class.
        row: of the image among those that are scored.
        present: what the label says.
        score: of this model.
        other_score: of the other one.
        fixed: whether only this model decides right; otherwise only the other one does.
    """

    class_index: int
    row: int
    present: bool
    score: float
    other_score: float
    fixed: bool


@dataclass(frozen=True)
class Comparison:
    """This model (A) against another one (B) on the same images.

    Attributes:
        other: path of the other checkpoint.
        metrics: A, B and the difference A - B by the name of the metric, in percent.
        p_value: two-sided, of the main metric's difference; NaN if it cannot be tested.
        test: how it was computed, one sentence.
        per_class: difference of the average precision A - B of K classes in percent.
        changed: images that changed sides; a sample of the surest.
        fixed: number of pairs of image and class that only A decides right.
        broken: number of those that only B decides right.
    """

    other: str
    metrics: dict[str, tuple[Interval, Interval, Interval]]
    p_value: float
    test: str
    per_class: list[Interval]
    changed: list[Change]
    fixed: int
    broken: int


def compare(other: str, kept: Kept, own: Numbers, answers: Answers, numbers: Numbers) -> Comparison:
    """Compare the first model with another one.

    Args:
        other: path of the other checkpoint.
        kept: of the answers of the first model.
        own: numbers of the first model.
        answers: of the other one, about the same images and classes.
        numbers: of the other one, whose resamples have the same weights.
    """
    p_value, test = significance(own, numbers)
    changed, fixed, broken = changes(kept, answers)
    return Comparison(
        other=other,
        metrics=differences(own, numbers),
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


def differences(first: Numbers, second: Numbers) -> dict[str, tuple[Interval, Interval, Interval]]:
    """Return each metric of two models, and the difference, with paired intervals."""
    own, others = first.with_intervals(), second.with_intervals()
    metrics = {}
    for name in [name for name in own if name in others]:
        bounds: tuple[float, ...] = ()
        if name in first.resampled and name in second.resampled:
            gaps = first.resampled[name] - second.resampled[name]
            bounds = tuple(map(float, interval(gaps)))
        gap = Interval(own[name].value - others[name].value, *bounds)
        metrics[name] = (own[name], others[name], gap)
    return metrics


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
    if main not in first.resampled or main not in second.resampled:
        return np.nan, f"{main} has no intervals: its difference is not tested."

    gaps = first.resampled[main] - second.resampled[main]
    test = (
        f"Paired Bayesian bootstrap of {main}: {len(gaps):,} resamples of the images, the same for "
        f"both models. p is twice the share of those on the rarer side of 0, at least "
        f"{2 / (1 + len(gaps)):.3f}. It tells what other images would change, not what another "
        f"seed of training would."
    )
    return p_value(gaps), test


def per_class(first: Numbers, second: Numbers) -> list[Interval]:
    """Return the difference of the average precision of each class in percent."""
    gaps = 100 * (first.precision - second.precision)
    low, high = interval(first.resampled_precision - second.resampled_precision)
    columns = (gaps.tolist(), (100 * low).tolist(), (100 * high).tolist())
    return [Interval(*values) for values in zip(*columns, strict=True)]


def changes(first: Kept, second: Answers) -> tuple[list[Change], int, int]:
    """Find the pairs that one model decides right and the other one wrong.

    If an image has one label, only its own label is such a pair, and right means top-1.

    Args:
        first: of the first model.
        second: answers of the other one about the same N images and K classes.

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
