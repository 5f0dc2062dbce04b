"""The images that a report shows: which ones, small copies of them, and where the model looked."""

import io
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from PIL import Image

from mldec.checkpoint import Loaded
from mldec.data.transforms import EvalTransform
from mldec.data.types import DataModule, ImageDataset, Split, StoredImages, fixed_sample, picture
from mldec.evaluators.label_errors import rank
from mldec.predict.heat_maps import Explainer
from mldec.report.statistics import Answers

PER_KIND = 3  # images of each class and kind
MOST_CLASSES = 100  # with images
MOST_SUSPECTS = 60
SIDE = 160  # pixels of the longer side of a small copy
QUALITY = 75  # of the JPEG files
BUDGET = 12_000_000  # bytes of all JPEG files: a third more as text of the page
BATCH = 16  # images whose heat maps are made at a time

Kind = Literal["right", "wrong", "missed"]


@dataclass(frozen=True)
class Example:
    """An image of one class: surest right, surest wrong (false positive) or missed.

    Attributes:
        class_index: of the class.
        kind: "right", "wrong" (predicted, not labelled) or "missed" (labelled, not predicted).
        row: of the image among those that are scored.
        score: of the class, from 0 to 1.
        heat: where the model looked, uint8 [h, w], 255 at the maximum; None without a map.
    """

    class_index: int
    kind: Kind
    row: int
    score: float
    heat: np.ndarray | None = None


@dataclass(frozen=True)
class Suspect:
    """A label that is likely wrong.

    Attributes:
        class_index: of the class.
        row: of the image among those that are scored.
        present: what the label says.
        probability: that the image shows the class, calibrated.
    """

    class_index: int
    row: int
    present: bool
    probability: float


def classes_with_images(precision: np.ndarray, most: int = MOST_CLASSES) -> np.ndarray:
    """Choose the classes whose images are shown: all, or some from the best to the worst one.

    Args:
        precision: average precision of each class, NaN without a positive, [K].
        most: number of classes at most.

    Returns:
        Their indices, ascending; of many classes, those at equal distances in the order of the
        average precision.
    """
    if len(precision) <= most:
        return np.arange(len(precision))

    ranked = np.argsort(precision, kind="stable")
    ranked = ranked[: np.isfinite(precision).sum()]
    places = np.linspace(0, len(ranked) - 1, min(most, len(ranked))).round().astype(int)
    return np.sort(ranked[places])


def surest_examples(answers: Answers, classes: np.ndarray) -> list[Example]:
    """Choose the images of some classes, the surest of each kind first.

    A missed image is the surer the lower its score is.

    Args:
        answers: of N images and K classes.
        classes: indices of the classes.
    """
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

    Args:
        answers: of N images and K classes, which are independent of one another.
        classes: indices of the classes.
    """
    logits, labels = answers.logits[:, classes], answers.labels[:, classes]
    ranking = rank(logits, labels)

    halves = []
    for present in (True, False):
        chosen = ranking.suspected & (ranking.present == present)
        halves.append(np.flatnonzero(chosen)[: MOST_SUSPECTS // 2])
    return [
        Suspect(
            int(classes[ranking.classes[place]]),
            int(ranking.images[place]),
            bool(ranking.present[place]),
            float(ranking.probabilities[place]),
        )
        for place in np.sort(np.concatenate(halves))
    ]


@dataclass(frozen=True)
class Picture:
    """A small copy of an image.

    Attributes:
        name: path or key of the image.
        jpeg: the content of a JPEG file.
        labels: names of its classes.
    """

    name: str
    jpeg: bytes
    labels: tuple[str, ...]


class Album:
    """The pictures of a report, each image once.

    Args:
        split: that the images are from.
        indices: index of each of the N scored images in the split, [N].
        labels: of the images, int8 [N, K].
        budget: bytes that all pictures together may have.
    """

    def __init__(
        self, split: Split, indices: np.ndarray, labels: np.ndarray, *, budget: int = BUDGET
    ) -> None:
        self.dataset, self.names = split.dataset, split.classes.names
        self.indices, self.labels, self.left = indices, labels, budget
        self.pictures: dict[int, Picture] = {}

    def add(self, row: int) -> bool:
        """Make the picture of an image, by its row; tell whether the budget had room for it.

        Raises:
            DataError: if the image cannot be read again.
        """
        if row in self.pictures:
            return True
        if self.left <= 0:
            return False

        index = int(self.indices[row])
        buffer = io.BytesIO()
        thumbnail(self.dataset, index).save(buffer, "JPEG", quality=QUALITY)
        self.left -= buffer.tell()

        labels = tuple(self.names[k] for k in np.flatnonzero(self.labels[row] == 1))
        self.pictures[row] = Picture(self.dataset.name(index), buffer.getvalue(), labels)
        return True


def thumbnail(dataset: ImageDataset, index: int) -> Image.Image:
    """Return a small copy of what the model sees of an image.

    The transform of evaluation shows the model the whole image, squeezed into a square, which the
    small copy does not need; or it crops the centre, beyond which there is nothing to explain.
    """
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

    Args:
        examples: to explain.
        indices: index of each scored image in the dataset, [N].
        loaded: the checkpoint.
        data: the images, as the model sees them.
        device: that computes.

    Raises:
        ConfigError: if there are no heat maps of this model.
    """
    # A zero-shot model is asked for the classes of the data, another one has its own order.
    classes = data.val.classes
    known = loaded.classes.names if classes.queries is None else classes.names
    column_of = {name: column for column, name in enumerate(known)}

    places: dict[int, list[int]] = defaultdict(list)
    for place, example in enumerate(examples):
        places[int(indices[example.row])].append(place)

    explained = list(examples)
    model, images = loaded.model.to(device), list(places)
    try:
        explainer = Explainer(model, data.transform.image_size, classes.queries)
        for first in range(0, len(images), BATCH):
            batch = images[first : first + BATCH]
            inputs = torch.stack([fixed_sample(data.val.dataset, index)[0] for index in batch])
            wanted = [
                [column_of[classes.names[examples[place].class_index]] for place in places[index]]
                for index in batch
            ]
            maps = explainer.maps(inputs.to(device), wanted)
            for index, heats in zip(batch, maps, strict=True):
                for place, heat in zip(places[index], heats, strict=True):
                    explained[place] = replace(examples[place], heat=_as_bytes(heat.numpy()))
    finally:
        model.cpu()
    return explained, explainer.method


def _as_bytes(heat: np.ndarray) -> np.ndarray | None:
    """Return a heat map as uint8 with 255 at its maximum; None if it is zero."""
    if not heat.max() > 0:
        return None
    return np.round(255 * heat / heat.max()).astype(np.uint8)
