"""Find labels that are probably wrong, with the scores of a model."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from mldec.checkpoint import Loaded, load_model
from mldec.checkpoint.classes import scoring
from mldec.data.fingerprint import difference, fingerprint
from mldec.data.types import DataModule, Split, picture
from mldec.errors import ConfigError, log, say
from mldec.evaluation.left_out import StoredLogits
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.output import left_out, same_scores
from mldec.evaluation.run import Scores, all_scores
from mldec.evaluators.label_errors import Ranking, rank
from mldec.files.atomic import csv_lines, write_json, write_result, write_texts
from mldec.tools.pages import data_url, template

COLUMNS = ("rank", "image", "class", "label", "probability", "suspected")
PAGE = "label_errors.html"
MAX_IMAGES = 60  # per section of the page
MAX_PRINTED = 10  # labels that are printed
THUMBNAIL = 240  # pixels of the longer side of a thumbnail
JPEG_QUALITY = 80


@dataclass(frozen=True)
class RankedLabels:
    """The labels of a split, ranked by the scores of a model."""

    split: Split
    scores: Scores
    ranking: Ranking  # its image indices are rows of `scores`

    def get(self, positions: Iterable[int]) -> Iterator["RankedLabel"]:
        """Yield the labels at the given positions of the ranking."""
        for position in positions:
            index = int(self.scores.indices[self.ranking.images[position]])
            yield RankedLabel(
                rank=position + 1,
                index=index,
                image=self.split.dataset.name(index),
                class_name=self.split.classes.names[self.ranking.classes[position]],
                present=bool(self.ranking.present[position]),
                probability=float(self.ranking.probabilities[position]),
                suspected=bool(self.ranking.suspected[position]),
            )


@dataclass(frozen=True)
class RankedLabel:
    """The label of an image and a class."""

    rank: int  # from 1, the most suspicious label
    index: int  # index of the image in the split
    image: str  # path of the image
    class_name: str
    present: bool  # the label
    probability: float  # calibrated probability that the class is present
    suspected: bool  # whether confident learning suspects an error


def run(args: argparse.Namespace) -> None:
    """Rank the labels of a split, print the first labels, and write the files."""
    loaded = load_model(args.checkpoint, weights=args.weights, plugins=args.plugin)
    labels = rank_labels(loaded, args)
    images = len(labels.scores.labels)
    for line in left_out(labels.scores.bad, images):
        log.warning(line)

    suspected = int(labels.ranking.suspected.sum())
    summary = (
        f"{args.checkpoint}, {args.split}: {suspected:,} of {len(labels.ranking):,} labels are "
        f"suspected ({images:,} images x {len(labels.split.classes)} classes)"
    )
    say(summary, f"{'rank':>6}  label    P(present)  class, image")
    for label in labels.get(range(len(labels.ranking))[:MAX_PRINTED]):
        value = "present" if label.present else "absent"
        columns = f"{label.rank:6}  {value:7}  {label.probability:10.3f}"
        say(f"{columns}  {label.class_name}, {label.image}")

    if args.errors:
        write_texts(args.errors, csv_lines(csv_rows(labels, args.rows)))
    if args.out:
        present = labels.ranking.present
        sections = {
            "Labeled present, probably absent": np.flatnonzero(present)[:MAX_IMAGES],
            "Labeled absent, probably present": np.flatnonzero(~present)[:MAX_IMAGES],
        }
        write_result(str(Path(args.out) / PAGE), render_page(summary, labels, sections))
    if args.json:
        content = {
            "checkpoint": args.checkpoint,
            "split": args.split,
            "images": images,
            "left_out": labels.scores.bad,
            "labels": len(labels.ranking),
            "suspected": suspected,
            "per_class": class_counts(labels),
        }
        write_json(args.json, content)


def rank_labels(loaded: Loaded, args: argparse.Namespace) -> RankedLabels:
    """Score the images of a split and rank their labels."""
    # Keep fold and image size of the training if data=NAME replaces the other data settings.
    for name in ("fold", "image_size"):
        value = loaded.config.data.get(name)
        is_chosen = any(setting.startswith(f"data.{name}=") for setting in args.settings)
        if value is not None and not is_chosen:
            args.settings.append(f"data.{name}={value}")

    setup = open_for_evaluation(loaded, EvalOptions.of(vars(args)), calibrated=False)
    split = setup.data.val if args.split == "val" else setup.data.train
    if split.classes.exclusive:
        raise ConfigError("--checkpoint: label errors need multi-label data; remove the option")

    # Replace the random training transform.
    split = split.viewed(loaded.transform)
    data = replace(setup.data, load_val=lambda: split, bad_images="skip")
    network = scoring(loaded.model, setup.loaded.classes, split.classes, setup.path)
    setup = replace(setup, data=data, network=network)
    scored = setup.scored_data()
    # The model of a leave-one-out score has not seen the label of the image.
    if not isinstance(scored.val.dataset, StoredLogits):
        warn_if_trained_on(args.checkpoint, loaded, setup.data, args.split)
    scores = all_scores(network, scored, setup.config, device=setup.device, path=setup.path)
    constant = setup.constant_classes(scores)
    for line in same_scores(constant, loaded.weights, loaded.config.loss):
        log.warning(line)
    return RankedLabels(split, scores, rank(scores.logits, scores.labels))


def warn_if_trained_on(path: str, loaded: Loaded, data: DataModule, split: str) -> None:
    """Warn if the model may have learned wrong labels of the split, which are then not found."""
    if loaded.fingerprint is None:
        log.warning(f"{path}: unknown training data; wrong labels in it are hard to find")
    elif changed := difference(loaded.fingerprint, fingerprint(data.train)):
        log.warning(f"{path}: other training data ({changed}); wrong labels in it are hard to find")
    elif split == "train":
        log.warning(
            f"{path} was trained on these images and may have learned their wrong labels; train "
            f"with data.fold=1/N to N/N and check the held-out fold of each model"
        )


def class_counts(labels: RankedLabels) -> dict[str, dict[str, int]]:
    """Return the numbers of labels and suspected labels of each class."""
    ranking = labels.ranking
    names = labels.split.classes.names
    counts: dict[str, dict[str, int]] = {}
    masks = {
        "present": ranking.present,
        "absent": ~ranking.present,
        "suspected_present": ranking.present & ranking.suspected,
        "suspected_absent": ~ranking.present & ranking.suspected,
    }
    for key, mask in masks.items():
        per_class = np.bincount(ranking.classes[mask], minlength=len(names)).tolist()
        for name, count in zip(names, per_class, strict=True):
            counts.setdefault(name, {})[key] = count
    return counts


def csv_rows(labels: RankedLabels, count: int | None) -> Iterator[Iterable[object]]:
    """Yield the header and at most `count` rows of the CSV file; None yields all rows."""
    yield COLUMNS
    for label in labels.get(range(len(labels.ranking))[:count]):
        # The file is UTF-8. Paths may contain other bytes.
        image = label.image.encode("utf-8", "backslashreplace").decode()
        probability = f"{label.probability:.6f}"
        suspected = int(label.suspected)
        yield label.rank, image, label.class_name, int(label.present), probability, suspected


def render_page(summary: str, labels: RankedLabels, sections: Mapping[str, np.ndarray]) -> str:
    """Return an HTML page with a section per heading; values are positions in the ranking."""

    def thumbnail(label: RankedLabel) -> str:
        image: Image.Image = picture(labels.split.dataset, label.index)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        return data_url(image, quality=JPEG_QUALITY)

    page = template("mldec.tools.check_data", "page.html.j2", thumbnail=thumbnail)
    groups = {heading: labels.get(places.tolist()) for heading, places in sections.items()}
    return page.render(summary=summary, sections=groups)
