"""Fit thresholds: `mldec calibrate outputs/NAME [data.root=...] [--objective f1]`.

Fits a slope and an offset of the logits and a threshold for each class to the validation images.
They are stored in a copy of the checkpoint: checkpoints/calibrated.pt in the folder of the run.
--thresholds FILE stores the thresholds of a file instead. See docs/evaluating.md.
"""

import argparse
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mldec import cli
from mldec.checkpoint import Loaded
from mldec.checkpoint.loading import to_store
from mldec.checkpoint.sources import local
from mldec.checkpoint.state import Calibration, Checkpoint, in_order
from mldec.config.compose import to_dict
from mldec.data.fingerprint import fingerprint
from mldec.data.splits import fold_numbers
from mldec.data.types import StoredImages
from mldec.errors import ConfigError, log, say
from mldec.evaluation.open import load_checkpoint, open_for_evaluation
from mldec.evaluation.options import EvalOptions, option, positive, whole
from mldec.evaluation.output import Results, left_out, report, same_scores, to_csv
from mldec.evaluation.run import Scores
from mldec.evaluators.calibration import (
    FIXED,
    MIN_POSITIVES,
    TEMPERATURES,
    Choice,
    Fit,
    Objective,
    Summarize,
    Tally,
    cross_fitted,
    fit,
    temperature,
    uncalibrated,
)
from mldec.evaluators.multi_label import Counts
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files import torch_files
from mldec.files.atomic import check_targets, write_json, write_result
from mldec.files.run_folder import CALIBRATED, is_best_of_run
from mldec.names import format_list

FOLDS = 5
SEED = 1  # of the folds; data.fold uses 0

# Possible numbers of arguments.
OBJECTIVES = {"f1": [0], "precision": [1], "recall": [1], "cost": [2], "per_image": [0, 1]}


