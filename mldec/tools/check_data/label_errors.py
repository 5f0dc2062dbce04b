"""Find labels that are probably wrong: the work of `mldec check-data --checkpoint`."""

import argparse
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from mldec.checkpoint import Loaded, load_model
from mldec.checkpoint.classes import scoring
from mldec.data.fingerprint import difference, fingerprint
from mldec.data.types import DataModule, Split, picture
from mldec.errors import ConfigError, say
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.output import left_out, same_scores
from mldec.evaluation.run import Scores
from mldec.evaluators.label_errors import Ranking, rank
from mldec.files.atomic import csv_lines, write_json, write_result, write_texts
from mldec.tools.pages import data_url, template

log = logging.getLogger("mldec")

COLUMNS = ("rank", "image", "class", "label", "probability", "suspected")
PAGE = "label_errors.html"
MAX_PICTURES = 60  # per section of the page
MAX_PRINTED = 10  # pairs that are printed
THUMBNAIL = 240  # pixels of the longer side of a picture
QUALITY = 80  # of the JPEG files


@dataclass(frozen=True)
class Judged:
    """The images of a split with their labels, and what a model says of each."""

    split: Split
    scores: Scores
    ranking: Ranking  # its images are rows of the scores


def run(args: argparse.Namespace) -> None:
    """Rank the labels of a dataset, print the first ones, and write the files."""
    loaded = load_model(args.checkpoint, weights=args.weights, plugins=args.plugin)
    judged = judge(loaded, args)
    bad, images = judged.scores.bad, len(judged.scores.labels)
    for line in left_out(bad, images):
        log.warning(line)

    ranking = judged.ranking
    suspected = int(ranking.suspected.sum())
    summary = (
        f"{images:,} images x {len(judged.split.classes)} classes of {args.split}, judged by "
        f"{args.checkpoint}: {suspected:,} of {len(ranking):,} labels are suspected"
    )
    say(summary)
    print_suspects(judged)

    if args.errors:
        write_pairs(args.errors, judged, args.rows)
    if args.out:
        write_result(str(Path(args.out) / PAGE), page(summary, sections(judged)))
    if args.json:
        content = {
            "checkpoint": args.checkpoint,
            "split": args.split,
            "images": images,
            "left_out": bad,
            "labels": len(ranking),
            "suspected": suspected,
            "per_class": class_counts(judged),
        }
        write_json(args.json, content)


def judge(loaded: Loaded, args: argparse.Namespace) -> Judged:
    """Score the images of a split; with data.fold the validation images are those of the fold."""
    # The fold and the size of the images stay where data=NAME replaces the node of the data.
    for name in ("fold", "image_size"):
        value = loaded.config.data.get(name)
        is_chosen = any(setting.startswith(f"data.{name}=") for setting in args.settings)
        if value is not None and not is_chosen:
            args.settings.append(f"data.{name}={value}")

    setup = open_for_evaluation(loaded, EvalOptions.of(vars(args)), calibrated=False)
    data = setup.data
    split = data.val if args.split == "val" else data.train
    if split.classes.exclusive:
        raise ConfigError(
            "--checkpoint: wrong labels are looked for where images have several; leave it out"
        )
    warn_of_training(args.checkpoint, loaded, data, args.split)

    # The training transform changes images at random.
    split = split.viewed(loaded.transform)
    data = replace(data, load_val=lambda: split, bad_images="skip")
    network = scoring(loaded.model, setup.loaded.classes, split.classes, setup.path)
    setup = replace(setup, data=data, network=network)
    scores = setup.scores()
    for line in same_scores(setup.constant_classes(scores)):
        log.warning(line)
    return Judged(split, scores, rank(scores.logits, scores.labels))


def warn_of_training(path: str, loaded: Loaded, data: DataModule, split: str) -> None:
    """Warn if a model may have been trained on the images to judge: it learns wrong labels too."""
    doubt = "if these images were among it, their wrong labels were learned and few are found"
    if loaded.fingerprint is None:
        log.warning(f"{path} does not say on which data it was trained: {doubt}")
    elif changed := difference(loaded.fingerprint, fingerprint(data.train)):
        log.warning(f"{path} was trained on other data ({changed}): {doubt}")
    elif split == "train":
        log.warning(
            f"{path} was trained on these images, and their wrong labels too: more are found with "
            f"models trained with data.fold=1/N to N/N, each judging the fold that it left out"
        )


