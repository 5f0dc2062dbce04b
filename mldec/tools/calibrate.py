"""Fit thresholds: `mldec calibrate outputs/NAME [data.root=...] [--objective f1]`.

Thresholds and probabilities, a slope and an offset of the logits per class, are fitted to the
validation images, and stored in a copy of the checkpoint, checkpoints/calibrated.pt in the folder
of the run; see docs/running.md. With --thresholds FILE nothing is fitted, and the copy has the
thresholds of the file.
"""

import argparse
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit, softmax

from mldec.checkpoint import load_model
from mldec.checkpoint.loading import to_store
from mldec.checkpoint.sources import local
from mldec.checkpoint.state import Calibration, in_order
from mldec.cli import (
    add_data_options,
    add_model_options,
    chosen_model,
    command,
    positive,
    precision_setting,
    run_command,
    whole,
)
from mldec.config.compose import to_dict
from mldec.data.fingerprint import fingerprint
from mldec.data.splits import fold_numbers
from mldec.data.types import StoredImages
from mldec.errors import ConfigError, DataError, say
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.output import Results, left_out, report, same_scores, to_csv
from mldec.evaluation.run import Scores
from mldec.evaluators.label_errors import common_slope, platt
from mldec.evaluators.multi_label import Counts
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files import torch_files
from mldec.files.atomic import check_targets, write_json, write_result
from mldec.files.run_folder import CALIBRATED, is_best_of_run
from mldec.names import format_list

log = logging.getLogger("mldec")

MIN_POSITIVES = 10  # classes with fewer share a threshold, unless the user says otherwise
FOLDS = 5
SEED = 1  # of the folds; 0 is that of data.fold, whose images may be the ones to divide here
FIXED = 0.5  # the threshold that the fitted ones are compared with

MOST_SCORES = 4_000_000  # that a number for all classes is fitted to, such as a temperature
BLOCK = 64  # classes that are read together: their scores lie side by side in memory
BINS = 15  # of the calibration error
TEMPERATURES = (0.05, 20.0)  # beyond, the scores would be 0, 0.5 and 1
HIGHEST = np.nextafter(1, 0)  # a threshold of 1 could not be compared as a logit

NUMBER = r"[0-9]{0,9}\.?[0-9]{1,9}"
OBJECTIVE = re.compile(rf"f1|(precision|recall):{NUMBER}|cost:{NUMBER},{NUMBER}")

