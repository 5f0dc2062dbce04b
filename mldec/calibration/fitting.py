"""Fit scores and thresholds, and judge them on images that were not used for the fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit, logit

from mldec.calibration.scaling import platt, temperature
from mldec.calibration.thresholds import Column, Objective, Threshold, fit_threshold
from mldec.errors import DataError
from mldec.evaluators.multi_label import Counts

MOST_SCORES = 4_000_000  # that a number for all classes is fitted to, such as a temperature
BLOCK = 64  # classes that are read together: their scores lie side by side in memory
BINS = 15  # of the calibration error


@dataclass(frozen=True)
class Choice:
    """What the user chooses.

    Attributes:
        objective: of the thresholds.
        scope: "class" or "global".
        min_positives: classes with fewer positives share a threshold.
        platt: scale the scores per class, by a slope and an offset; otherwise by one temperature.
        shared: one slope and one offset serve all classes, as they must if these are any classes.
    """

    objective: Objective
    scope: str
    min_positives: int
    platt: bool
    shared: bool = False


@dataclass(frozen=True)
class Fit:
    """How K classes are decided: calibrated logits are slope * logit + offset.

    Attributes:
        slopes: float64 [K].
        offsets: float64 [K].
        thresholds: lowest calibrated score that counts as present, float64 [K].
        shares: which classes share their threshold with others for want of positives, bool [K].
        best_precision: NaN where the objective is reached, else the precision that the class has
            instead, on the images of the fit, float64 [K].
    """

    slopes: np.ndarray
    offsets: np.ndarray
    thresholds: np.ndarray
    shares: np.ndarray
    best_precision: np.ndarray

    def column(
        self, index: int, scores: np.ndarray, targets: np.ndarray, images: np.ndarray
    ) -> Column:
        """Return the calibrated logits of a class, and whether the images show it.

        Args:
            index: of the class.
            scores: its logits [N].
            targets: its labels [N].
            images: which of the annotated ones to return, bool [N].
        """
        chosen = images & (targets >= 0)
        return self.slopes[index] * scores[chosen] + self.offsets[index], targets[chosen] == 1


class Tally:
    """What the decisions of fits come to, added up over images.

    Args:
        num_classes: K.
    """

    def __init__(self, num_classes: int) -> None:
        self.counts = Counts(num_classes)
        self.pairs = 0  # of an annotated image and a class

        # Sum of the calibrated scores, and number of positives, in each bin of the scores.
        self.scores, self.positives = np.zeros((2, BINS))

    def add(self, fitted: Fit, logits: np.ndarray, labels: np.ndarray, images: np.ndarray) -> None:
        """Decide some images, and count the decisions.

        Args:
            fitted: how to decide.
            logits: [N, K].
            labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
            images: which of them to decide, bool [N].
        """
        lowest = logit(fitted.thresholds)
        for index, scores, targets in by_class(logits, labels):
            calibrated, present = fitted.column(index, scores, targets, images)
            predicted = calibrated >= lowest[index]
            self.counts.hits[index] += int((present & predicted).sum())
            self.counts.predicted[index] += int(predicted.sum())
            self.counts.positives[index] += int(present.sum())

            probabilities = expit(calibrated)
            bins = np.minimum((probabilities * BINS).astype(int), BINS - 1)
            self.scores += np.bincount(bins, weights=probabilities, minlength=BINS)
            self.positives += np.bincount(bins, weights=present, minlength=BINS)
            self.pairs += len(present)

    def calibration_error(self) -> float:
        """Return the expected calibration error in percent, over all annotated pairs.

        The mean over the pairs of |share of positives - mean score| of their bin; the bins are
        intervals [low, high) of equal width.
        """
        return float(100 * np.abs(self.positives - self.scores).sum() / self.pairs)


@dataclass(frozen=True)
class _Columns:
    """The columns of several classes, which are computed anew whenever they are iterated over."""

    fitted: Fit
    logits: np.ndarray
    labels: np.ndarray
    images: np.ndarray
    classes: np.ndarray  # bool [K]

    def __iter__(self) -> Iterator[Column]:
        for index, scores, targets in by_class(self.logits, self.labels):
            if self.classes[index]:
                yield self.fitted.column(index, scores, targets, self.images)


def unscaled(num_classes: int, threshold: float) -> Fit:
    """Return the decisions without a fit: the scores of the model and one threshold."""
    ones, no = np.ones(num_classes), np.zeros(num_classes, bool)
    return Fit(ones, 0 * ones, threshold * ones, no, np.nan * ones)


def fit(logits: np.ndarray, labels: np.ndarray, images: np.ndarray, choice: Choice) -> Fit:
    """Fit scores and thresholds to some images.

    Classes that share a threshold are fitted together; if even together they have too few
    positives, to all classes together.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
        images: which of them to use, bool [N].
        choice: what is fitted.

    Raises:
        DataError: if there is no positive among them.
    """
    positives = np.array([(own[images] == 1).sum() for _, _, own in by_class(logits, labels)])
    if not positives.sum():
        raise DataError(
            "no label is positive among the validation images that thresholds are fitted on: use "
            "more of them"
        )

    # Thresholds are of calibrated scores, which come first.
    fitted = _scaled(logits, labels, images, choice)
    thresholds, best_precision = fitted.thresholds, fitted.best_precision

    def store(threshold: Threshold, index: int | np.ndarray) -> None:
        thresholds[index] = threshold.value
        best_precision[index] = np.nan if threshold.is_reached else threshold.precision

    is_shared = np.full(len(positives), choice.scope == "global")
    is_shared |= positives < choice.min_positives
    for index, scores, targets in by_class(logits, labels):
        if not is_shared[index]:
            column = fitted.column(index, scores, targets, images)
            store(fit_threshold(choice.objective, [column]), index)

    if is_shared.any():
        too_few = positives[is_shared].sum() < choice.min_positives
        together = np.ones_like(is_shared) if too_few else is_shared
        columns = _Columns(fitted, logits, labels, images, together)
        store(fit_threshold(choice.objective, columns), is_shared)

    return replace(fitted, shares=is_shared & (choice.scope == "class"))


def cross_fitted(
    logits: np.ndarray, labels: np.ndarray, folds: np.ndarray, choice: Choice
) -> Tally:
    """Decide each image by a fit to the images of the other folds.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
        folds: number of the fold of each image, [N].
        choice: what is fitted.

    Raises:
        DataError: if there is no positive outside a fold.
    """
    tally = Tally(logits.shape[1])
    for fold in np.unique(folds):
        tally.add(fit(logits, labels, folds != fold, choice), logits, labels, folds == fold)
    return tally


def by_class(
    logits: np.ndarray, labels: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the index of each class with its logits, float64 [N], and its labels [N]."""
    for first in range(0, logits.shape[1], BLOCK):
        scores = np.ascontiguousarray(logits[:, first : first + BLOCK].T, np.float64)
        targets = np.ascontiguousarray(labels[:, first : first + BLOCK].T)
        yield from zip(range(first, first + len(scores)), scores, targets, strict=True)