@dataclass(frozen=True)
class Suspect:
    """One pair of an image and a class."""

    rank: int  # from 1, the most suspicious pair
    image: str  # its path
    class_name: str
    present: bool  # whether the label says that the image shows the class
    probability: float  # that it does, as the model says
    suspected: bool  # whether confident learning counts the label as wrong


def suspects(judged: Judged, positions: Iterable[int]) -> Iterator[tuple[int, Suspect]]:
    """Yield the pairs at some positions of the ranking, each after the index of its image."""
    ranking, split = judged.ranking, judged.split
    for position in positions:
        index = int(judged.scores.indices[ranking.images[position]])
        pair = Suspect(
            rank=position + 1,
            image=split.dataset.name(index),
            class_name=split.classes.names[ranking.classes[position]],
            present=bool(ranking.present[position]),
            probability=float(ranking.probabilities[position]),
            suspected=bool(ranking.suspected[position]),
        )
        yield index, pair


def sections(judged: Judged) -> dict[str, Iterator[tuple[Suspect, Image.Image]]]:
    """Return the first pairs of either label with their pictures, by the heading of the page."""

    def first(chosen: np.ndarray) -> Iterator[tuple[Suspect, Image.Image]]:
        positions = np.flatnonzero(chosen)[:MAX_PICTURES].tolist()
        for index, pair in suspects(judged, positions):
            yield pair, picture(judged.split.dataset, index)

    present = judged.ranking.present
    return {
        "Labelled present, probably absent": first(present),
        "Labelled absent, probably present": first(~present),
    }


def class_counts(judged: Judged) -> dict[str, dict[str, int]]:
    """Return the numbers of labels of each class, and how many of them are suspected, by name."""
    ranking, names = judged.ranking, judged.split.classes.names
    chosen = {
        "present": ranking.present,
        "absent": ~ranking.present,
        "suspected_present": ranking.present & ranking.suspected,
        "suspected_absent": ~ranking.present & ranking.suspected,
    }
    counts: dict[str, dict[str, int]] = {name: {} for name in names}
    for key, pairs in chosen.items():
        of_classes = np.bincount(ranking.classes[pairs], minlength=len(names)).tolist()
        for name, count in zip(names, of_classes, strict=True):
            counts[name][key] = count
    return counts


def print_suspects(judged: Judged) -> None:
    """Print the first pairs."""
    say(f"{'rank':>6}  label    P(present)  class, image")
    for _, pair in suspects(judged, range(len(judged.ranking))[:MAX_PRINTED]):
        label = "present" if pair.present else "absent"
        columns = f"{pair.rank:6}  {label:7}  {pair.probability:10.3f}"
        say(f"{columns}  {pair.class_name}, {pair.image}")


def write_pairs(target: str, judged: Judged, count: int | None) -> None:
    """Write a CSV file with a row per pair, most suspicious first; None writes all of them."""

    def rows() -> Iterator[Iterable[object]]:
        yield COLUMNS
        for _, pair in suspects(judged, range(len(judged.ranking))[:count]):
            # UTF-8, which the path of an image need not be.
            image = pair.image.encode("utf-8", "backslashreplace").decode()
            label, suspected = int(pair.present), int(pair.suspected)
            yield pair.rank, image, pair.class_name, label, f"{pair.probability:.6f}", suspected

    write_texts(target, csv_lines(rows()))


def page(summary: str, sections: Mapping[str, Iterable[tuple[Suspect, Image.Image]]]) -> str:
    """Return the page: a sentence, and under each heading pairs with their pictures."""
    return template("mldec.tools.check_data", "page.html.j2", small=_small).render(
        summary=summary, sections=sections
    )


def _small(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return data_url(small, quality=QUALITY)
