"""From scores to thresholds and probabilities: fitting, and the work of `mldec.calibrate`."""

import argparse
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq, minimize
from scipy.special import expit, logit, softmax

from mldec import build
from mldec.checkpoint import (
    Calibration,
    Checkpoint,
    Loaded,
    is_download,
    is_tower,
    load_model,
    scoring,
    to_store,
)
from mldec.checkpoint.state import SCOPES
from mldec.config.compose import to_dict
from mldec.data.fingerprint import fingerprint
from mldec.data.table import fold_numbers
from mldec.data.types import DataModule, StoredImages
from mldec.errors import CheckpointError, ConfigError, DataError, say
from mldec.evaluation import (
    Results,
    Scores,
    all_scores,
    asked_for,
    check_class_names,
    chosen_data,
    fit_to_device,
    is_relative,
    left_out,
    report,
    to_csv,
)
from mldec.evaluators.multi_label import Counts
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files import torch_files
from mldec.files.results import STANDARD_OUTPUT, check_targets, to_json, write_result
from mldec.files.torch_files import SUFFIX
from mldec.runtime import distributed
from mldec.runtime.cli import chosen_model, precision_setting

MOST_SCORES = 4_000_000  # that a number for all classes is fitted to, such as a temperature
BLOCK = 64  # classes that are read together: their scores lie side by side in memory
BINS = 15  # of the calibration error
TOLERANCE = 1e-8  # of the gradient of a mean loss
TEMPERATURES = (0.05, 20.0)  # beyond, the scores would be 0, 0.5 and 1

# Calibrated logits of annotated images [n], and whether the images show the class, bool [n].
Column = tuple[np.ndarray, np.ndarray]

NUMBER = r"([0-9]{0,9}\.?[0-9]{1,9})"
HIGHEST = np.nextafter(1, 0)  # a threshold of 1 could not be compared as a logit


# ------------------------------------------------------------------------------------ probabilities


def temperature(logits: np.ndarray, labels: np.ndarray, *, exclusive: bool) -> float | None:
    """Fit the temperature T that minimises the log loss of the scores of logits / T.

    The scores are a softmax if an image has one label (Guo et al. 2017, arXiv 1706.04599, section
    4.2), else a sigmoid per class. The loss is convex in 1 / T, so that its derivative has one
    zero.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
        exclusive: whether an image has one label; images without one are left out.

    Returns:
        The temperature, None if the best one is outside `TEMPERATURES`.
    """
    logits = logits.astype(np.float64)
    if exclusive:
        has_label = (labels == 1).any(1)
        logits, present = logits[has_label], labels[has_label] == 1
        targets = present / present.sum(1, keepdims=True)
    else:
        annotated = labels >= 0
        logits, targets = logits[annotated], (labels == 1)[annotated]

    def derivative(log_temperature: float) -> float:
        """Return the derivative of the loss with respect to 1 / T."""
        scaled = logits * np.exp(-log_temperature)
        scores = softmax(scaled, axis=1) if exclusive else expit(scaled)
        return float(np.sum((scores - targets) * logits))

    lowest, highest = np.log(TEMPERATURES)
    if not derivative(lowest) > 0 > derivative(highest):
        return None
    return float(np.exp(brentq(derivative, lowest, highest)))