# Calibrated logits of annotated images [n], and whether the images show the class, bool [n].
Column = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Objective:
    """What a threshold is chosen for; of equally good ones the highest is."""

    text: str  # as the user writes it
    # "f1": the highest F1. "precision": the highest recall whose precision is at least the value.
    # "recall": the highest threshold whose recall is at least the value. "cost": the lowest sum of
    # costs, of which the values are those of a false positive and of a false negative.
    kind: str
    values: tuple[float, ...]

    def choose(self, hits: np.ndarray, false_alarms: np.ndarray) -> tuple[int | None, bool]:
        """Choose one of C cut points by the positives and the negatives at or above each of them.

        The highest cut point comes first. Returns its index, None if it is best to predict
        nothing, and whether the objective is reached: otherwise the highest precision is chosen.
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


def parse_objective(text: str) -> Objective:
    """Read f1, precision:P, recall:R or cost:FP,FN."""
    if OBJECTIVE.fullmatch(text):
        kind, _, numbers = text.partition(":")
        values = tuple(float(number) for number in numbers.split(",") if number)
        highest = np.inf if kind == "cost" else 1
        if all(0 < value <= highest for value in values):
            return Objective(text, kind, values)

    raise ConfigError(
        f"--objective {text}: it must be f1, precision:P or recall:R with a number above 0 and at "
        f"most 1, or cost:FP,FN with two costs above 0, such as precision:0.9 or cost:1,5"
    )


@dataclass(frozen=True)
class Threshold:
    """A threshold, and its precision on the images that it was fitted on."""

    value: float  # the lowest calibrated score, from 0 to 1, that counts as present
    is_reached: bool  # the objective
    precision: float


def fit_threshold(objective: Objective, columns: Callable[[], Iterable[Column]]) -> Threshold:
    """Fit one threshold to the scores of a class, or of several classes together.

    It lies halfway between the lowest score that counts as present and the next one. The columns
    are computed several times, so that the scores of many classes need not be in memory together.
    """
    # Only the scores of positives can be the best cut points: between two of them a lower threshold
    # adds nothing but false positives.
    of_positives = np.concatenate([logits[present] for logits, present in columns()])
    cuts, counts = np.unique(of_positives, return_counts=True)

    # How many cut points each negative reaches; most reach none, and need no search.
    reached = np.zeros(len(cuts) + 1, np.int64)
    for logits, present in columns():
        negatives = logits[~present & (logits >= cuts[0])]
        below = np.searchsorted(cuts, negatives, side="right")
        reached += np.bincount(below, minlength=len(reached))

    # From the highest cut point to the lowest.
    cuts = cuts[::-1]
    hits = counts[::-1].cumsum()
    false_alarms = reached[::-1].cumsum()[:-1]
    index, is_reached = objective.choose(hits, false_alarms)
    if index is None:
        highest = max(logits.max() for logits, _ in columns() if len(logits))
        return Threshold(min((expit(highest) + 1) / 2, HIGHEST), is_reached, 0.0)

    lower = (logits[logits < cuts[index]] for logits, _ in columns())
    next_lower = max((logits.max() for logits in lower if len(logits)), default=-np.inf)
    value = expit(np.array([cuts[index], next_lower])).mean()
    precision = float(hits[index] / (hits[index] + false_alarms[index]))
    return Threshold(float(min(value, HIGHEST)), is_reached, precision)


@dataclass(frozen=True)
class Choice:
    """What the user chooses."""

    objective: Objective
    scope: str  # "class" or "global"
    min_positives: int  # classes with fewer share a threshold
    shared: bool = False  # one slope and offset for all classes, as they must if these are any


@dataclass(frozen=True)
class Fit:
    """How K classes are decided: calibrated logits are slope * logit + offset."""

    slopes: np.ndarray  # float64 [K]
    offsets: np.ndarray  # float64 [K]
    thresholds: np.ndarray  # lowest calibrated score that counts as present, float64 [K]
    shares: np.ndarray  # the threshold with others, for want of positives, bool [K]
    # On the images of the fit, where it is not what was asked for; elsewhere NaN, float64 [K].
    best_precision: np.ndarray

    def columns(
        self, logits: np.ndarray, labels: np.ndarray, images: np.ndarray
    ) -> Iterator[tuple[int, Column]]:
        """Yield each class with its column, of logits and labels [N, K] and images bool [N]."""
        for first in range(0, logits.shape[1], BLOCK):
            block = np.s_[:, first : first + BLOCK]
            scores = np.ascontiguousarray(logits[block].T, np.float64)
            targets = np.ascontiguousarray(labels[block].T)
            for index, (own, target) in enumerate(zip(scores, targets, strict=True), first):
                chosen = images & (target >= 0)
                calibrated = self.slopes[index] * own[chosen] + self.offsets[index]
                yield index, (calibrated, target[chosen] == 1)


def unscaled(num_classes: int) -> Fit:
    """Return the decisions without a fit: the scores of the model and a threshold of `FIXED`."""
    ones, no = np.ones(num_classes), np.zeros(num_classes, bool)
    return Fit(ones, 0 * ones, FIXED * ones, no, np.nan * ones)


def every_nth(logits: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Return the indices of images that a number for all classes is fitted to."""
    rows = np.flatnonzero(images)
    return rows[:: 1 + len(rows) * logits.shape[1] // MOST_SCORES]


def temperature(logits: np.ndarray, labels: np.ndarray, images: np.ndarray) -> float | None:
    """Fit the temperature T that minimises the log loss of the softmax of logits / T.

    It is for images of one label (Guo et al. 2017, arXiv 1706.04599, section 4.2). The loss is
    convex in 1 / T, so that its derivative has one zero. None if that is outside `TEMPERATURES`.
    """
    rows = every_nth(logits, images)
    logits, labels = logits[rows].astype(np.float64), labels[rows]
    has_label = (labels == 1).any(1)
    logits, present = logits[has_label], labels[has_label] == 1
    targets = present / present.sum(1, keepdims=True)

    def derivative(log_temperature: float) -> float:
        scores = softmax(logits * np.exp(-log_temperature), axis=1)
        return float(np.sum((scores - targets) * logits))

    lowest, highest = np.log(TEMPERATURES)
    if not derivative(lowest) > 0 > derivative(highest):
        return None
    return float(np.exp(brentq(derivative, lowest, highest)))


def scaled(logits: np.ndarray, labels: np.ndarray, images: np.ndarray, choice: Choice) -> Fit:
    """Fit the calibrated scores, and leave the thresholds as they are."""
    fitted, rows = unscaled(logits.shape[1]), every_nth(logits, images)
    if choice.shared:
        annotated = labels[rows] >= 0
        slope, offset = platt(logits[rows][annotated], labels[rows][annotated] == 1)
        fitted.slopes[:], fitted.offsets[:] = slope, offset
        return fitted

    common = common_slope(logits[rows].astype(np.float64), labels[rows])
    # Until it is fitted, the slope of a class is 1.
    for index, column in fitted.columns(logits, labels, images):
        fitted.slopes[index], fitted.offsets[index] = platt(*column, common)
    return fitted


def fit(logits: np.ndarray, labels: np.ndarray, images: np.ndarray, choice: Choice) -> Fit:
    """Fit scores and thresholds to some images, bool [N]; logits and labels are [N, K]."""
    positives = (labels[images] == 1).sum(0)
    if not positives.sum():
        raise DataError(
            "no label is positive among the images that thresholds are fitted on: use more of them"
        )

    # Thresholds are of calibrated scores, which come first.
    fitted = scaled(logits, labels, images, choice)

    def store(threshold: Threshold, index: int | np.ndarray) -> None:
        fitted.thresholds[index] = threshold.value
        fitted.best_precision[index] = np.nan if threshold.is_reached else threshold.precision

    is_shared = (positives < choice.min_positives) | (choice.scope == "global")
    for index, column in fitted.columns(logits, labels, images):
        if not is_shared[index]:
            store(fit_threshold(choice.objective, partial(iter, [column])), index)

    if is_shared.any():
        # Those of all classes decide, if even together these have too few positives.
        too_few = positives[is_shared].sum() < choice.min_positives

        def columns() -> Iterator[Column]:
            for index, column in fitted.columns(logits, labels, images):
                if too_few or is_shared[index]:
                    yield column

        store(fit_threshold(choice.objective, columns), is_shared)

    return replace(fitted, shares=is_shared & (choice.scope == "class"))


class Tally:
    """What the decisions of fits to K classes come to, added up over images."""

    def __init__(self, num_classes: int) -> None:
        self.counts = Counts(num_classes)
        self.pairs = 0  # of an annotated image and a class

        # Sum of the calibrated scores, and number of positives, in each bin of the scores.
        self.scores, self.positives = np.zeros((2, BINS))

    def add(self, fitted: Fit, logits: np.ndarray, labels: np.ndarray, images: np.ndarray) -> None:
        """Decide some images, bool [N], and count the decisions; logits and labels are [N, K]."""
        lowest = logit(fitted.thresholds)
        for index, (calibrated, present) in fitted.columns(logits, labels, images):
            predicted = calibrated >= lowest[index]
            self.counts.hits[index] += int((present & predicted).sum())
            self.counts.predicted[index] += int(predicted.sum())
            self.counts.positives[index] += int(present.sum())

            probabilities = expit(calibrated)
            bins = np.minimum((probabilities * BINS).astype(int), BINS - 1)
            self.scores += np.bincount(bins, weights=probabilities, minlength=BINS)
            self.positives += np.bincount(bins, weights=present, minlength=BINS)
            self.pairs += len(present)

    def summary(self) -> dict[str, float]:
        """Return precision, recall, F1 and the calibration error in percent.

        The error is the mean over all pairs of |share of positives - mean score| of their bin.
        """
        error = 100 * np.abs(self.positives - self.scores).sum() / self.pairs
        return {**self.counts.summary(), "ECE": float(error)}


def cross_fitted(
    logits: np.ndarray, labels: np.ndarray, folds: np.ndarray, choice: Choice
) -> Tally:
    """Decide each image by a fit to the images of the other folds; folds are numbers [N]."""
    tally = Tally(logits.shape[1])
    for fold in np.unique(folds):
        tally.add(fit(logits, labels, folds != fold, choice), logits, labels, folds == fold)
    return tally


@dataclass(frozen=True)
class Outcome:
    """What a fit comes to, for each of three ways to judge it."""

    cross_fitted: dict[str, float]  # percentages by name, of images outside the fit
    fitted: dict[str, float]  # of those that it was fitted to
    uncalibrated: dict[str, float]  # of the model's own scores, with a threshold of `FIXED`
    per_class: dict[str, list[Any]]  # columns of K values; none if an image has one label
    slopes: list[float]  # of the calibrated logits, K or one for all classes
    offsets: list[float]  # as many
    thresholds: list[float]  # K, one for all classes, or none


def with_several(
    scores: Scores, folds: np.ndarray, choice: Choice, names: tuple[str, ...]
) -> Outcome:
    """Calibrate a model of several labels per image, and say what it could not do."""
    logits, labels = scores.logits, scores.labels
    every = np.ones(len(logits), bool)
    fitted = fit(logits, labels, every, choice)
    warn(fitted, choice, names)

    own, fixed = Tally(len(names)), Tally(len(names))
    own.add(fitted, logits, labels, every)
    fixed.add(unscaled(len(names)), logits, labels, every)
    outside = cross_fitted(logits, labels, folds, choice)

    per_class = {"threshold": fitted.thresholds.tolist()}
    for prefix, tally in (("", outside), ("fitted_", own), (f"at_{FIXED}_", fixed)):
        for name, column in tally.counts.per_class().items():
            per_class[prefix + name] = (100 * column).tolist()
    per_class["positives"] = own.counts.positives.tolist()
    per_class["shares_threshold"] = fitted.shares.tolist()
    per_class["objective_reached"] = np.isnan(fitted.best_precision).tolist()

    # One number stands for all classes.
    scales = 1 if choice.shared else len(names)
    slopes = fitted.slopes[:scales].tolist()
    offsets = fitted.offsets[:scales].tolist()
    thresholds = fitted.thresholds[: 1 if choice.scope == "global" else None].tolist()
    judged = outside.summary(), own.summary(), fixed.summary()
    return Outcome(*judged, per_class, slopes, offsets, thresholds)


def warn(fitted: Fit, choice: Choice, names: tuple[str, ...]) -> None:
    """Name the classes that share a threshold, and those that miss the objective."""
    sharing = [names[index] for index in np.flatnonzero(fitted.shares)]
    if sharing:
        log.warning(
            f"{len(sharing)} classes share a threshold, as they have fewer than "
            f"{choice.min_positives} positives: {format_list(sharing)}"
        )

    unreached = [
        f"{names[index]} ({100 * fitted.best_precision[index]:.1f} %)"
        for index in np.flatnonzero(~np.isnan(fitted.best_precision))
    ]
    if unreached:
        log.warning(
            f"no threshold reaches {choice.objective.text} for {len(unreached)} classes, which "
            f"have the one of the highest precision: {format_list(unreached)}"
        )


def with_one_label(scores: Scores, folds: np.ndarray) -> Outcome:
    """Fit the temperature of a model of one label per image."""
    logits, labels = scores.logits, scores.labels

    def fitted_to(images: np.ndarray) -> float:
        return temperature(logits, labels, images) or 1.0

    def metrics(divisors: np.ndarray) -> dict[str, float]:
        evaluator = SingleLabelEvaluator(logits.shape[1])
        evaluator.update(torch.from_numpy(logits / divisors[:, None]), torch.from_numpy(labels))
        values = evaluator.compute()
        return {name: values[name] for name in ("top1", "ECE")}

    ones = np.ones(len(logits))
    fitted, outside = fitted_to(ones > 0), np.ones(len(logits))
    for fold in np.unique(folds):
        outside[folds == fold] = fitted_to(folds != fold)
    judged = metrics(outside), metrics(fitted * ones), metrics(ones)
    return Outcome(*judged, {}, [1 / fitted], [0.0], [])


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec calibrate`."""
    arguments = command("calibrate", str(__doc__))
    add_model_options(arguments)
    add_data_options(arguments)
    arguments.add_argument(
        "--objective", default="f1", help="f1 (default), precision:P, recall:R or cost:FP,FN"
    )
    arguments.add_argument(
        "--scope", choices=("class", "global"), default="class", help="of a threshold (class)"
    )
    arguments.add_argument(
        "--min-positives",
        type=positive,
        default=MIN_POSITIVES,
        metavar="N",
        help=f"classes with fewer share a threshold; default: {MIN_POSITIVES}",
    )
    arguments.add_argument(
        "--folds",
        type=partial(whole, smallest=2),
        default=FOLDS,
        metavar="N",
        help=f"of the images, to judge the thresholds; default: {FOLDS}",
    )
    arguments.add_argument(
        "--out",
        metavar="FILE",
        help="the calibrated copy; default: checkpoints/calibrated.pt in the folder of a run",
    )
    arguments.add_argument("--json", metavar="FILE", help="write all numbers and values per class")
    arguments.add_argument("--csv", metavar="FILE", help="write one row per class")
    return arguments


def calibrate(args: argparse.Namespace) -> None:
    """Score, fit, store the copy, print, and write the files."""
    objective = parse_objective(args.objective)
    check_targets(json=args.json, csv=args.csv, pt=args.out)
    args.settings += precision_setting(args)
    path = Path(args.checkpoint)
    if path.is_dir():
        # An earlier calibrated.pt of the run does not stand for it here.
        path = local(path)
        args.checkpoint = str(path)
    # If a run replaces the file meanwhile, the copy counts as made from the old one.
    source = torch_files.recorded_hash(path) if path.is_file() else None

    loaded = load_model(**chosen_model(args))
    out = target(args.out, loaded.path)
    check_targets(pt=out)
    if args.thresholds is not None:
        if args.json or args.csv:
            raise ConfigError("--thresholds fits nothing: leave --json and --csv out")
        given = loaded.calibration
        assert given is not None
        state = replace(to_store(loaded), calibration=replace(given, source=source)).to_state()
        torch_files.save(Path(out), state, of_run=False)
        say(f"{out}: a copy of {args.checkpoint} with the thresholds of {args.thresholds}")
        return

    setup = open_for_evaluation(loaded, EvalOptions.of(vars(args)), calibrated=False)
    loaded, data = setup.loaded, setup.data
    checkpoint = to_store(loaded)
    size, stored = data.transform.image_size, checkpoint.transform.image_size
    if size != stored:
        raise ConfigError(
            f"data.image_size {size}: {loaded.path} is for {stored} pixels, and its thresholds "
            f"would not hold there; pass data.image_size={stored}"
        )
    zero_shot = loaded.classes.word_vectors is not None
    # It scores any classes, and has one threshold for all of them.
    scope = "global" if zero_shot else args.scope
    choice = Choice(objective, scope, args.min_positives, shared=zero_shot)

    scores = setup.scores()
    constant = setup.constant_classes(scores)
    for line in same_scores(constant):
        log.warning(line)

    # What identifies the images, wherever they are stored.
    dataset, keys = data.val.dataset, scores.indices
    if isinstance(dataset, StoredImages):
        keys = dataset.storage.keys[keys]
    folds = fold_numbers(keys, args.folds, SEED)

    exclusive, names = loaded.classes.exclusive, data.val.classes.names
    if exclusive:
        outcome = with_one_label(scores, folds)
    else:
        outcome = with_several(scores, folds, choice, names)

    values = outcome.thresholds, outcome.slopes, outcome.offsets
    thresholds, slopes, offsets = (in_order(v, names, loaded.classes.names) for v in values)
    calibration = Calibration(
        weights=loaded.weights,
        objective=None if exclusive else objective.text,
        scope=None if exclusive else choice.scope,
        thresholds=thresholds,
        slopes=slopes,
        offsets=offsets,
        images=len(scores.indices),
        data=to_dict(setup.config)["data"],
        fingerprint=fingerprint(data.val),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        error=outcome.cross_fitted["ECE"],
        constant=constant,
        source=source,
    )
    state = replace(checkpoint, calibration=calibration).to_state()
    torch_files.save(Path(out), state, of_run=False)
    print_results(outcome, calibration, scores, names, args, out)


def target(out: str | None, path: Path) -> str:
    """Return the path of the calibrated copy : `out`, or calibrated.pt of the run."""
    if out is None:
        if not is_best_of_run(path):
            raise ConfigError(
                f"--out: {path} is not the best checkpoint in the folder of a run; pass --out FILE"
            )
        return str(path.with_name(CALIBRATED))

    if os.path.realpath(out) == os.path.realpath(path):
        raise ConfigError(f"--out: {out} is the checkpoint itself; pass another name")
    return out


def print_results(
    outcome: Outcome,
    calibration: Calibration,
    scores: Scores,
    names: tuple[str, ...],
    args: argparse.Namespace,
    out: str,
) -> None:
    """Print the results, and write the files that the command line names."""
    results = Results(
        outcome.cross_fitted, outcome.per_class, calibration.images, scores.bad, confusions=None
    )
    for line in left_out(scores.bad, calibration.images):
        log.warning(line)
    say(
        f"{args.checkpoint} ({calibration.weights} weights) on {calibration.images:,} images: "
        f"{', '.join(what_was_fitted(calibration))}",
        *table(outcome, "uncalibrated" if calibration.scope is None else f"at {FIXED}"),
        f"cross-fitted: out-of-fold, {args.folds} folds; same images: in-sample (optimistic)",
        f"{out}: a calibrated copy of {args.checkpoint}",
    )

    if args.json:
        content = report(results, calibration.weights, args.checkpoint, names) | {
            "fitted": outcome.fitted,
            "uncalibrated": outcome.uncalibrated,
            "out": out,
            "objective": calibration.objective,
            "scope": calibration.scope,
            "folds": args.folds,
            "temperature": None if calibration.scope else 1 / calibration.slopes[0],
        }
        write_json(args.json, content)
    if args.csv:
        write_result(args.csv, to_csv(results, names))


def what_was_fitted(calibration: Calibration) -> list[str]:
    """Return a phrase about the scores, after one about the thresholds if there are any."""
    per_class = " per class" if len(calibration.slopes) > 1 else ""
    scaling = f"Platt scaling{per_class}"
    if calibration.scope == "class":
        return [f"a threshold per class for {calibration.objective}", scaling]
    if calibration.scope == "global":
        threshold = calibration.thresholds[0]
        return [f"threshold {threshold:.3f} for {calibration.objective}", scaling]
    if calibration.slopes == (1.0,):
        lowest, highest = TEMPERATURES
        return [f"no temperature: the best one is not from {lowest:g} to {highest:g}"]
    return [f"temperature {1 / calibration.slopes[0]:.3f}"]


def table(outcome: Outcome, uncalibrated: str) -> Iterator[str]:
    """Yield the lines of a table with a column for each of the three ways to judge a fit."""
    columns = [outcome.cross_fitted, outcome.fitted, outcome.uncalibrated]
    headings = ["cross-fitted", "same images", uncalibrated]
    yield "  percent   " + "".join(f"{heading:>14}" for heading in headings)
    for name in outcome.fitted:
        yield f"  {name:10}" + "".join(f"{column[name]:14.3f}" for column in columns)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_intermixed_args, calibrate)


if __name__ == "__main__":
    main()
