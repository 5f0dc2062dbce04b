"""The images that a report shows: which ones, small copies of them, and where the model looked."""

import io
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from PIL import Image

from mldec.checkpoint import Loaded
from mldec.data.transforms import EvalTransform
from mldec.data.types import DataModule, ImageDataset, Split, StoredImages, fixed_sample, picture
from mldec.evaluators.label_errors import rank
from mldec.tools.predict.heat_maps import Explainer
from mldec.tools.report.statistics import Answers

PER_KIND = 3  # images of each class and kind
MOST_CLASSES = 100  # with images
MOST_SUSPECTS = 60
SIDE = 160  # pixels of the longer side of a small copy
QUALITY = 75  # of the JPEG files
BUDGET = 12_000_000  # bytes of all JPEG files: a third more as text of the page
BATCH = 16  # heat maps that are made at a time

Kind = Literal["right", "wrong", "missed"]  # wrong is predicted, not labelled; missed the other way


@dataclass(frozen=True)
class Example:
    """An image of one class: surest right, surest wrong (false positive) or missed."""

    class_index: int
    kind: Kind
    row: int  # of the image among those that are scored
    score: float  # of the class, from 0 to 1
    heat: np.ndarray | None = None  # where the model looked, uint8 [h, w], 255 at the maximum


@dataclass(frozen=True)
class Suspect:
    """A label that is likely wrong."""

    class_index: int
    row: int  # of the image among those that are scored
    present: bool  # what the label says
    probability: float  # that the image shows the class, calibrated


def classes_with_images(precision: np.ndarray, most: int = MOST_CLASSES) -> np.ndarray:
    """Choose the classes whose images are shown, ascending: at equal distances in order of AP."""
    if len(precision) <= most:
        return np.arange(len(precision))

    ranked = np.argsort(precision, kind="stable")
    ranked = ranked[: np.isfinite(precision).sum()]
    count = min(most, len(ranked))
    places = np.linspace(0, len(ranked) - 1, count).round().astype(int)
    return np.sort(ranked[places])


def surest_examples(answers: Answers, classes: np.ndarray) -> list[Example]:
    """Choose the images of some classes, the surest of each kind first."""
    examples: list[Example] = []
    for index in classes.tolist():
        scores = np.ascontiguousarray(answers.logits[:, index])
        labels = answers.labels[:, index]
        decided = answers.decided(np.array([index]), scores[None])[0]

        kinds: dict[Kind, tuple[np.ndarray, np.ndarray]] = {
            "right": (decided & (labels == 1), -scores),
            "wrong": (decided & (labels == 0), -scores),
            "missed": (~decided & (labels == 1), scores),
        }
        for kind, (chosen, order) in kinds.items():
            rows = np.flatnonzero(chosen)
            rows = rows[np.argsort(order[rows], kind="stable")[:PER_KIND]]
            values = answers.probabilities(scores[rows])
            examples += [
                Example(index, kind, int(row), float(value))
                for row, value in zip(rows, values, strict=True)
            ]
    return examples


def suspected_labels(answers: Answers, classes: np.ndarray) -> list[Suspect]:
    """Choose the labels of some classes that are most likely wrong; see `label_errors.rank`.

    As many of the labels `present` as of the labels `absent`, if there are enough: of rare classes
    the ones or the others would come first.
    """
    ranking = rank(answers.logits[:, classes], answers.labels[:, classes])
    halves = []
    for present in (True, False):
        chosen = ranking.suspected & (ranking.present == present)
        halves.append(np.flatnonzero(chosen)[: MOST_SUSPECTS // 2])
    chosen = np.sort(np.concatenate(halves))
    columns = classes[ranking.classes], ranking.images, ranking.present, ranking.probabilities
    rows = zip(*(column[chosen].tolist() for column in columns), strict=True)
    return [Suspect(*values) for values in rows]


def first_to_look_at(
    suspects: list[Suspect], examples: list[Example], weakest: list[int], most: int = 8
) -> list[Suspect | Example]:
    """Choose different images: half of them suspected labels, then errors of the weakest classes.

    Of each class and kind the surest error comes first, then that of the next class.
    """
    errors: list[tuple[int, Example]] = []
    for kind in ("missed", "wrong"):
        for index in weakest:
            own = [one for one in examples if (one.class_index, one.kind) == (index, kind)]
            errors += enumerate(own)
    errors.sort(key=lambda error: error[0])

    chosen: dict[int, Suspect | Example] = {}
    first, rest = suspects[: most // 2], suspects[most // 2 :]
    ordered: list[Suspect | Example] = [*first, *(error for _, error in errors), *rest]
    for one in ordered:
        chosen.setdefault(one.row, one)
    return list(chosen.values())[:most]


@dataclass(frozen=True)
class Picture:
    """A small copy of an image, as the content of a JPEG file, with the names of its classes."""

    name: str  # path or key of the image
    jpeg: bytes
    labels: tuple[str, ...]


def album(
    split: Split, indices: np.ndarray, labels: np.ndarray, rows: list[int], budget: int = BUDGET
) -> dict[int, Picture]:
    """Return the pictures of a report by their rows, until the budget of bytes is spent.

    Of each scored image, `indices` [N] has its place in the split, `labels` [N, K] what it shows.
    """
    pictures: dict[int, Picture] = {}
    for row in dict.fromkeys(rows):
        if budget <= 0:
            break
        index = int(indices[row])
        buffer = io.BytesIO()
        thumbnail(split.dataset, index).save(buffer, "JPEG", quality=QUALITY)
        budget -= buffer.tell()

        labelled = np.flatnonzero(labels[row] == 1)
        names = tuple(split.classes.names[k] for k in labelled)
        pictures[row] = Picture(split.dataset.name(index), buffer.getvalue(), names)
    return pictures


def thumbnail(dataset: ImageDataset, index: int) -> Image.Image:
    """Return a small copy of what the model sees of an image, not squeezed into a square."""
    transform = dataset.transform if isinstance(dataset, StoredImages) else None
    if isinstance(transform, EvalTransform) and transform.crop is None:
        shown = picture(dataset, index)
    else:
        image, _ = fixed_sample(dataset, index)
        shown = Image.fromarray(image.permute(1, 2, 0).numpy())
    shown.thumbnail((SIDE, SIDE))
    return shown


def with_heat(
    examples: list[Example],
    indices: np.ndarray,
    loaded: Loaded,
    data: DataModule,
    device: torch.device,
) -> tuple[list[Example], str]:
    """Return the examples with heat maps, and how these were made, one sentence.

    A `ConfigError` says that there are none of this model. The scored images have `indices` [N].
    """
    # A zero-shot model is asked for the classes of the data, another one has its own order.
    classes = data.val.classes
    known = loaded.classes.names if classes.word_vectors is None else classes.names
    column_of = {name: column for column, name in enumerate(known)}

    explained = []
    model = loaded.model.to(device)
    try:
        explainer = Explainer(model, data.transform.image_size, classes.word_vectors)
        for first in range(0, len(examples), BATCH):
            batch = examples[first : first + BATCH]
            images = [fixed_sample(data.val.dataset, int(indices[one.row]))[0] for one in batch]
            wanted = [[column_of[classes.names[one.class_index]]] for one in batch]
            maps = explainer.maps(torch.stack(images).to(device), wanted)
            for example, [heat] in zip(batch, maps, strict=True):
                most = heat.max()
                # A map of zeros is none.
                pixels = (255 * heat / most).round().byte().numpy() if most > 0 else None
                explained.append(replace(example, heat=pixels))
    finally:
        model.cpu()
    return explained, explainer.method
