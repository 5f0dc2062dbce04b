"""Find labels that are probably wrong: the work of `mldec.check_data --checkpoint`.

Confident learning (Northcutt et al., arXiv 1911.00068) for several labels per image: every class is
a binary problem of its own, with two labels, present and absent.
"""

import argparse
import base64
import csv
import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mldec import build
from mldec.calibration import calibrated
from mldec.checkpoint import Loaded, load_model, scoring
from mldec.config.compose import override
from mldec.data.fingerprint import difference, fingerprint
from mldec.data.types import DataModule, ImageDataset, picture
from mldec.errors import ConfigError, DataError, say, visible, writing
from mldec.evaluation import all_scores, fit_to_device
from mldec.files.results import ResultFile, check_targets, to_json, write_result
from mldec.runtime import distributed

log = logging.getLogger("mldec")

COLUMNS = ("rank", "image", "class", "label", "probability", "suspected")
PAGE = "label_errors.html"
MAX_PICTURES = 60  # per section of the page
MAX_PRINTED = 10  # pairs, and unreadable images, that are printed
MAX_CLASSES = 20  # that are printed
THUMBNAIL = 240  # pixels of the longer side of a picture
QUALITY = 80  # of the JPEG files

_STYLE = """
body { margin: 1rem; font: 16px/1.4 system-ui, sans-serif; color: #222; background: #fff; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: 1rem;
     margin: 0; padding: 0; list-style: none; }
img { display: block; width: 100%; height: 10rem; object-fit: contain; background: #eee; }
p { margin: 0.2rem 0; overflow-wrap: anywhere; }
small { color: #555; }
.suspected b { color: #a40000; }
"""


@dataclass(frozen=True)
class Ranking:
    """All M annotated pairs of an image and a class, most suspicious first.

    Attributes:
        images: index of the image, int64 [M].
        classes: index of the class, int64 [M].
        present: whether the label says that the image shows the class, bool [M].
        probabilities: that the image shows the class, calibrated, float64 [M].
        suspected: whether the label is counted as wrong, see `suspected_labels`, bool [M].
    """

    images: np.ndarray
    classes: np.ndarray
    present: np.ndarray
    probabilities: np.ndarray
    suspected: np.ndarray

    def __len__(self) -> int:
        return len(self.images)


def rank(logits: np.ndarray, labels: np.ndarray) -> Ranking:
    """Rank all annotated pairs by the calibrated probability of their label, lowest first.

    Args:
        logits: of a model that was not trained on the images, [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
    """
    probabilities = calibrated(logits, labels)

    # Equal probabilities keep the order of the images.
    images, classes = np.nonzero(labels >= 0)
    present = labels[images, classes] == 1
    of_class = probabilities[images, classes]
    order = np.argsort(np.where(present, of_class, 1 - of_class), kind="stable")

    suspected = suspected_labels(probabilities, labels)[images, classes]
    return Ranking(images[order], classes[order], present[order], of_class[order], suspected[order])