def fit_temperature(
    logits: np.ndarray, labels: np.ndarray, images: np.ndarray, *, exclusive: bool
) -> float | None:
    """Fit the temperature of a model to some images, see `temperature`; to every n-th if need be.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
        images: which of them to use, bool [N].
        exclusive: whether an image has one label.
    """
    rows = _rows(logits, images)
    return temperature(logits[rows], labels[rows], exclusive=exclusive)


def _rows(logits: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Return the indices of images that a number for all classes is fitted to: every n-th."""
    rows = np.flatnonzero(images)
    return rows[:: 1 + len(rows) * logits.shape[1] // MOST_SCORES]


def _scaled(logits: np.ndarray, labels: np.ndarray, images: np.ndarray, choice: Choice) -> Fit:
    """Fit the calibrated scores, and leave the thresholds at 0.5."""
    unfitted = unscaled(logits.shape[1], 0.5)
    if not choice.platt:
        fitted = fit_temperature(logits, labels, images, exclusive=False)
        return replace(unfitted, slopes=unfitted.slopes / (fitted or 1))

    if choice.shared:
        rows = _rows(logits, images)
        annotated = labels[rows] >= 0
        slope, offset = platt(logits[rows][annotated], labels[rows][annotated] == 1)
        return replace(unfitted, slopes=slope * unfitted.slopes, offsets=unfitted.offsets + offset)

    for index, scores, targets in by_class(logits, labels):
        column = unfitted.column(index, scores, targets, images)
        unfitted.slopes[index], unfitted.offsets[index] = platt(*column)
    return unfitted
