"""Find labels that are probably wrong: the work of `mldec.check_data --checkpoint`."""

import argparse
import csv
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mldec.check_data.label_errors import Ranking, rank
from mldec.check_data.out_of_fold import Judged, judge, left_out_folds
from mldec.check_data.suspects_page import Suspect, page
from mldec.checkpoint import load_model
from mldec.errors import say, writing
from mldec.files.results import ResultFile, check_targets, to_json, write_result

log = logging.getLogger("mldec")

COLUMNS = ("rank", "image", "class", "label", "probability", "suspected")
PAGE = "label_errors.html"
MAX_PICTURES = 60  # per section of the page
MAX_PRINTED = 10  # pairs, and unreadable images, that are printed
MAX_CLASSES = 20  # that are printed


def run(args: argparse.Namespace) -> None:
    """Rank the labels of a dataset, print the first ones, and write the files.

    Args:
        args: the command line; see `mldec.check_data.parser`.

    Raises:
        UserError: for a wrong setting, or a checkpoint or data that cannot be used.
    """
    check_targets(args.json, args.errors)
    options = {"weights": args.weights, "plugins": args.plugin}
    models = [load_model(path, **options) for path in args.checkpoint]

    # A folder that cannot be made is found now, not after all images were scored.
    left_out_folds(args.checkpoint, models)
    if args.out:
        with writing(args.out):
            Path(args.out).mkdir(parents=True, exist_ok=True)
        check_targets(str(Path(args.out) / PAGE))

    judged = judge(args.checkpoint, models, args.settings, split=args.split)
    for message in judged.bad[:MAX_PRINTED]:
        log.warning(f"left out: {message}")
    if len(judged.bad) > MAX_PRINTED:
        log.warning(f"left out: {len(judged.bad) - MAX_PRINTED:,} more (all with --json)")

    ranking = rank(judged.logits, judged.labels, judged.models)
    summary = _summary(args, judged, ranking)
    say(summary)
    tell(judged, ranking)

    if args.errors:
        write_pairs(args.errors, judged, ranking, args.rows)
    if args.out:
        write_result(str(Path(args.out) / PAGE), page(summary, sections(judged, ranking)))
    if args.json:
        write_result(args.json, to_json(report(args, judged, ranking), indent=1) + "\n")


def _summary(args: argparse.Namespace, judged: Judged, ranking: Ranking) -> str:
    """Return one line about what was judged by what."""
    images = f"{len(judged.labels):,} images x {len(judged.classes)} classes"
    judge_name = f"of {args.split}, judged by {args.checkpoint[0]}"
    if len(args.checkpoint) > 1:
        judge_name = (
            f"of {len(args.checkpoint)} folds, each judged by the model that was not trained on it"
        )
    return (
        f"{images} {judge_name}: {int(ranking.suspected.sum()):,} of {len(ranking):,} labels "
        f"are suspected"
    )


def suspects(
    judged: Judged, ranking: Ranking, positions: Iterable[int]
) -> Iterator[tuple[int, Suspect]]:
    """Yield the pairs at some positions of the ranking, each after the index of its image."""
    for position in positions:
        image = int(ranking.images[position])
        pair = Suspect(
            rank=position + 1,
            image=judged.name(image),
            class_name=judged.classes[ranking.classes[position]],
            present=bool(ranking.present[position]),
            probability=float(ranking.probabilities[position]),
            suspected=bool(ranking.suspected[position]),
        )
        yield image, pair


def sections(judged: Judged, ranking: Ranking) -> dict[str, Iterator[tuple[Suspect, Image.Image]]]:
    """Return the first pairs of either label with their pictures, by the heading of the page.

    Apart, because the first pairs of all may have the same label: a class that is rare makes every
    label `present` a surprise.
    """

    def first(chosen: np.ndarray) -> Iterator[tuple[Suspect, Image.Image]]:
        positions = np.flatnonzero(chosen)[:MAX_PICTURES].tolist()
        for image, pair in suspects(judged, ranking, positions):
            yield pair, judged.picture(image)

    return {
        "Labelled present, probably absent": first(ranking.present),
        "Labelled absent, probably present": first(~ranking.present),
    }


def class_counts(judged: Judged, ranking: Ranking) -> dict[str, dict[str, int]]:
    """Return the numbers of labels of each class, and how many of them are suspected, by name."""

    def count(chosen: np.ndarray) -> list[int]:
        counts = np.bincount(ranking.classes[chosen], minlength=len(judged.classes))
        return [int(number) for number in counts]

    columns = {
        "present": count(ranking.present),
        "absent": count(~ranking.present),
        "suspected_present": count(ranking.present & ranking.suspected),
        "suspected_absent": count(~ranking.present & ranking.suspected),
    }
    return {
        name: {key: column[index] for key, column in columns.items()}
        for index, name in enumerate(judged.classes)
    }


def tell(judged: Judged, ranking: Ranking) -> None:
    """Print the first pairs, and the classes with the most suspected labels."""
    say(f"{'rank':>6}  label    P(present)  class, image")
    for _, pair in suspects(judged, ranking, range(len(ranking))[:MAX_PRINTED]):
        label = "present" if pair.present else "absent"
        columns = f"{pair.rank:6}  {label:7}  {pair.probability:10.3f}"
        say(f"{columns}  {pair.class_name}, {pair.image}")

    counts = class_counts(judged, ranking)
    suspected = {
        name: row["suspected_present"] + row["suspected_absent"] for name, row in counts.items()
    }
    worst = sorted(filter(suspected.get, suspected), key=lambda name: -suspected[name])
    if worst:
        say(f"{'suspected of present':>23}  {'of absent':>23}  class")
    for name in worst[:MAX_CLASSES]:
        row = counts[name]
        present = f"{row['suspected_present']:9,} of {row['present']:10,}"
        absent = f"{row['suspected_absent']:9,} of {row['absent']:10,}"
        say(f"{present}  {absent}  {name}")
    if len(worst) > MAX_CLASSES:
        say(f"and {len(worst) - MAX_CLASSES:,} more classes (all with --json)")


def write_pairs(target: str, judged: Judged, ranking: Ranking, count: int | None) -> None:
    """Write a CSV file with a row per pair, most suspicious first; None writes all of them.

    Raises:
        DataError: if it cannot be written; an existing file stays as it is.
    """
    file = ResultFile(target)
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for _, pair in suspects(judged, ranking, range(len(ranking))[:count]):
        # UTF-8, which the path of an image need not be.
        image = pair.image.encode("utf-8", "backslashreplace").decode()
        label, suspected = int(pair.present), int(pair.suspected)
        probability = f"{pair.probability:.6f}"
        writer.writerow([pair.rank, image, pair.class_name, label, probability, suspected])
    file.commit()


def report(args: argparse.Namespace, judged: Judged, ranking: Ranking) -> dict[str, Any]:
    """Return the content of `--json`."""
    return {
        "checkpoints": args.checkpoint,
        "split": args.split if len(args.checkpoint) == 1 else "folds",
        "images": len(judged.labels),
        "left_out": list(judged.bad),
        "labels": len(ranking),
        "suspected": int(ranking.suspected.sum()),
        "per_class": class_counts(judged, ranking),
    }
