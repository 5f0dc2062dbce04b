"""Calibration of scores, and thresholds for an objective, from logits and labels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import torch
from scipy.special import expit, logit, softmax

from mldec.errors import DataError
from mldec.evaluators.multi_label import Counts
from mldec.evaluators.platt import common_slope, platt

MIN_POSITIVES = 10  # classes with fewer positives share a threshold
FIXED = 0.5  # threshold of the uncalibrated model

MAX_SCORES = 4_000_000  # for fits over all classes, such as a temperature
BLOCK = 64  # classes per copy to contiguous memory
BINS = 15  # of the expected calibration error
# Range of fitted temperatures. Below it, all scores are about 0 or 1. Above it, all scores of an
# image are about equal.
TEMPERATURES = (0.05, 20.0)
MAX_THRESHOLD = np.nextafter(1, 0)  # the logit of 1 is infinite
# Candidate exponents of the frequency in thresholds for the objective "per_image".
POWERS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)
MIN_DIFFERENCE = 0.1  # between mean logits; the unit of a class that the model does not recognize

# Calibrated logits of the annotated images [n] and their labels, bool [n].
Column = tuple[np.ndarray, np.ndarray]

# Computes precision, recall and F1 of the valid classes in percent.
Summarize = Callable[[Counts], dict[str, float]]


@dataclass(frozen=True)
class Objective:
    """The objective of a threshold. The highest of equally good thresholds is selected.

    - f1: The highest F1.
    - precision: The highest recall with a precision of at least `values[0]`.
    - recall: The highest threshold with a recall of at least `values[0]`.
    - cost: The lowest total cost. `values` are the costs of a false positive and a false negative.
    - per_image: `values[0]` classes per image on average, or as many as there are positives. All
      thresholds are fitted together, see `thresholds_per_image`.
    """

    text: str  # as in --objective
    kind: str  # "f1", "precision", "recall", "cost" or "per_image"
    values: tuple[float, ...]

    def choose(self, hits: np.ndarray, false_alarms: np.ndarray) -> tuple[int | None, bool]:
        """Select one of C candidate thresholds, which are in descending order.

        Args:
            hits: True positives of each threshold, [C]. The last threshold includes all positives.
            false_alarms: False positives of each threshold, [C].

        Returns:
            The index of the threshold, or None if it is best to predict no image, and whether the
            objective is reached.
        """
        positives = hits[-1]
        precision = hits / (hits + false_alarms)

        if self.kind == "f1":
            return int(np.argmax(2 * hits / (positives + hits + false_alarms))), True
        if self.kind == "recall":
            return int(np.argmax(hits / positives >= self.values[0])), True
        if self.kind == "precision":
            wanted = min(self.values[0], precision.max())
            reached = bool(wanted == self.values[0])
            return int(np.flatnonzero(precision >= wanted)[-1]), reached

        per_false_positive, per_false_negative = self.values
        costs = per_false_positive * false_alarms + per_false_negative * (positives - hits)
        if per_false_negative * positives <= costs.min():
            return None, True
        return int(np.argmin(costs)), True


def fit_threshold(
    objective: Objective, logits: np.ndarray, present: np.ndarray
) -> tuple[float, float]:
    """Fit one threshold to logits [n] and labels, bool [n]. At least one label is positive.

    Returns:
        The threshold in (0, 1), halfway between the lowest score of a predicted positive and the
        next lower score. If it does not reach the objective, also its in-sample precision,
        otherwise NaN.
    """
    # Between the scores of two positives, a lower threshold only adds false positives.
    cuts, counts = np.unique(logits[present], return_counts=True)
    # Count the candidates at or below each negative.
    below = np.searchsorted(cuts, logits[~present], side="right")
    reached = np.bincount(below, minlength=len(cuts) + 1)

    # Order the candidates from high to low.
    cuts = cuts[::-1]
    hits = counts[::-1].cumsum()
    false_alarms = reached[::-1].cumsum()[:-1]
    index, is_reached = objective.choose(hits, false_alarms)
    if index is None:
        return min((expit(logits.max()) + 1) / 2, MAX_THRESHOLD), np.nan

    next_lower = logits[logits < cuts[index]].max(initial=-np.inf)
    value = expit(np.array([cuts[index], next_lower])).mean()
    precision = np.nan if is_reached else hits[index] / (hits[index] + false_alarms[index])
    return min(value, MAX_THRESHOLD), precision


@dataclass(frozen=True)
class Choice:
    """Options of a fit."""

    objective: Objective
    scope: str  # of the thresholds: "class" or "global"
    min_positives: int  # classes with fewer positives share a threshold
    single_slope: bool = False  # one slope and offset for all classes, for zero-shot models


def thresholds_per_image(logits: np.ndarray, labels: np.ndarray, choice: Choice) -> np.ndarray:
    """Fit thresholds, float64 [K], that predict a given number of classes per image on average.

    Scores of rare classes are low even in images that show them. The logits of a class are thus
    measured from their mean over the images without the class, in units of the difference to their
    mean over the images with it. The threshold is cut * frequency^power in these units. The cut
    gives the number of classes, and the power from `POWERS` the highest CF1. With the scope
    "global", all classes have the same threshold. For the arguments see `fit`; logits are float64.
    """
    positives = (labels == 1).sum(0)
    known = (labels >= 0).sum(0)
    per_image = sum(choice.objective.values) or (positives / np.maximum(known, 1)).sum()
    last = int(np.clip(round(per_image * len(logits)), 1, logits.size - 1))

    centers = np.zeros(len(known))
    candidates = [np.ones(len(known))]
    if choice.scope == "class":
        centers = np.where(labels == 0, logits, 0).sum(0) / np.maximum(known - positives, 1)
        differences = np.where(labels == 1, logits - centers, 0).sum(0)
        # The mean of a few images is uncertain, so the median of the classes counts as one image.
        median = np.median((differences / np.maximum(positives, 1))[positives > 0])
        differences = np.maximum((differences + median) / (positives + 1), MIN_DIFFERENCE)
        candidates = [differences * ((positives + 1) / (known + 2)) ** power for power in POWERS]

    fitted = []
    for units in candidates:
        positions = ((logits - centers) / units).ravel()
        # The cut is halfway between the last predicted position and the next one.
        cut = np.partition(positions, [-last - 1, -last])[[-last - 1, -last]].mean()
        thresholds = centers + cut * units
        counts = Counts(len(known))
        counts.update(torch.from_numpy(logits >= thresholds), torch.from_numpy(labels))
        fitted.append((counts.summary()["CF1"], thresholds))
    _, best = max(fitted, key=itemgetter(0))
    limited: np.ndarray = np.minimum(expit(best), MAX_THRESHOLD)
    return limited


@dataclass(frozen=True)
class Fit:
    """Calibration of K classes. Calibrated logits are slope * logit + offset."""

    slopes: np.ndarray  # float64 [K]
    offsets: np.ndarray  # float64 [K]
    thresholds: np.ndarray  # float64 [K]: lowest calibrated score of a present class
    is_shared: np.ndarray  # bool [K]: the class shares a threshold because of few positives
    # In-sample precision of classes that do not reach the objective, otherwise NaN; float64 [K].
    best_precision: np.ndarray

    def columns(
        self, logits: np.ndarray, labels: np.ndarray, images: np.ndarray
    ) -> Iterator[tuple[int, Column]]:
        """Yield the index and the calibrated column of each class. For the arguments see `fit`."""
        for first in range(0, logits.shape[1], BLOCK):
            block = np.s_[:, first : first + BLOCK]
            scores = np.ascontiguousarray(logits[block].T, np.float64)
            targets = np.ascontiguousarray(labels[block].T)
            for index, (column, target) in enumerate(zip(scores, targets, strict=True), first):
                chosen = images & (target >= 0)
                calibrated = self.slopes[index] * column[chosen] + self.offsets[index]
                yield index, (calibrated, target[chosen] == 1)


def uncalibrated(num_classes: int) -> Fit:
    """Return a fit with the scores of the model and the threshold `FIXED`."""
    ones = np.ones(num_classes)
    return Fit(ones, 0 * ones, FIXED * ones, np.zeros(num_classes, bool), np.nan * ones)


def subsample(logits: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Return the indices of every n-th image, with at most about `MAX_SCORES` scores."""
    rows = np.flatnonzero(images)
    return rows[:: 1 + len(rows) * logits.shape[1] // MAX_SCORES]


def temperature(logits: np.ndarray, labels: np.ndarray, images: np.ndarray) -> float | None:
    """Fit the temperature T that minimizes the log loss of softmax(logits / T) on one-hot labels.

    Source: Guo et al. 2017, arXiv 1706.04599, section 4.2. The loss is convex in 1 / T, so its
    derivative has one zero. Returns None if it is outside `TEMPERATURES`. See `fit` for the
    arguments.
    """
    from scipy.optimize import brentq  # slow import, not needed for predictions

    rows = subsample(logits, images)
    rows = rows[(labels[rows] == 1).any(1)]
    selected = logits[rows].astype(np.float64)
    present = labels[rows] == 1
    targets = present / present.sum(1, keepdims=True)
    # Relative to the logit of the label, the terms have the sign of the errors. The difference of
    # scores and targets would be rounded to 0 if all images are classified correctly.
    selected -= (targets * selected).sum(1, keepdims=True)

    def derivative(log_temperature: float) -> float:
        scores = softmax(selected * np.exp(-log_temperature), axis=1)
        return float(np.sum(scores * selected))

    lowest, highest = np.log(TEMPERATURES)
    if not derivative(lowest) > 0 > derivative(highest):
        return None
    return float(np.exp(brentq(derivative, lowest, highest)))


def fit_scores(
    logits: np.ndarray, labels: np.ndarray, images: np.ndarray, *, single_slope: bool = False
) -> Fit:
    """Fit slopes and offsets, and set all thresholds to `FIXED`. For the arguments see `fit`.

    `single_slope` fits the same slope and offset for all classes.
    """
    fitted = uncalibrated(logits.shape[1])
    rows = subsample(logits, images)
    if single_slope:
        annotated = labels[rows] >= 0
        slope, offset = platt(logits[rows][annotated], labels[rows][annotated] == 1)
        fitted.slopes[:] = slope
        fitted.offsets[:] = offset
        return fitted

    common = common_slope(logits[rows].astype(np.float64), labels[rows])
    # These are uncalibrated logits: each slope is 1 and each offset 0 until they are fitted.
    for index, column in fitted.columns(logits, labels, images):
        fitted.slopes[index], fitted.offsets[index] = platt(*column, common)
    return fitted


def fit(logits: np.ndarray, labels: np.ndarray, images: np.ndarray, choice: Choice) -> Fit:
    """Fit slopes, offsets and thresholds.

    Args:
        logits: Logits [N, K].
        labels: Labels [N, K]: 1, 0 or -1 (ignored).
        images: The images of the fit, bool [N].
        choice: Options.

    Raises:
        DataError: If none of the images has a positive label.
    """
    positives = (labels[images] == 1).sum(0)
    if not positives.sum():
        raise DataError("calibration: no image has a positive label; use more images")

    # The thresholds are for the calibrated scores.
    fitted = fit_scores(logits, labels, images, single_slope=choice.single_slope)
    if choice.objective.kind == "per_image":
        rows = subsample(logits, images)
        calibrated = fitted.slopes * logits[rows] + fitted.offsets
        fitted.thresholds[:] = thresholds_per_image(calibrated, labels[rows], choice)
        return fitted

    is_shared = (positives < choice.min_positives) | (choice.scope == "global")
    for index, column in fitted.columns(logits, labels, images):
        if not is_shared[index]:
            threshold, precision = fit_threshold(choice.objective, *column)
            fitted.thresholds[index] = threshold
            fitted.best_precision[index] = precision

    if is_shared.any():
        # Use the images of all classes if the sharing classes have too few positives.
        too_few = positives[is_shared].sum() < choice.min_positives
        columns = []
        for index, column in fitted.columns(logits, labels, images):
            if too_few or is_shared[index]:
                columns.append(column)
        shared = map(np.concatenate, zip(*columns, strict=True))
        threshold, precision = fit_threshold(choice.objective, *shared)
        fitted.thresholds[is_shared] = threshold
        fitted.best_precision[is_shared] = precision

    # One threshold for all classes was requested, so no class is reported as an exception.
    if choice.scope == "global":
        return fitted
    return replace(fitted, is_shared=is_shared)


class Tally:
    """Sums over images for the metrics of decisions and for the calibration error."""

    def __init__(self, num_classes: int) -> None:
        self.counts = Counts(num_classes)
        self.pairs = 0  # annotated pairs of an image and a class

        # Sum of the calibrated scores and number of positives per bin.
        self.scores = np.zeros(BINS)
        self.positives = np.zeros(BINS)

    def add(self, fitted: Fit, logits: np.ndarray, labels: np.ndarray, images: np.ndarray) -> None:
        """Add the decisions on the selected images; see `fit` for the arguments."""
        lowest = logit(fitted.thresholds)
        for index, (calibrated, present) in fitted.columns(logits, labels, images):
            predicted = calibrated >= lowest[index]
            self.counts.hits[index] += int((present & predicted).sum())
            self.counts.predicted[index] += int(predicted.sum())
            self.counts.positives[index] += int(present.sum())
            self.counts.negatives[index] += int((~present).sum())

            probabilities = expit(calibrated)
            bins = np.minimum((probabilities * BINS).astype(int), BINS - 1)
            self.scores += np.bincount(bins, weights=probabilities, minlength=BINS)
            self.positives += np.bincount(bins, weights=present, minlength=BINS)
            self.pairs += len(present)

    def summary(self, summarize: Summarize = Counts.summary) -> dict[str, float]:
        """Return precision, recall, F1 and the expected calibration error (ECE) in percent."""
        error = 100 * np.abs(self.positives - self.scores).sum() / self.pairs
        return summarize(self.counts) | {"ECE": float(error)}


def cross_fitted(
    logits: np.ndarray, labels: np.ndarray, folds: np.ndarray, choice: Choice
) -> Tally:
    """Return the out-of-fold tally: each image is decided by a fit to the other folds.

    `folds` [N] are the numbers of the folds. For the other arguments see `fit`.
    """
    tally = Tally(logits.shape[1])
    for fold in np.unique(folds):
        tally.add(fit(logits, labels, folds != fold, choice), logits, labels, folds == fold)
    return tally
