"""Calibrate a checkpoint: the work of the command `mldec.calibrate`."""

import argparse
import logging
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mldec import build
from mldec.calibration import MIN_POSITIVES
from mldec.calibration.fitting import (
    TEMPERATURES,
    Choice,
    Fit,
    Tally,
    cross_fitted,
    fit,
    fit_temperature,
    parse_objective,
    unscaled,
)
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
from mldec.cli import chosen_model, precision_setting
from mldec.config.compose import to_dict
from mldec.data.base import DataModule, StoredImages
from mldec.data.fingerprint import fingerprint
from mldec.data.folds import fold_numbers
from mldec.errors import CheckpointError, ConfigError, DataError, say
from mldec.evaluation import Results, Scores, all_scores, left_out
from mldec.evaluation.command import (
    check_class_names,
    fit_to_device,
    report,
    to_csv,
)
from mldec.evaluation.opening import asked_for, chosen_data, is_relative
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files import torch_files
from mldec.files.results import STANDARD_OUTPUT, check_targets, to_json, write_result
from mldec.files.torch_files import SUFFIX
from mldec.runtime import distributed

log = logging.getLogger("mldec")

SEED = 1  # of the folds; 0 is that of data.fold, whose images may be the ones to divide here
FIXED = 0.5  # the threshold that the fitted ones are compared with
NAMED = 10  # classes in a message; all of them are in --json
LOWEST, HIGHEST = TEMPERATURES


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
        fitted.append(f"no temperature: the best one is not from {LOWEST:g} to {HIGHEST:g}")
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