def parse_objective(text: str) -> Objective:
    """Parse f1, precision:P, recall:R, cost:FP,FN, per_image or per_image:N."""
    kind, _, numbers = text.partition(":")
    with suppress(ValueError):
        values = tuple(float(number) for number in numbers.split(",") if number)
        highest = 1 if kind in ("precision", "recall") else np.finfo(float).max
        is_known = len(values) in OBJECTIVES.get(kind, [])
        if is_known and all(0 < value <= highest for value in values):
            return Objective(text, kind, values)

    raise ConfigError(
        f"--objective {text}: unknown objective; pass f1, precision:P or recall:R (above 0, at "
        f"most 1), cost:FP,FN (above 0), or per_image or per_image:N (above 0)"
    )


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(EvalOptions):
    """The options of the command."""

    objective: str = option(
        "f1 (default), precision:P, recall:R, cost:FP,FN, per_image or per_image:N", default="f1"
    )
    scope: str = option(
        "scope of a threshold; default: class", default="class", choices=("class", "global")
    )
    min_positives: int = option(
        f"classes with fewer positives share a threshold; default: {MIN_POSITIVES}",
        positive,
        MIN_POSITIVES,
        metavar="N",
    )
    folds: int = option(
        f"folds of the images for out-of-fold metrics; default: {FOLDS}",
        partial(whole, smallest=2),
        FOLDS,
        metavar="N",
    )
    out: str | None = option(
        "calibrated copy; default: checkpoints/calibrated.pt in the folder of the run",
        metavar="FILE",
    )
    json: str | None = option("write all metrics and values per class", metavar="FILE")
    csv: str | None = option("write one row per class", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A fit, and the metrics of three kinds of decisions in percent."""

    cross_fitted: dict[str, float]  # out-of-fold
    fitted: dict[str, float]  # in-sample
    uncalibrated: dict[str, float]  # scores of the model, with the threshold `FIXED`
    slopes: list[float]  # K or one for all classes
    offsets: list[float]  # K or one for all classes

    # Single-label data has the defaults.
    thresholds: list[float] = field(default_factory=list)  # K or one for all classes
    per_class: dict[str, list[Any]] = field(default_factory=dict)  # K values per column


def calibrate_multi_label(
    scores: Scores,
    folds: np.ndarray,
    choice: Choice,
    names: tuple[str, ...],
    summarize: Summarize = Counts.summary,
) -> Outcome:
    """Fit scores and thresholds of multi-label data. `summarize` comes from the evaluator."""
    logits = scores.logits
    labels = scores.labels
    every = np.ones(len(logits), bool)
    fitted = fit(logits, labels, every, choice)
    warn_about_classes(fitted, choice, names)

    in_sample = Tally(len(names))
    in_sample.add(fitted, logits, labels, every)
    fixed = Tally(len(names))
    fixed.add(uncalibrated(len(names)), logits, labels, every)
    out_of_fold = cross_fitted(logits, labels, folds, choice)

    per_class = {"threshold": fitted.thresholds.tolist()}
    for prefix, tally in (("", out_of_fold), ("fitted_", in_sample), (f"at_{FIXED}_", fixed)):
        for name, column in tally.counts.per_class().items():
            per_class[prefix + name] = (100 * column).tolist()
    per_class["positives"] = in_sample.counts.positives.tolist()
    per_class["shares_threshold"] = fitted.is_shared.tolist()
    per_class["objective_reached"] = np.isnan(fitted.best_precision).tolist()

    # Equal values of all classes are stored once.
    num_slopes = 1 if choice.single_slope else len(names)
    num_thresholds = 1 if choice.scope == "global" else len(names)
    return Outcome(
        cross_fitted=out_of_fold.summary(summarize),
        fitted=in_sample.summary(summarize),
        uncalibrated=fixed.summary(summarize),
        per_class=per_class,
        slopes=fitted.slopes[:num_slopes].tolist(),
        offsets=fitted.offsets[:num_slopes].tolist(),
        thresholds=fitted.thresholds[:num_thresholds].tolist(),
    )


def warn_about_classes(fitted: Fit, choice: Choice, names: tuple[str, ...]) -> None:
    """Log the classes that share a threshold, and the classes that miss the objective."""
    sharing = list(compress(names, fitted.is_shared))
    if sharing:
        reason = f"fewer than {choice.min_positives} positives"
        log.warning(f"{len(sharing)} classes share a threshold ({reason}): {format_list(sharing)}")

    missed = list(compress(names, ~np.isnan(fitted.best_precision)))
    if missed:
        reason = f"{choice.objective.text} is not reached, the highest precision is used"
        log.warning(f"{len(missed)} classes: {reason}: {format_list(missed)}")


def calibrate_single_label(scores: Scores, folds: np.ndarray) -> Outcome:
    """Fit the temperature of single-label data."""
    logits = scores.logits
    labels = scores.labels

    def metrics(divisors: np.ndarray) -> dict[str, float]:
        evaluator = SingleLabelEvaluator(logits.shape[1])
        evaluator.update(torch.from_numpy(logits / divisors[:, None]), torch.from_numpy(labels))
        values = evaluator.compute()
        return {"top1": values["top1"], "ECE": values["ECE"]}

    ones = np.ones(len(logits))
    fitted = temperature(logits, labels, ones > 0)
    if fitted is None:
        log.warning(f"no temperature from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g} is optimal")
        fitted = 1.0
    out_of_fold = np.ones(len(logits))
    for fold in np.unique(folds):
        out_of_fold[folds == fold] = temperature(logits, labels, folds != fold) or 1.0

    return Outcome(
        cross_fitted=metrics(out_of_fold),
        fitted=metrics(fitted * ones),
        uncalibrated=metrics(ones),
        slopes=[1 / fitted],
        offsets=[0.0],
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec calibrate`."""
    arguments = cli.command("calibrate", str(__doc__))
    cli.add_model_options(arguments)
    cli.add_settings(arguments)
    names = ("precision", "objective", "scope", "min_positives", "folds", "out", "json", "csv")
    cli.add_options(arguments, CalibrateOptions, *names)
    return arguments


def calibrate(options: CalibrateOptions) -> dict[str, Any] | None:
    """Store a calibrated copy; return the content of --json, or None with --thresholds."""
    objective = parse_objective(options.objective)
    check_targets(json=options.json, csv=options.csv, pt=options.out)
    path = Path(options.checkpoint)
    if path.is_dir():
        # Calibrate best.pt of a run, not an earlier calibrated.pt.
        path = local(path)
        options = replace(options, checkpoint=str(path))
    # Hash the file before it is read, because a run may replace it meanwhile.
    source = torch_files.recorded_hash(path) if path.is_file() else None
    loaded = load_checkpoint(options)
    out = target(options.out, loaded.path)
    check_targets(pt=out)

    if options.thresholds is None:
        return calibrate_on_images(loaded, objective, source, options, out)

    if options.json or options.csv:
        raise ConfigError("--thresholds: not supported with --json and --csv; omit them")
    assert loaded.calibration is not None
    save(out, to_store(loaded), replace(loaded.calibration, source=source))
    say(f"{out}: a copy of {options.checkpoint} with the thresholds of {options.thresholds}")
    return None


def calibrate_on_images(
    loaded: Loaded, objective: Objective, source: str | None, options: CalibrateOptions, out: str
) -> dict[str, Any]:
    """Score the validation images, fit, store the copy and print the metrics."""
    setup = open_for_evaluation(loaded, options, calibrated=False)
    loaded = setup.loaded
    checkpoint = to_store(loaded)
    size = setup.data.transform.image_size
    stored_size = checkpoint.transform.image_size
    if size != stored_size:
        raise ConfigError(
            f"data.image_size: thresholds depend on the image size, {size} here and {stored_size} "
            f"in {loaded.path}; pass data.image_size={stored_size}"
        )
    scores = setup.scores()
    constant = setup.constant_classes(scores)
    for line in same_scores(constant, loaded.weights, loaded.config.loss):
        log.warning(line)

    # Zero-shot models score any classes, so they have one threshold for all classes.
    zero_shot = loaded.classes.word_vectors is not None
    scope = "global" if zero_shot else options.scope
    choice = Choice(objective, scope, options.min_positives, single_slope=zero_shot)
    # The folds do not depend on the storage of the images.
    dataset = setup.data.val.dataset
    keys = scores.indices
    if isinstance(dataset, StoredImages):
        keys = dataset.storage.keys[keys]
    folds = fold_numbers(keys, options.folds, SEED)

    names = setup.data.val.classes.names
    if loaded.classes.exclusive:
        outcome = calibrate_single_label(scores, folds)
    else:
        # The same classes are valid in `mldec evaluate`.
        summarize = getattr(setup.evaluator(), "summary", Counts.summary)
        outcome = calibrate_multi_label(scores, folds, choice, names, summarize)

    own = loaded.classes.names
    calibration = Calibration(
        weights=loaded.weights,
        objective=None if loaded.classes.exclusive else objective.text,
        scope=None if loaded.classes.exclusive else scope,
        thresholds=in_order(outcome.thresholds, names, own),
        slopes=in_order(outcome.slopes, names, own),
        offsets=in_order(outcome.offsets, names, own),
        images=len(scores.indices),
        data=to_dict(setup.config)["data"],
        fingerprint=fingerprint(setup.data.val),
        error=outcome.cross_fitted["ECE"],
        metrics=outcome.cross_fitted,
        constant=constant,
        source=source,
    )
    save(out, checkpoint, calibration)
    return print_results(outcome, calibration, scores, names, options, out)


def save(out: str, checkpoint: Checkpoint, calibration: Calibration) -> None:
    """Save a checkpoint with a calibration."""
    state = replace(checkpoint, calibration=calibration).to_state()
    torch_files.save(Path(out), state, of_run=False)


def target(out: str | None, path: Path) -> str:
    """Return the path of the calibrated copy: `out`, or calibrated.pt next to best.pt at `path`."""
    if out is None:
        if not is_best_of_run(path):
            raise ConfigError(f"--out: {path} is not the best.pt of a run; pass --out FILE")
        return str(path.with_name(CALIBRATED))
    if os.path.realpath(out) == os.path.realpath(path):
        raise ConfigError(f"--out: {out} is the checkpoint itself; pass another name")
    return out


def print_results(
    outcome: Outcome,
    calibration: Calibration,
    scores: Scores,
    names: tuple[str, ...],
    options: CalibrateOptions,
    out: str,
) -> dict[str, Any]:
    """Print the metrics, write --json and --csv, and return the content of --json."""
    for line in left_out(scores.bad, calibration.images):
        log.warning(line)
    fixed = f"at {FIXED}"
    values = f"thresholds for {calibration.objective}, scope {calibration.scope}"
    if calibration.scope is None:
        fixed = "uncalibrated"
        values = f"temperature {1 / calibration.slopes[0]:.3f}"
    say(
        f"{options.checkpoint}, {calibration.weights} weights, {calibration.images:,} images",
        values,
        f"  {'percent':10}{'cross-fitted':>14}{'same images':>14}{fixed:>14}",
    )
    for name, value in outcome.cross_fitted.items():
        others = f"{outcome.fitted[name]:14.3f}{outcome.uncalibrated[name]:14.3f}"
        say(f"  {name:10}{value:14.3f}{others}")
    say(
        f"cross-fitted: out-of-fold, {options.folds} folds; same images: in-sample (optimistic)",
        f"{out}: a calibrated copy of {options.checkpoint}",
    )

    results = Results(
        outcome.cross_fitted, outcome.per_class, calibration.images, scores.bad, confusions=None
    )
    content = report(results, calibration.weights, options.checkpoint, names) | {
        "fitted": outcome.fitted,
        "uncalibrated": outcome.uncalibrated,
        "out": out,
        "objective": calibration.objective,
        "scope": calibration.scope,
        "folds": options.folds,
        "temperature": None if calibration.scope else 1 / calibration.slopes[0],
    }
    if options.json:
        write_json(options.json, content)
    if options.csv:
        write_result(options.csv, to_csv(results, names))
    return content


def main() -> None:
    """Run the command."""
    cli.run_command(parser().parse_intermixed_args, calibrate, CalibrateOptions)