def suspected_labels(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return which labels are counted as wrong, bool [N, K].

    The threshold of a label is the mean probability of that label among the images of the class
    that have it (equation 2 of the paper). A label is counted as wrong if the opposite label
    reaches the threshold of that one, and is the more probable of the two. The second condition is
    ours: the positives of a class that the model hardly knows have a low threshold, which many
    negatives reach. A class without images of the opposite label has no threshold, and no suspects.

    Args:
        probabilities: that the image shows the class, [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
    """
    of_present = _mean(probabilities, labels == 1)
    of_absent = _mean(1 - probabilities, labels == 0)

    # A comparison with NaN is false.
    rather_present = (probabilities >= of_present) & (probabilities > 0.5)
    rather_absent = (1 - probabilities >= of_absent) & (probabilities < 0.5)
    return np.where(labels == 1, rather_absent, rather_present & (labels == 0))


def _mean(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the mean of the chosen values per class, float64 [K]; NaN where none is chosen."""
    counts = chosen.sum(0)
    sums = np.where(chosen, values, 0).sum(0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


@dataclass(frozen=True)
class Judged:
    """N images with their labels of K classes, and what a model says of each.

    Attributes:
        dataset: that the images are from.
        classes: K names.
        indices: of the images in the dataset, int64 [N].
        labels: 1 (present), 0 (absent) or -1 (not annotated), int8 [N, K].
        logits: float32 [N, K].
        bad: one message per image that cannot be read; it is not among the N.
    """

    dataset: ImageDataset
    classes: tuple[str, ...]
    indices: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    bad: list[str]

    def name(self, image: int) -> str:
        """Describe an image: its path, if it has one."""
        return self.dataset.name(int(self.indices[image]))


def judge(path: str, model: Loaded, settings: list[str], *, split: str) -> Judged:
    """Score the images of a split; with data.fold the validation images are those of the fold.

    Args:
        path: of the checkpoint, for messages.
        model: that judges.
        settings: such as data.root=/data/mine; they change the config of the checkpoint.
        split: "val" or "train".

    Raises:
        CheckpointError: if the model has other classes than the data.
        ConfigError: for a wrong setting, or data with one label per image: the classes are not
            independent then.
        DataError: if the data cannot be read, or a score is not finite.
    """
    config = override(model.config, settings)
    device = distributed.pick_device(config.device)
    fit_to_device(config, settings, device)

    # The fold that was left out stays, where data=NAME replaces the node of the data.
    fold = model.config.data.get("fold")
    if fold is not None and not any(setting.startswith("data.fold=") for setting in settings):
        config = replace(config, data={**config.data, "fold": fold})
    data = build.data(build.check(config, ["data"]))

    judged = data.val if split == "val" else data.train
    if judged.classes.exclusive:
        raise ConfigError(
            "--checkpoint: wrong labels are looked for where an image may have several, "
            "this data has one label per image; leave it out"
        )
    network = scoring(model.model, model.classes, judged.classes, path)
    warn_of_training(path, model, data, split)

    # The training transform changes images at random, and data=NAME brings a size of its own.
    viewed = judged.viewed(model.transform)
    seen = replace(data, load_val=lambda: viewed, bad_images="skip")
    scores = all_scores(network, seen, config, device=device, path=path)
    if not len(scores.indices):
        raise DataError(f"no image can be read; the first message: {scores.bad[0]}")
    return Judged(
        viewed.dataset,
        judged.classes.names,
        scores.indices,
        scores.labels,
        scores.logits,
        scores.bad,
    )


def warn_of_training(path: str, model: Loaded, data: DataModule, split: str) -> None:
    """Warn if a model may have been trained on the images to judge: it learns wrong labels too."""
    doubt = "if these images were among it, their wrong labels were learned and few are found"
    changed = None
    if model.fingerprint is not None:
        changed = difference(model.fingerprint, fingerprint(data.train))

    if model.fingerprint is None:
        log.warning(f"{path} does not say on which data it was trained: {doubt}")
    elif changed is not None:
        log.warning(f"{path} was trained on other data ({changed}): {doubt}")
    elif split == "train":
        log.warning(
            f"{path} was trained on these images, and their wrong labels too: more of them are "
            f"found with models trained with data.fold=1/N to N/N, each judging the fold that it "
            f"left out"
        )


def run(args: argparse.Namespace) -> None:
    """Rank the labels of a dataset, print the first ones, and write the files.

    Args:
        args: the command line; see `mldec.check_data.parser`.

    Raises:
        UserError: for a wrong setting, or a checkpoint or data that cannot be used.
    """
    check_targets(args.json, args.errors)
    model = load_model(args.checkpoint, weights=args.weights, plugins=args.plugin)

    # A folder that cannot be made is found now, not after all images were scored.
    if args.out:
        with writing(args.out):
            Path(args.out).mkdir(parents=True, exist_ok=True)
        check_targets(str(Path(args.out) / PAGE))

    judged = judge(args.checkpoint, model, args.settings, split=args.split)
    for message in judged.bad[:MAX_PRINTED]:
        log.warning(f"left out: {message}")
    if len(judged.bad) > MAX_PRINTED:
        log.warning(f"left out: {len(judged.bad) - MAX_PRINTED:,} more (all with --json)")

    ranking = rank(judged.logits, judged.labels)
    summary = (
        f"{len(judged.labels):,} images x {len(judged.classes)} classes of {args.split}, judged by "
        f"{args.checkpoint}: {int(ranking.suspected.sum()):,} of {len(ranking):,} labels are "
        f"suspected"
    )
    say(summary)
    tell(judged, ranking)

    if args.errors:
        write_pairs(args.errors, judged, ranking, args.rows)
    if args.out:
        write_result(str(Path(args.out) / PAGE), page(summary, sections(judged, ranking)))
    if args.json:
        write_result(args.json, to_json(report(args, judged, ranking), indent=1) + "\n")


@dataclass(frozen=True)
class Suspect:
    """One pair of an image and a class.

    Attributes:
        rank: from 1, the most suspicious pair.
        image: its path.
        class_name: of the pair.
        present: whether the label says that the image shows the class.
        probability: that it does, as the model says.
        suspected: whether confident learning counts the label as wrong.
    """

    rank: int
    image: str
    class_name: str
    present: bool
    probability: float
    suspected: bool


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
            yield pair, picture(judged.dataset, int(judged.indices[image]))

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
        "checkpoint": args.checkpoint,
        "split": args.split,
        "images": len(judged.labels),
        "left_out": judged.bad,
        "labels": len(ranking),
        "suspected": int(ranking.suspected.sum()),
        "per_class": class_counts(judged, ranking),
    }


def page(summary: str, sections: Mapping[str, Iterable[tuple[Suspect, Image.Image]]]) -> str:
    """Return the page.

    Args:
        summary: one sentence above the pictures.
        sections: under each heading pairs and the pictures of their images, in their order.
    """
    lists = "\n".join(_section(heading, suspects) for heading, suspects in sections.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Labels that may be wrong</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Labels that may be wrong</h1>
<p>{_text(summary)}</p>
{lists}
</body>
</html>
"""


def _section(heading: str, suspects: Iterable[tuple[Suspect, Image.Image]]) -> str:
    """Return a heading and the list of its pairs."""
    items = "\n".join(_item(suspect, image) for suspect, image in suspects)
    return f"<h2>{_text(heading)}</h2>\n<ol>\n{items}\n</ol>"


def _item(suspect: Suspect, image: Image.Image) -> str:
    """Return the list item of a pair."""
    label = "present" if suspect.present else "absent"
    name = _text(suspect.class_name)
    mark = ' class="suspected"' if suspect.suspected else ""
    return (
        f"<li{mark}>"
        f'<img src="{_data_uri(image)}" alt="{_text(suspect.image)}">'
        f"<p>{suspect.rank}. <b>{name}</b> is labelled {label}; present with probability "
        f"{suspect.probability:.3f}</p>"
        f"<p><small>{_text(suspect.image)}</small></p>"
        f"</li>"
    )


def _data_uri(image: Image.Image) -> str:
    """Return a small copy of a picture as the text of a JPEG file."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))

    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _text(text: str) -> str:
    """Return text for HTML: escaped, with `?` for control characters and what is not Unicode."""
    return escape(visible(text))
