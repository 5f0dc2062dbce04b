"""Write the report of a checkpoint: open it and its data, score, and gather what the page says."""

import argparse
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import mldec
from mldec.checkpoint import load_model
from mldec.checkpoint.classes import can_make
from mldec.cli import chosen_model, precision_setting
from mldec.config.compose import to_yaml
from mldec.errors import ConfigError, DataError, say
from mldec.evaluation.open import (
    EvaluationSetup,
    chosen_thresholds,
    open_for_evaluation,
    scorer,
    thresholds_origin,
    with_same_classes,
)
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.output import Results, same_scores
from mldec.evaluation.output import report as report_dict
from mldec.evaluation.run import Scores
from mldec.files.atomic import check_targets, write_json, write_result
from mldec.tools.report import comparison, examples, statistics
from mldec.tools.report.advice import Step, next_steps
from mldec.tools.report.page import Content, page
from mldec.tools.report.statistics import Answers, Numbers
from mldec.tools.report.training import of_run, run_folder

log = logging.getLogger("mldec")


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec report`: score, compute, and write the page."""
    started = time.monotonic()
    check_targets(html=args.out, json=args.json)

    # The other model too is refused before the first image is scored.
    setup = prepare(args)
    other = prepare_other(args, setup) if args.compare else None
    content = gather(setup, other)

    write_result(args.out, page(content))
    if args.json:
        views = {"views": args.views} if args.views else {}
        write_json(args.json, to_dict(content, setup.path, setup.loaded.weights) | views)
    size, seconds = Path(args.out).stat().st_size / 1e6, time.monotonic() - started
    say(f"{args.out}: a report on {args.checkpoint}, {size:.1f} MB, made in {seconds:.0f} s")


def prepare(args: argparse.Namespace) -> EvaluationSetup:
    """Load the checkpoint of a command line, and the data that it is asked about."""
    args.settings += precision_setting(args)
    setup = open_for_evaluation(load_model(**chosen_model(args)), EvalOptions.of(vars(args)))

    # Images that cannot be read are part of the report.
    return replace(setup, data=replace(setup.data, bad_images="skip"))


def prepare_other(args: argparse.Namespace, setup: EvaluationSetup) -> EvaluationSetup:
    """Load the checkpoint to compare with; it sees the images of the first one in its own way."""
    path = args.compare
    its_args = argparse.Namespace(**{**vars(args), "checkpoint": path})
    loaded = load_model(**chosen_model(its_args))
    split = setup.data.val.viewed(loaded.transform)
    if can_make(loaded.classes):
        # It is asked by word vectors of its own, whatever those of the first one are.
        split = replace(split, classes=replace(split.classes, word_vectors=None, origin=None))
    data = replace(setup.data, load_val=lambda: split)
    loaded, data = with_same_classes(loaded, data, path)
    network = scorer(loaded, data, path)
    thresholds = chosen_thresholds(data, loaded, EvalOptions.of(vars(its_args)))
    return replace(
        setup, path=path, loaded=loaded, data=data, network=network, thresholds=thresholds
    )


def threshold_notes(setup: EvaluationSetup) -> list[str]:
    """Return where the thresholds come from; see `chosen_thresholds`."""
    loaded, classes, thresholds = setup.loaded, setup.data.val.classes, setup.thresholds
    if classes.exclusive:
        return [
            "A class is predicted if its score is the highest; precision, recall and F1 are of "
            "these predictions, average precision is of the scores.",
            "Suspected labels are looked for only if images have several labels.",
        ]
    if thresholds is None:
        return [
            "The threshold is that of the data's settings (data.threshold); mldec calibrate fits "
            "one per class."
        ]

    calibration, names = loaded.calibration, (loaded.classes.names, classes.names)
    if calibration is None or thresholds != calibration.thresholds_of(*names):
        return [f"The threshold is {thresholds[0]:g}, as the command line says."]
    origin = thresholds_origin(calibration, setup.data)
    return [f"Precision, recall and F1 are at the thresholds of the checkpoint {origin}."]


def gather(setup: EvaluationSetup, other: EvaluationSetup | None) -> Content:
    """Score the images, with another checkpoint too, and compute what a report says."""
    scores = setup.scores()
    # Scores that are calibrated no longer show it.
    calibration = setup.loaded.calibration
    is_fitted = calibration is not None and calibration.images > 0
    constant = calibration.constant if calibration and is_fitted else setup.constant_classes(scores)
    classes = setup.data.val.classes
    weights = statistics.draw(len(scores.labels), len(classes))
    answers, numbers = examine(setup, scores, weights)

    edges = statistics.bin_edges(len(classes), answers.thresholds())
    histograms = statistics.histograms(answers, edges)
    table = statistics.class_table(classes.names, answers, histograms, numbers)
    shown = examples.classes_with_images(numbers.precision)
    chosen = examples.surest_examples(answers, shown)
    suspects = [] if answers.exclusive else examples.suspected_labels(answers, shown)
    pairs = statistics.pairs_of_classes(answers)

    indices, labels, unreadable = scores.indices, scores.labels, scores.bad
    compared = None
    if other is not None:
        theirs = examine_other(other, indices, weights)
        compared = comparison.compare(other.path, answers, numbers, *theirs)
        del theirs
    del scores, answers

    # What finds no room in the file is left out.
    changed = [] if compared is None else compared.changed
    items: list[Any] = [*changed, *suspects, *chosen]
    pictures = examples.album(setup.data.val, indices, labels, [item.row for item in items])
    suspects = [suspect for suspect in suspects if suspect.row in pictures]
    pictured = [example for example in chosen if example.row in pictures]
    if compared is not None:
        compared = replace(compared, changed=[one for one in changed if one.row in pictures])

    notes = notes_on(setup, statistics.count(weights), len(shown))
    if left_out := len(chosen) - len(pictured):
        notes.append(f"{left_out:,} more images are left out, to keep the file small.")

    log.info(f"{setup.path}: {len(pictured):,} heat maps")
    heat_method = None
    asked = indices, setup.loaded, setup.data, setup.device
    try:
        pictured, heat_method = examples.with_heat(pictured, *asked)
    except ConfigError as error:
        notes.append(f"There are no heat maps: {error}.")

    run_summary, curves, run_notes = of_run(run_folder(setup.loaded))
    metrics = numbers.with_intervals()
    steps = [Step(f"Train anew: {line}.") for line in same_scores(constant)]
    steps += next_steps(
        table,
        histograms,
        next(iter(metrics.values())),
        checkpoint=setup.path,
        image_size=setup.data.transform.image_size,
        calibrated=is_fitted,
        suspects=len(suspects),
        unreadable=len(unreadable),
    )
    root = setup.config.data.get("root")
    return Content(
        title=f"{names_of(setup, other)}: {len(classes):,} classes, {len(labels):,} images",
        summary=summary(setup, other, labels, len(unreadable)) | run_summary,
        settings=to_yaml(setup.config),
        images=len(labels),
        curves=curves,
        metrics=metrics,
        table=table,
        histograms=histograms,
        exclusive=classes.exclusive,
        pairs=pairs,
        heat_method=heat_method,
        pictures=pictures,
        examples=pictured,
        suspects=suspects,
        unreadable=unreadable,
        root=None if root is None else Path(root).expanduser().absolute(),
        comparison=compared,
        steps=steps,
        notes=notes + run_notes,
    )


def examine(setup: EvaluationSetup, scores: Scores, weights: np.ndarray) -> tuple[Answers, Numbers]:
    """Compute the numbers of a model and their resamples, which have these weights."""
    # It holds on to the scores, and is dropped with the end of this function.
    evaluator = setup.evaluator()
    values = statistics.metrics(evaluator, scores.logits, scores.labels)

    exclusive = setup.data.val.classes.exclusive
    if exclusive:
        statistics.normalise(scores.logits)
    lowest = evaluator.logit_threshold
    answers = Answers(scores.logits, scores.labels, exclusive=exclusive, lowest=lowest)
    log.info(f"{setup.path}: {statistics.count(weights):,} resamples of the images")
    return answers, statistics.resample(values, answers, weights)


def examine_other(
    other: EvaluationSetup, indices: np.ndarray, weights: np.ndarray
) -> tuple[Answers, Numbers]:
    """Score the images of the first model, by their indices [N], with another one."""
    scores = other.scores()
    if not np.array_equal(scores.indices, indices):
        raise DataError(
            f"--compare {other.path}: it can read {len(scores.indices):,} of the images, the first "
            f"checkpoint {len(indices):,}; leave out those that only one of them can read"
        )
    return examine(other, scores, weights)


def to_dict(content: Content, path: str, weights: str) -> dict[str, Any]:
    """Return what `mldec evaluate` writes as JSON, with 95 % intervals [low, high]."""
    table = content.table
    per_class = {"f1" if name == "F1" else name: column for name, column in table.columns.items()}
    per_class["AP_low"], per_class["AP_high"] = table.intervals

    metrics = {name: interval.value for name, interval in content.metrics.items()}
    results = Results(metrics, per_class, content.images, content.unreadable, confusions=None)
    bounds = {name: [interval.low, interval.high] for name, interval in content.metrics.items()}
    intervals = {name: both for name, both in bounds.items() if np.isfinite(both[0])}
    return {**report_dict(results, weights, path, table.names), "intervals": intervals}


def names_of(setup: EvaluationSetup, other: EvaluationSetup | None) -> str:
    """Return the name of the model of a report, and that of the model it is compared with."""
    name = name_of(setup)
    if other is None:
        return name

    other_name = name_of(other)
    if other_name == name:
        other_name = other.path
    return f"{name} compared with {other_name}"


def name_of(setup: EvaluationSetup) -> str:
    """Return the name of a run, or that of a file of others."""
    loaded = setup.loaded
    return loaded.config.name if loaded.of_run else Path(setup.path).name


def summary(
    setup: EvaluationSetup, other: EvaluationSetup | None, labels: np.ndarray, unreadable: int
) -> dict[str, str]:
    """Return headings and texts about the checkpoint and its images, with labels [N, K]."""
    loaded, node = setup.loaded, setup.config.data
    data = str(node.get("_target_", "")).removeprefix("mldec.data.")
    if "root" in node:
        data += f" in {node['root']}"

    side = f"{setup.data.transform.image_size} pixels"
    if loaded.model.views:
        side += f", two views (--views {loaded.model.views})"
    images = f"{len(labels):,}"
    if unreadable:
        images += f", and {unreadable:,} that cannot be read"
    parameters = sum(tensor.numel() for tensor in loaded.model.parameters())
    checkpoints = {"Checkpoint": f"{setup.path} ({loaded.weights} weights)"}
    if other is not None:
        checkpoints["Compared with"] = f"{other.path} ({other.loaded.weights} weights)"
    return checkpoints | {
        "Data": data,
        "Validation images": images,
        "Classes": f"{labels.shape[1]:,}",
        "Positive labels": f"{np.count_nonzero(labels == 1):,}",
        "Image size": side,
        "Parameters": f"{parameters:,}",
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by mldec {mldec.__version__}",
    }


def notes_on(setup: EvaluationSetup, resamples: int, classes_with_images: int) -> list[str]:
    """Return what was sampled, and which scores and thresholds the numbers are of."""
    classes, calibration = setup.data.val.classes, setup.loaded.calibration
    sentences = [
        f"Intervals are 95 % percentile intervals of {resamples:,} resamples of the images by the "
        f"Bayesian bootstrap (Rubin 1981): random weights of the images, always the same."
    ]
    scores = "The scores are those of the model: the checkpoint is not calibrated."
    if calibration is not None and calibration.images:
        fitted = f"fitted to {calibration.images:,} images on {calibration.date}"
        scores = f"The scores are scaled, {fitted}; their calibration error was not measured."
        if calibration.error is not None:
            scores = (
                f"The scores are calibrated, {fitted}: on images outside the fit their calibration "
                f"error is {calibration.error:.1f} %."
            )
    sentences += [scores, *threshold_notes(setup)]

    if classes_with_images < len(classes):
        sentences.append(
            f"Images and suspected labels are of {classes_with_images:,} of the {len(classes):,} "
            f"classes, spread evenly over their ranking by average precision."
        )
    return sentences