def calibrated(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probability of each class by Platt scaling, float64 [N, K].

    After training with the asymmetric loss, scores are no probabilities, and those of different
    classes cannot be compared. A logistic regression per class on its annotated images mends that;
    its two numbers cannot learn the labels by heart.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
    """
    probabilities = np.zeros(logits.shape)
    for column in range(logits.shape[1]):
        annotated = labels[:, column] >= 0
        present = labels[annotated, column] == 1
        slope, offset = platt(logits[annotated, column], present)
        probabilities[:, column] = expit(slope * logits[:, column] + offset)
    return probabilities


def platt(logits: np.ndarray, present: np.ndarray) -> tuple[float, float]:
    """Fit the probability sigmoid(slope * logit + offset) of one class.

    Its targets are not 1 and 0 but those that Platt (1999) derives from a uniform prior, so that a
    class with few images, or one that the logits separate, has a finite slope. The slope is never
    negative: a model that is worse than chance says nothing about a class.

    Args:
        logits: of n images.
        present: whether their label says that they show the class, bool [n].

    Returns:
        The slope and the offset.
    """
    positives, negatives = int(present.sum()), int((~present).sum())
    targets = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    prior = np.log((positives + 1) / (negatives + 1))

    # In units of their spread, so that the two parameters are of the same size.
    scores = logits.astype(np.float64)
    spread = scores.std() if len(scores) else 0.0
    if spread == 0:
        return 0.0, float(prior)
    mean = scores.mean()
    inputs = np.stack([(scores - mean) / spread, np.ones_like(scores)])

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean cross-entropy with the soft targets, and its gradient."""
        scaled = weights @ inputs
        losses = np.logaddexp(0, scaled) - targets * scaled
        return float(losses.mean()), inputs @ (expit(scaled) - targets) / len(scaled)

    def hessian(weights: np.ndarray) -> np.ndarray:
        probabilities = expit(weights @ inputs)
        return (inputs * (probabilities * (1 - probabilities))) @ inputs.T / len(probabilities)

    start = np.array([0.0, prior])
    options = {"gtol": TOLERANCE}
    weights = minimize(loss, start, jac=True, hess=hessian, method="trust-exact", options=options).x

    slope = weights[0] / spread
    if slope < 0:
        return 0.0, float(prior)
    return float(slope), float(weights[1] - slope * mean)


# --------------------------------------------------------------------------------------- thresholds


@dataclass(frozen=True)
class Objective:
    """What a threshold is chosen for.

    Attributes:
        text: as the user writes it.
        kind: "f1": the highest F1. "precision": the highest recall whose precision is at least
            `values[0]`. "recall": the highest threshold whose recall is at least `values[0]`.
            "cost": the lowest sum of costs, `values[0]` per false positive and `values[1]` per
            false negative. Of equally good thresholds the highest is chosen.
        values: the numbers of the objective.
    """

    text: str
    kind: str
    values: tuple[float, ...]

    def choose(self, hits: np.ndarray, false_alarms: np.ndarray) -> tuple[int | None, bool]:
        """Choose one of C cut points, highest first.

        Args:
            hits: positives at or above each cut point, ascending; the last are all of them.
            false_alarms: negatives at or above each cut point.

        Returns:
            The index of the cut point, None if it is best to predict nothing; and whether the
            objective is reached. If no cut point has the precision that is asked for, the one of
            the highest precision is chosen, of several the one of the highest recall.
        """
        positives = hits[-1]
        precision = hits / (hits + false_alarms)

        if self.kind == "f1":
            return int(np.argmax(2 * hits / (positives + hits + false_alarms))), True
        if self.kind == "recall":
            return int(np.argmax(hits / positives >= self.values[0])), True
        if self.kind == "precision":
            reached = bool(precision.max() >= self.values[0])
            wanted = self.values[0] if reached else precision.max()
            return int(np.flatnonzero(precision >= wanted)[-1]), reached

        per_false_positive, per_false_negative = self.values
        costs = per_false_positive * false_alarms + per_false_negative * (positives - hits)
        is_never_best = per_false_negative * positives <= costs.min()
        return (None if is_never_best else int(np.argmin(costs))), True


@dataclass(frozen=True)
class Threshold:
    """A threshold, and what it reaches on the images that it was fitted on."""

    value: float  # the lowest calibrated score, from 0 to 1, that counts as present
    is_reached: bool  # the objective
    precision: float
    recall: float


def parse_objective(text: str) -> Objective:
    """Read f1, precision:P, recall:R or cost:FP,FN.

    Raises:
        ConfigError: for another text, or a number out of its range.
    """
    if text == "f1":
        return Objective(text, "f1", ())

    share = re.fullmatch(rf"(precision|recall):{NUMBER}", text)
    if share and 0 < float(share[2]) <= 1:
        return Objective(text, share[1], (float(share[2]),))

    costs = re.fullmatch(rf"cost:{NUMBER},{NUMBER}", text)
    if costs and float(costs[1]) > 0 and float(costs[2]) > 0:
        return Objective(text, "cost", (float(costs[1]), float(costs[2])))

    raise ConfigError(
        f"--objective {text}: it must be f1, precision:P or recall:R with a number above 0 and at "
        f"most 1, or cost:FP,FN with two costs above 0, such as precision:0.9 or cost:1,5"
    )


def fit_threshold(objective: Objective, columns: Iterable[Column]) -> Threshold:
    """Fit one threshold to the scores of a class, or of several classes together.

    Only the scores of positives are cut points that can be best: between two of them a lower
    threshold adds nothing but false positives. The threshold lies halfway between the lowest score
    that counts as present and the next one.

    Args:
        objective: that the threshold is chosen for.
        columns: the images of each class, at least one of them positive. They are iterated over
            several times, so that the scores of many classes need not be in memory together.
    """
    of_positives = np.concatenate([logits[present] for logits, present in columns])
    cuts, counts = np.unique(of_positives, return_counts=True)

    # How many cut points each negative reaches; most reach none, and need no search.
    reached = np.zeros(len(cuts) + 1, np.int64)
    for logits, present in columns:
        negatives = logits[~present & (logits >= cuts[0])]
        below = np.searchsorted(cuts, negatives, side="right")
        reached += np.bincount(below, minlength=len(reached))

    # From the highest cut point to the lowest.
    cuts, hits, false_alarms = cuts[::-1], counts[::-1].cumsum(), reached[::-1].cumsum()[:-1]
    index, is_reached = objective.choose(hits, false_alarms)
    if index is None:
        highest = max(logits.max() for logits, _ in columns if len(logits))
        return Threshold(min((expit(highest) + 1) / 2, HIGHEST), is_reached, 0.0, 0.0)

    lower = (logits[logits < cuts[index]] for logits, _ in columns)
    next_lower = max((logits.max() for logits in lower if len(logits)), default=-np.inf)
    value = expit(np.array([cuts[index], next_lower])).mean()

    return Threshold(
        float(min(value, HIGHEST)),
        is_reached,
        float(hits[index] / (hits[index] + false_alarms[index])),
        float(hits[index] / hits[-1]),
    )


# -------------------------------------------------------------------------------------- all classes


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


log = logging.getLogger("mldec")

SEED = 1  # of the folds; 0 is that of data.fold, whose images may be the ones to divide here
FIXED = 0.5  # the threshold that the fitted ones are compared with
NAMED = 10  # classes in a message; all of them are in --json


@dataclass(frozen=True)
class Outcome:
    """What a fit comes to, for each of three ways to judge it.

    Attributes:
        cross_fitted: percentages by name, of images that were not used for the fit.
        fitted: of those that it was fitted to.
        uncalibrated: of the model's own scores, with a threshold of `FIXED`.
        per_class: columns of K values by name; none if an image has one label.
        slopes: of the calibrated logits, K or one for all classes.
        offsets: as many.
        thresholds: K, one for all classes, or none.
    """

    cross_fitted: dict[str, float]
    fitted: dict[str, float]
    uncalibrated: dict[str, float]
    per_class: dict[str, list[Any]]
    slopes: list[float]
    offsets: list[float]
    thresholds: list[float]


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.calibrate`: score, fit, store the copy, print, and write the files.

    Args:
        args: the command line; see `mldec.calibrate.parser`.

    Raises:
        UserError: for a wrong option or setting, or a checkpoint or data that cannot be used.
    """
    # Everything that can be refused at once comes before the model.
    objective = parse_objective(args.objective or "f1")
    if args.scope not in (*SCOPES, None):
        raise ConfigError(f"--scope {args.scope}: it must be class or global")
    if args.folds < 2:
        raise ConfigError(f"--folds {args.folds}: thresholds are judged with at least 2")
    check_targets(args.json, args.csv, args.out)

    args.settings += precision_setting(args)
    loaded = load_model(**chosen_model(args))
    path = loaded.path
    out = target(args, path)
    check_targets(out)
    check_class_names(loaded, args)

    config, parts = chosen_data(loaded, args)
    device = distributed.pick_device(config.device)
    fit_to_device(config, args.settings, device)
    data = build.data(parts)
    check_scores(loaded, data, args)
    loaded, data = asked_for(loaded, data, args.checkpoint)
    checkpoint = to_store(loaded)
    check_size(data, checkpoint, path)
    choice = Choice(
        objective,
        scope_of(loaded, args),
        args.min_positives or MIN_POSITIVES,
        args.platt,
        shared=loaded.classes.queries is not None,
    )

    network = scoring(loaded.model, loaded.classes, data.val.classes, path)
    scores = all_scores(network, data, config, device=device, path=str(path))
    if not len(scores.indices):
        raise DataError(f"no validation image can be scored: {'; '.join(scores.bad[:1]) or 'none'}")
    folds = fold_numbers(keys_of(data, scores.indices), args.folds, SEED)

    names = data.val.classes.names
    if loaded.classes.exclusive:
        outcome = with_one_label(scores, folds)
    else:
        outcome = with_several(scores, folds, choice, names)

    calibration = Calibration(
        weights=loaded.weights,
        objective=None if loaded.classes.exclusive else objective.text,
        scope=None if loaded.classes.exclusive else choice.scope,
        thresholds=in_order(outcome.thresholds, names, loaded),
        slopes=in_order(outcome.slopes, names, loaded),
        offsets=in_order(outcome.offsets, names, loaded),
        images=len(scores.indices),
        data=to_dict(config)["data"],
        fingerprint=fingerprint(data.val),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    state = replace(checkpoint, calibration=calibration).to_state()
    torch_files.save(Path(out), state, of_run=False)
    tell(outcome, calibration, scores, names, args, out)


def target(args: argparse.Namespace, path: Path) -> str:
    """Return the name of the calibrated copy.

    Args:
        args: the command line.
        path: of its file; a downloaded one has its copy in the current folder.

    Raises:
        ConfigError: if it would be standard output, or the checkpoint itself.
    """
    if args.out == STANDARD_OUTPUT:
        raise ConfigError("--out -: a checkpoint is written to a file; pass its name")
    if args.out is not None:
        out = Path(args.out)
    else:
        folder = Path() if is_download(args.checkpoint) else path.parent
        # A published checkpoint and a model of open_clip get a copy of the other kind.
        suffix = path.suffix
        if suffix == SUFFIX or is_tower(args.checkpoint):
            suffix = ".pt"
        out = folder / f"{path.stem.removesuffix('.calibrated')}.calibrated{suffix}"

    if os.path.realpath(out) == os.path.realpath(path):
        raise ConfigError(f"--out: {out} is the checkpoint itself; pass another name")
    return str(out)


def scope_of(loaded: Loaded, args: argparse.Namespace) -> str:
    """Return the scope of the thresholds, and refuse options that do not fit the model.

    Raises:
        CheckpointError: if the checkpoint has no classes to store thresholds for.
        ConfigError: for an option without effect on this model.
    """
    if not loaded.classes.names:
        raise CheckpointError(
            f"{args.checkpoint} names no classes and holds no word vectors: thresholds cannot be "
            f"stored with it"
        )

    options = ("objective", "scope", "platt", "min_positives")
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name)]
    if loaded.classes.exclusive and given:
        raise ConfigError(
            f"{given[0]} has no effect: an image of this data has one label, so that only a "
            f"temperature is fitted; leave it out"
        )
    if loaded.classes.queries is not None and args.scope == "class":
        raise ConfigError(
            f"--scope class: {args.checkpoint} scores any classes by their word vectors, so that "
            f"it has one threshold; leave it out"
        )

    scope = "global" if loaded.classes.queries is not None else args.scope or "class"
    if scope == "global" and args.min_positives:
        raise ConfigError(
            "--min-positives has no effect: all classes share one threshold; leave it out"
        )
    return scope


def check_scores(loaded: Loaded, data: DataModule, args: argparse.Namespace) -> None:
    """Raise a `ConfigError` if one temperature cannot make scores of the logits."""
    if is_relative(loaded, data) and not args.platt:
        raise ConfigError(
            f"--platt is missing: the logits of {args.checkpoint} are all far above 0, which no "
            f"temperature mends; pass --platt, for a slope and an offset"
        )


def check_size(data: DataModule, checkpoint: Checkpoint, path: Path) -> None:
    """Raise a `ConfigError` if the images have another size than the checkpoint will say."""
    size, stored = data.transform.image_size, checkpoint.transform.image_size
    if size != stored:
        raise ConfigError(
            f"data.image_size {size}: {path} is for {stored} pixels, and its thresholds would not "
            f"hold there; pass data.image_size={stored}"
        )


def keys_of(data: DataModule, indices: np.ndarray) -> np.ndarray:
    """Return what identifies the images of these indices, wherever they are stored."""
    dataset = data.val.dataset
    return dataset.storage.keys[indices] if isinstance(dataset, StoredImages) else indices


def in_order(values: list[float], names: tuple[str, ...], loaded: Loaded) -> tuple[float, ...]:
    """Bring one value per class of the data into the order of the checkpoint's classes."""
    if len(values) < 2:
        return tuple(values)

    value_of = dict(zip(names, values, strict=True))
    return tuple(value_of[name] for name in loaded.classes.names)


def with_several(
    scores: Scores, folds: np.ndarray, choice: Choice, names: tuple[str, ...]
) -> Outcome:
    """Calibrate a model of several labels per image, and say what it could not do.

    Args:
        scores: of N images and K classes.
        folds: number of the fold of each image, [N].
        choice: what is fitted.
        names: of the K classes.
    """
    logits, labels = scores.logits, scores.labels
    every = np.ones(len(logits), bool)
    fitted = fit(logits, labels, every, choice)
    warn(fitted, choice, names)

    own, fixed = Tally(len(names)), Tally(len(names))
    own.add(fitted, logits, labels, every)
    fixed.add(unscaled(len(names), FIXED), logits, labels, every)
    outside = cross_fitted(logits, labels, folds, choice)

    per_class: dict[str, list[Any]] = {"threshold": fitted.thresholds.tolist()}
    for prefix, tally in (("", outside), ("fitted_", own), (f"at_{FIXED}_", fixed)):
        for name, column in tally.counts.per_class().items():
            per_class[prefix + name] = (100 * column).tolist()
    per_class["positives"] = own.counts.positives.tolist()
    per_class["shares_threshold"] = fitted.shares.tolist()
    per_class["objective_reached"] = np.isnan(fitted.best_precision).tolist()

    # One number stands for all classes.
    scales = len(names) if choice.platt and not choice.shared else 1
    thresholds = 1 if choice.scope == "global" else len(names)
    return Outcome(
        summary(outside),
        summary(own),
        summary(fixed),
        per_class,
        fitted.slopes[:scales].tolist(),
        fitted.offsets[:scales].tolist(),
        fitted.thresholds[:thresholds].tolist(),
    )


def summary(tally: Tally) -> dict[str, float]:
    """Return precision, recall, F1 and the calibration error in percent."""
    return {**tally.counts.summary(), "ECE": tally.calibration_error()}


def warn(fitted: Fit, choice: Choice, names: tuple[str, ...]) -> None:
    """Name the classes that share a threshold, and those that the objective cannot be reached for.

    Args:
        fitted: to all images.
        choice: of the user.
        names: of the classes.
    """
    sharing = [names[index] for index in np.flatnonzero(fitted.shares)]
    if sharing:
        log.warning(
            f"{len(sharing)} classes share a threshold, as they have fewer than "
            f"{choice.min_positives} positives: {listed(sharing)}"
        )

    unreached = [
        f"{names[index]} ({100 * fitted.best_precision[index]:.1f} %)"
        for index in np.flatnonzero(~np.isnan(fitted.best_precision))
    ]
    if unreached:
        log.warning(
            f"no threshold reaches {choice.objective.text} for {len(unreached)} classes, which "
            f"have the one of the highest precision: {listed(unreached)}"
        )


def listed(names: list[str]) -> str:
    """Return the first names, with commas between."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def with_one_label(scores: Scores, folds: np.ndarray) -> Outcome:
    """Fit the temperature of a model of one label per image.

    Args:
        scores: of N images.
        folds: number of the fold of each image, [N].
    """
    logits, labels = scores.logits, scores.labels
    fitted = fit_temperature(logits, labels, np.ones(len(logits), bool), exclusive=True) or 1.0

    temperatures = np.ones(len(logits))
    for fold in np.unique(folds):
        outside = fit_temperature(logits, labels, folds != fold, exclusive=True)
        temperatures[folds == fold] = outside or 1.0

    def metrics(divisors: np.ndarray) -> dict[str, float]:
        evaluator = SingleLabelEvaluator(logits.shape[1])
        evaluator.update(torch.from_numpy(logits / divisors[:, None]), torch.from_numpy(labels))
        values = evaluator.compute()
        return {name: values[name] for name in ("top1", "ECE")}

    ones = np.ones(len(logits))
    return Outcome(
        metrics(temperatures), metrics(fitted * ones), metrics(ones), {}, [1 / fitted], [0.0], []
    )


def tell(
    outcome: Outcome,
    calibration: Calibration,
    scores: Scores,
    names: tuple[str, ...],
    args: argparse.Namespace,
    out: str,
) -> None:
    """Print the results, and write the files that the command line names.

    Args:
        outcome: of the fit.
        calibration: as it is stored.
        scores: that it was fitted to.
        names: of the classes of the data.
        args: the command line.
        out: path of the calibrated copy.
    """
    results = Results(
        outcome.cross_fitted, outcome.per_class, calibration.images, scores.bad, confusions=None
    )
    for line in left_out(results):
        log.warning(line)
    say(*lines(outcome, calibration, args), f"{out}: a calibrated copy of {args.checkpoint}")

    if args.json:
        content = {
            **report(results, calibration.weights, args.checkpoint, names),
            "fitted": outcome.fitted,
            "uncalibrated": outcome.uncalibrated,
            "out": out,
            "objective": calibration.objective,
            "scope": calibration.scope,
            "folds": args.folds,
            "temperature": None if args.platt else 1 / calibration.slopes[0],
        }
        write_result(args.json, to_json(content, indent=1) + "\n")
    if args.csv:
        write_result(args.csv, to_csv(results, names))


def lines(outcome: Outcome, calibration: Calibration, args: argparse.Namespace) -> list[str]:
    """Return the lines of the console: what was fitted, and a table of three ways to judge it."""
    fitted = []
    if calibration.scope == "class":
        fitted = [f"a threshold per class for {calibration.objective}"]
    if calibration.scope == "global":
        fitted = [f"threshold {calibration.thresholds[0]:.3f} for {calibration.objective}"]

    if args.platt:
        per_class = " per class" if len(calibration.slopes) > 1 else ""
        fitted.append(f"Platt scaling{per_class}")
    elif calibration.slopes == (1.0,):
        lowest, highest = TEMPERATURES
        fitted.append(f"no temperature: the best one is not from {lowest:g} to {highest:g}")
    else:
        fitted.append(f"temperature {1 / calibration.slopes[0]:.3f}")

    columns = {
        "cross-fitted": outcome.cross_fitted,
        "same images": outcome.fitted,
        "uncalibrated" if calibration.scope is None else f"at {FIXED}": outcome.uncalibrated,
    }
    weights, images = calibration.weights, calibration.images
    return [
        f"{args.checkpoint} ({weights} weights) on {images:,} images: {', '.join(fitted)}",
        "  percent   " + "".join(f"{heading:>14}" for heading in columns),
        *(
            f"  {name:10}" + "".join(f"{metrics[name]:14.3f}" for metrics in columns.values())
            for name in outcome.fitted
        ),
        f"cross-fitted: of images that were not used for the fit, in {args.folds} folds; "
        f"same images: of those that were, which is too good",
    ]


MIN_POSITIVES = 10  # classes with fewer share a threshold, unless the user says otherwise
