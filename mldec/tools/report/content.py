"""The content of a report: open the checkpoints, score the images and compute the statistics."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mldec
from mldec.checkpoint.classes import can_encode
from mldec.config.compose import override, to_yaml
from mldec.data.fingerprint import fingerprint
from mldec.data.types import same_images
from mldec.errors import DataError, log
from mldec.evaluation import open as opening
from mldec.evaluation.left_out import StoredLogits
from mldec.evaluation.open import EvaluationSetup
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.output import Results, report, same_scores
from mldec.evaluation.run import Scores, all_scores
from mldec.files.run_folder import folder_of_run
from mldec.files.text import expand_user
from mldec.tools.report import statistics
from mldec.tools.report.comparison import Comparison, compare
from mldec.tools.report.examples import (
    Confusion,
    Example,
    Photo,
    add_heat_maps,
    find_confusions,
    list_decisions,
    make_photos,
    select_examples,
)
from mldec.tools.report.statistics import Predictions, ResampledMetrics
from mldec.tools.report.training import Curve, read_training
from mldec.tools.report.training_photos import TrainingPhotos, find_training_photos


@dataclass(frozen=True)
class ReportContent:
    """The content of a report."""

    title: str
    facts: dict[str, str]  # checkpoint, data, training cost and so on
    settings: str  # the config as YAML
    images: int  # number of scored images
    curves: dict[str, Curve]  # learning curves; empty if unknown
    metrics: dict[str, statistics.Interval]  # percentages, and numbers of classes
    table: statistics.ClassTable
    histograms: statistics.Histograms
    exclusive: bool  # single-label images, without thresholds
    pairs: statistics.ClassPairs
    confusions: list[Confusion]
    examples: list[Example]
    photos: dict[int, Photo]  # by the row of the image
    training: TrainingPhotos  # that speak for the predictions on the examples
    gallery: list[int]  # rows of the photos in the gallery
    unreadable: list[str]  # one message per image
    root: Path | None  # folder of the data, not shown in the names of images
    comparison: Comparison | None
    resamples: int  # number of bootstrap resamples
    notes: list[str]


def open_checkpoint(options: EvalOptions) -> EvaluationSetup:
    """Open the checkpoint of a command line and its data."""
    loaded = opening.load_checkpoint(options)
    setup = opening.open_for_evaluation(loaded, options)

    # The report lists unreadable images.
    return replace(setup, data=replace(setup.data, bad_images="skip"))


def open_other(options: EvalOptions, path: str, setup: EvaluationSetup) -> EvaluationSetup:
    """Open the checkpoint of --compare with the images of the first checkpoint."""
    options = replace(options, checkpoint=path)
    loaded = opening.load_checkpoint(options)
    # Cached tokens depend on the backbone and the precision of this checkpoint.
    settings = [
        word for word in options.overrides if word.startswith(("train.", "data.cache_dir="))
    ]
    config = override(loaded.config, settings)
    opening.fit_to_device(config, options, setup.device, len(setup.data.val.dataset))

    # Only the scores of the first checkpoint are leave-one-out scores of these images.
    if setup.loaded.model.is_fitted and not loaded.model.is_fitted:
        is_own = loaded.val_fingerprint == fingerprint(setup.data.val)
        if not is_own and same_images(setup.data.train, setup.data.val):
            log.warning(
                f"--compare {path}: its metrics are too high if it was trained on these images, "
                f"which are the training images of {setup.path}; exchange both checkpoints"
            )

    split = setup.data.val.viewed(loaded.transform)
    if can_encode(loaded.classes):
        # The text encoder of this model computes the word vectors.
        split = replace(split, classes=replace(split.classes, word_vectors=None, origin=None))
    data = replace(setup.data, load_val=lambda: split, transform=loaded.transform)
    loaded, data = opening.with_same_classes(loaded, data, path)
    network = opening.scorer(loaded, data, path)
    thresholds = opening.chosen_thresholds(data, loaded, options)
    return replace(
        setup,
        path=path,
        loaded=loaded,
        config=config,
        data=data,
        network=network,
        thresholds=thresholds,
    )


def build_content(setup: EvaluationSetup, other: EvaluationSetup | None) -> ReportContent:
    """Score the images and compute the content of the report."""
    classes = setup.data.val.classes
    data = setup.scored_data()
    scores = all_scores(setup.network, data, setup.config, device=setup.device, path=setup.path)
    # Calibration can hide constant scores, so it stores the names of their classes.
    calibration = setup.loaded.calibration
    if calibration is None or not calibration.images:
        constant = setup.constant_classes(scores)
    else:
        constant = calibration.constant
    images = len(scores.labels)
    weights = statistics.bootstrap_weights(images, len(classes))
    predictions, resampled = analyze(setup, scores, weights)

    thresholds = predictions.thresholds()
    edges = statistics.bin_edges(len(classes), thresholds)
    histograms = statistics.score_histograms(predictions, edges)
    [counts] = statistics.weighted_counts(predictions, np.ones((1, images, 1), np.float32))
    table = statistics.class_table(classes.names, counts, thresholds, histograms, resampled)

    comparison = None
    if other is not None:
        other_scores = other.scores()
        if not np.array_equal(other_scores.indices, scores.indices):
            raise DataError(
                f"--compare {other.path}: {len(other_scores.indices):,} readable images instead of "
                f"{images:,}; remove the unreadable images from the data"
            )
        other_results = analyze(other, other_scores, weights)
        comparison = compare(other.path, predictions, resampled, *other_results)

    decisions = [list_decisions(predictions, row) for row in range(images)]
    confusions = find_confusions(decisions)
    examples = select_examples(predictions, resampled.class_ap)
    enlarged = {example.row for example in examples}
    for confusion in confusions:
        enlarged.update(confusion.rows)
    if comparison is not None:
        enlarged.update(change.row for change in comparison.changed)
    explained = sorted({example.row for example in examples})
    training = find_training_photos(explained, setup, scores.indices, decisions)
    photos, gallery = make_photos(
        setup.data.val.dataset,
        scores.indices,
        decisions,
        enlarged,
        sum(map(len, training.thumbnails.values())),
    )
    examples, heat_note = add_heat_maps(examples, setup, data.val.dataset, scores.indices)

    constant_note = same_scores(constant, setup.loaded.weights, setup.loaded.config.loss)
    title = setup.loaded.config.name if setup.loaded.of_run else Path(setup.path).name
    if other is not None:
        title += f" compared with {other.path}"
    cost, curves, training_notes = read_training(folder_of_run(setup.loaded.path))
    notes = constant_note + score_notes(setup)
    if isinstance(data.val.dataset, StoredLogits):
        notes.append("Scores are leave-one-out: each image is scored by a fit without it.")
    notes += [heat_note, training.note] + training_notes
    root = setup.config.data.get("root")
    return ReportContent(
        title=f"{title}: {len(classes):,} classes, {images:,} images",
        facts=facts(setup, other, scores) | cost,
        settings=to_yaml(setup.config),
        images=images,
        curves=curves,
        metrics=resampled.with_intervals(),
        table=table,
        histograms=histograms,
        exclusive=classes.exclusive,
        pairs=statistics.class_pairs(predictions, counts),
        confusions=confusions,
        examples=examples,
        photos=photos,
        training=training,
        gallery=gallery,
        unreadable=scores.bad,
        root=None if root is None else expand_user(root).absolute(),
        comparison=comparison,
        resamples=len(resampled.resampled_ap),
        notes=[note for note in notes if note],
    )


def analyze(
    setup: EvaluationSetup, scores: Scores, weights: np.ndarray
) -> tuple[Predictions, ResampledMetrics]:
    """Compute the metrics of a model, and resample them with the given weights."""
    evaluator = setup.evaluator()
    logits = torch.from_numpy(scores.logits)
    for block in zip(logits.split(1024), torch.from_numpy(scores.labels).split(1024), strict=True):
        evaluator.update(*block)
    metrics = evaluator.compute()

    exclusive = setup.data.val.classes.exclusive
    if exclusive:
        logits.copy_(logits.log_softmax(1))
    threshold = evaluator.logit_threshold
    predictions = Predictions(scores.logits, scores.labels, exclusive, threshold)
    resampled = statistics.bootstrap_metrics(metrics, predictions, weights, evaluator)
    log.info(f"{setup.path}: {len(resampled.resampled_ap):,} resamples of the images")
    return predictions, resampled


def report_json(content: ReportContent, setup: EvaluationSetup) -> dict[str, Any]:
    """Return the JSON of `mldec evaluate`, extended by 95 % intervals and the comparison."""
    table = content.table
    low, high = table.intervals
    per_class = table.columns | {"AP_low": low, "AP_high": high}

    metrics = {}
    intervals = {}
    for name, interval in content.metrics.items():
        metrics[name] = interval.value
        if np.isfinite(interval.low):
            intervals[name] = [interval.low, interval.high]
    results = Results(metrics, per_class, content.images, content.unreadable, confusions=None)
    result = report(results, setup.loaded.weights, setup.path, table.names)
    result["intervals"] = intervals
    if content.comparison is not None:
        result["comparison"] = content.comparison.to_json(table.names)
    if setup.loaded.model.views:
        result["views"] = setup.loaded.model.views
    return result


def facts(setup: EvaluationSetup, other: EvaluationSetup | None, scores: Scores) -> dict[str, str]:
    """Return facts about the checkpoints and the images."""
    loaded = setup.loaded
    result = {"Checkpoint": f"{setup.path} ({loaded.weights} weights)"}
    if other is not None:
        result["Compared with"] = f"{other.path} ({other.loaded.weights} weights)"

    node = setup.config.data
    result["Data"] = str(node.get("_target_", "")).removeprefix("mldec.data.")
    if place := node.get("root") or node.get("name"):
        result["Data"] += f" in {place}"
    result["Validation images"] = f"{len(scores.labels):,} ({len(scores.bad):,} unreadable)"
    result["Image size"] = f"{setup.data.transform.image_size} pixels"
    if loaded.model.views:
        result["Image size"] += f", two views (--views {loaded.model.views})"
    now = datetime.now(UTC)
    result["Written"] = f"{now:%Y-%m-%d %H:%M} UTC by mldec {mldec.__version__}"
    return result


def score_notes(setup: EvaluationSetup) -> list[str]:
    """Describe the calibration of the scores and the thresholds."""
    calibration = setup.loaded.calibration
    note = "The scores are not calibrated."
    if calibration is not None and calibration.images:
        note = f"The scores were calibrated on {calibration.images:,} images on {calibration.date}."
        if calibration.error is not None:
            note += f" Their calibration error on held-out images is {calibration.error:.1f} %."

    names = (setup.loaded.classes.names, setup.data.val.classes.names)
    if setup.data.val.classes.exclusive:
        return [note, "The class with the highest score is predicted."]
    if setup.thresholds is None:
        return [note, "The threshold is data.threshold. mldec calibrate fits one per class."]
    if calibration is None or setup.thresholds != calibration.thresholds_of(*names):
        return [note, f"The threshold is {setup.thresholds[0]:g}, from --threshold."]
    origin = opening.thresholds_origin(calibration, setup.data)
    return [note, f"Precision, recall and F1 are at the thresholds of the checkpoint {origin}."]
