"""Write the report of a checkpoint: the work of the command `mldec.report`."""

import argparse
import importlib.util
import logging
import time
from pathlib import Path

import numpy as np

from mldec.config.compose import to_yaml
from mldec.errors import ConfigError, DataError, say
from mldec.evaluation import Scores
from mldec.files.results import STANDARD_OUTPUT, check_targets, to_json, write_result
from mldec.report import comparison, facts, results, training
from mldec.report.answers import Answers, lowest_logit, metrics, normalise
from mldec.report.content import ChangedImage, Comparison, Content, Example, Suspect
from mldec.report.examples import (
    Pick,
    SuspectedLabel,
    classes_with_images,
    examples,
    suspected_labels,
)
from mldec.report.heat import heat_maps
from mldec.report.histograms import bin_edges, co_occurrence, histograms
from mldec.report.pictures import Album
from mldec.report.resampling import count, draw
from mldec.report.statistics import Numbers, class_table, precision_of, resample
from mldec.report.subject import Subject, prepare, prepare_other

log = logging.getLogger("mldec")

LIBRARIES = ("plotly", "jinja2")


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.report`: score, compute, and write the page.

    Args:
        args: the command line; see `mldec.report.parser`.

    Raises:
        UserError: for a wrong option or setting, or a checkpoint or data that cannot be used.
    """
    started = time.monotonic()
    require_libraries()
    if args.out == STANDARD_OUTPUT:
        raise ConfigError("--out -: a report is written to a file; pass its name")
    check_targets(args.out, args.json)

    # The other model too is refused before the first image is scored.
    subject = prepare(args)
    other = prepare_other(args, subject) if args.compare else None
    content = report(subject, other)

    # It imports the optional libraries.
    from mldec.report.page import page

    write_result(args.out, page(content))
    if args.json:
        numbers = results.to_dict(content, subject.path, subject.loaded.weights)
        write_result(args.json, to_json(numbers, indent=1) + "\n")
    size, seconds = Path(args.out).stat().st_size / 1e6, time.monotonic() - started
    say(f"{args.out}: a report on {args.checkpoint}, {size:.1f} MB, made in {seconds:.0f} s")


def require_libraries() -> None:
    """Check that the page can be made, before the work that fills it.

    Raises:
        ConfigError: if a library is not installed.
    """
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a report needs {' and '.join(missing)}, not installed here; "
            f"run pip install 'mldec[report]'"
        )


def report(subject: Subject, other: Subject | None) -> Content:
    """Score the images and compute what a report says.

    Args:
        subject: the checkpoint.
        other: another one to compare it with, on the same images.

    Raises:
        DataError: if no image can be scored.
    """
    scores = subject.scores()
    names = subject.data.val.classes.names
    weights = draw(len(scores.labels), len(names))
    answers, numbers = examine(subject, scores, weights)

    counted = histograms(answers, bin_edges(len(names), answers.thresholds()))
    table = class_table(names, answers, counted, numbers)
    shown = classes_with_images(numbers.precision)
    picks = examples(answers, shown)
    suspects = [] if answers.exclusive else suspected_labels(answers, shown)
    matrix = co_occurrence(answers)

    # The scores of another model need the memory of these.
    kept = None if other is None else comparison.keep(answers)
    indices, labels, unreadable = scores.indices, scores.labels, scores.bad
    del scores, answers

    album = Album(subject.data.val.dataset, indices, labels, names)
    compared = None
    if other is not None and kept is not None:
        compared = compare(other, kept, numbers, weights, album)
    shown_suspects = with_pictures(suspects, album)
    shown_examples, heat_method, heat_notes = with_heat(picks, album, subject)
    of_run, curves, run_notes = training.of_run(subject.loaded.path)

    notes = facts.notes(subject, count(weights), len(shown))
    if len(shown_examples) < len(picks):
        left_out = len(picks) - len(shown_examples)
        notes.append(f"{left_out:,} more images are left out, to keep the file small.")
    return Content(
        title=f"{Path(subject.path).name}: {len(names):,} classes, {len(labels):,} images",
        summary=[*facts.summary(subject, labels, len(unreadable)), *of_run],
        settings=to_yaml(subject.config),
        images=len(labels),
        curves=curves,
        metrics=numbers.with_intervals(),
        table=table,
        histograms=counted,
        exclusive=subject.data.val.classes.exclusive,
        co_occurrence=matrix,
        heat_method=heat_method,
        pictures=album.pictures,
        examples=shown_examples,
        suspects=shown_suspects,
        unreadable=unreadable,
        comparison=compared,
        notes=[*notes, *heat_notes, *run_notes],
    )


def examine(subject: Subject, scores: Scores, weights: np.ndarray) -> tuple[Answers, Numbers]:
    """Compute the numbers of a model and their resamples.

    Args:
        subject: the model.
        scores: of N images and K classes; changed in place if an image has one label.
        weights: of the resamples.
    """
    # It holds on to the scores, and is dropped with the end of this function.
    evaluator = subject.evaluator()

    values = metrics(evaluator, scores.logits, scores.labels)

    exclusive = subject.data.val.classes.exclusive
    if exclusive:
        normalise(scores.logits)
    answers = Answers(
        logits=scores.logits,
        labels=scores.labels,
        exclusive=exclusive,
        lowest=lowest_logit(evaluator),
    )
    log.info(f"{subject.path}: the metrics of {count(weights):,} resamples of the images")
    resampled = resample(evaluator, answers, weights)
    return answers, Numbers(values, precision_of(answers), resampled)


def compare(
    other: Subject, kept: comparison.Kept, own: Numbers, weights: np.ndarray, album: Album
) -> Comparison:
    """Score the images with another model, and compare the two.

    Args:
        other: the other model.
        kept: of the answers of the first one.
        own: numbers of the first one.
        weights: of its resamples.
        album: for the images that changed sides.

    Raises:
        DataError: if the other model cannot read the same images.
    """
    scores = other.scores()
    if not np.array_equal(scores.indices, album.indices):
        raise DataError(
            f"--compare {other.path}: it can read {len(scores.indices):,} of the images, the first "
            f"checkpoint {len(album.indices):,}; leave out those that only one of them can read"
        )
    answers, numbers = examine(other, scores, weights)
    changes = comparison.changes(kept, answers)

    changed = []
    for change in changes.surest:
        number = album.add(change.row)
        if number is not None:
            changed.append(
                ChangedImage(
                    change.class_index,
                    number,
                    change.present,
                    change.score,
                    change.other_score,
                    change.fixed,
                )
            )

    p_value, test = comparison.significance(own, numbers)
    return Comparison(
        other=other.path,
        metrics=comparison.differences(own, numbers),
        p_value=p_value,
        test=test,
        per_class=comparison.per_class(own, numbers),
        changed=changed,
        fixed=changes.fixed,
        broken=changes.broken,
    )


def with_pictures(suspects: list[SuspectedLabel], album: Album) -> list[Suspect]:
    """Return the suspected labels whose pictures the album has room for."""
    shown = []
    for suspect in suspects:
        number = album.add(suspect.row)
        if number is not None:
            shown.append(Suspect(suspect.class_index, number, suspect.present, suspect.probability))
    return shown


def with_heat(
    picks: list[Pick], album: Album, subject: Subject
) -> tuple[list[Example], str | None, list[str]]:
    """Return the examples whose pictures the album has room for, with heat maps.

    Args:
        picks: the images and their classes.
        album: of the pictures.
        subject: whose model is explained.

    Returns:
        The examples, how the maps were made, and a note if they cannot be made.
    """
    shown = []
    for pick in picks:
        number = album.add(pick.row)
        if number is not None:
            shown.append((pick, number))

    log.info(f"{subject.path}: {len(shown):,} heat maps")
    pairs = [(int(album.indices[pick.row]), pick.class_index) for pick, _ in shown]
    maps = heat_maps(subject.loaded, subject.data, pairs, device=subject.device)
    return (
        [
            Example(pick.class_index, pick.kind, number, pick.score, heat)
            for (pick, number), heat in zip(shown, maps.heats, strict=True)
        ],
        maps.method,
        maps.notes,
    )
