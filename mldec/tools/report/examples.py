"""The photos of a report: examples, confusions, thumbnails and heat maps."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from mldec.data.transforms import EvalTransform
from mldec.data.types import ImageDataset, ImageFiles, StoredImages, fixed_sample, picture
from mldec.errors import ConfigError
from mldec.evaluation.open import EvaluationSetup
from mldec.evaluators.multi_label import Counts
from mldec.runtime.console import progress_bar
from mldec.tools.pages import data_url
from mldec.tools.predict.heat_maps import Explainer
from mldec.tools.report.statistics import SEED, Predictions

IMAGES_PER_KIND = 6  # images of each class and kind, and of each confusion
MAX_CLASSES = 100  # classes with images
MAX_CONFUSIONS = 4
MAX_CONFUSED = 200  # classes that are searched for confusions, those with the most errors
MAX_DECISIONS = 50  # listed labels and predictions of an image
HEAT_BATCH = 16  # images

# Pixels of the longer side, and JPEG quality. At these qualities JPEG is nearly as small as WebP,
# and encoded ten times as fast.
PICTURE = (320, 70)
THUMBNAIL = (96, 60)
# A thumbnail has about 2.2 kB as a data URL, so this is enough for 5,000 of most photos.
MAX_GALLERY = 5_000
MAX_GALLERY_BYTES = 20_000_000

# True positive, false positive, false negative, or predicted without an annotation.
Kind = Literal["right", "wrong", "missed", "unknown"]


@dataclass(frozen=True)
class Example:
    """An image of one class."""

    class_index: int
    kind: Kind
    row: int  # row of the image in the scores
    score: float  # score of the class in [0, 1]
    heat: np.ndarray | None = None  # heat map, uint8 [h, w], with maximum 255


@dataclass(frozen=True)
class Confusion:
    """Images on which the model misses a class and wrongly predicts another one."""

    missed: int | None  # class index; None: all labels of the images are predicted
    predicted: int | None  # class index; None: the images have no false positive
    images: int  # number of these images
    rows: list[int]  # rows of the most confident errors


class Decision(NamedTuple):
    """A label or prediction of an image."""

    class_index: int
    kind: Kind
    score: float  # in [0, 1]


@dataclass(frozen=True)
class Photo:
    """An image of the report."""

    name: str  # path or key of the image
    path: Path | None  # None if the image is not a file, for example in an archive
    decisions: list[Decision]  # labels and predictions, the highest score first
    thumbnail: str  # JPEG file as a data URL
    picture: str | None = None  # a larger one


def select_examples(predictions: Predictions, class_ap: np.ndarray) -> list[Example]:
    """Select the most confident images of each kind, for the classes of the lowest AP [K]."""
    examples: list[Example] = []
    for index in np.argsort(class_ap, kind="stable")[:MAX_CLASSES].tolist():
        scores = np.ascontiguousarray(predictions.logits[:, index])
        labels = predictions.labels[:, index]
        decided = predictions.decided(np.array([index]), scores[None])[0]

        kinds: dict[Kind, tuple[np.ndarray, np.ndarray]] = {
            "right": (decided & (labels == 1), -scores),
            "wrong": (decided & (labels == 0), -scores),
            "missed": (~decided & (labels == 1), scores),
        }
        for kind, (mask, sort_key) in kinds.items():
            rows = np.flatnonzero(mask)
            rows = rows[np.argsort(sort_key[rows], kind="stable")[:IMAGES_PER_KIND]]
            values = predictions.probabilities(scores[rows])
            for row, value in zip(rows.tolist(), values.tolist(), strict=True):
                examples.append(Example(index, kind, row, value))
    return examples


def find_confusions(predictions: Predictions, counts: Counts) -> list[Confusion]:
    """Find the pairs of a missed and a wrongly predicted class with the most images."""
    errors = counts.predicted + counts.positives - 2 * counts.hits
    classes = np.argsort(-errors.numpy(), kind="stable")[:MAX_CONFUSED]
    logits = np.ascontiguousarray(predictions.logits[:, classes].T)
    labels = predictions.labels[:, classes].T
    decided = predictions.decided(classes, logits)
    missed = (labels == 1) & ~decided
    wrong = (labels == 0) & decided
    if predictions.exclusive:
        # If an image has several labels and one is predicted, the other labels are not confusions.
        missed &= ~predictions.top_is_right

    # The last row and column stand for no class: an image may have only one kind of error.
    missed = np.vstack([missed, wrong.any(0) & ~missed.any(0)])
    wrong = np.vstack([wrong, missed[:-1].any(0) & ~wrong.any(0)])
    images = missed.astype(np.float32) @ wrong.T.astype(np.float32)
    scores = np.vstack([predictions.probabilities(logits), np.zeros(len(labels.T))])

    confusions = []
    for cell in np.argsort(-images, axis=None, kind="stable")[:MAX_CONFUSIONS].tolist():
        first, second = divmod(cell, len(images))
        rows = np.flatnonzero(missed[first] & wrong[second])
        if len(rows):
            gaps = scores[first, rows] - scores[second, rows]
            best = rows[np.argsort(gaps, kind="stable")[:IMAGES_PER_KIND]].tolist()
            names = [*classes.tolist(), None]
            confusions.append(Confusion(names[first], names[second], len(rows), best))
    return confusions


def decisions_of(predictions: Predictions, row: int) -> list[Decision]:
    """Return the labels and predictions of an image with the highest scores."""
    own = replace(
        predictions,
        logits=predictions.logits[row : row + 1],
        labels=predictions.labels[row : row + 1],
    )
    decided = own.decided(slice(None), own.logits.T)[:, 0]
    [scores] = own.probabilities(own.logits)
    [labels] = own.labels

    listed = np.flatnonzero(decided | (labels == 1))
    listed = listed[np.argsort(-scores[listed], kind="stable")[:MAX_DECISIONS]]
    kinds: dict[int, Kind] = {1: "right", 0: "wrong", -1: "unknown"}
    decisions = []
    for index in listed.tolist():
        kind = kinds[labels[index]] if decided[index] else "missed"
        decisions.append(Decision(index, kind, round(float(scores[index]), 4)))
    return decisions


def make_photos(
    dataset: ImageDataset, indices: np.ndarray, predictions: Predictions, enlarged: set[int]
) -> tuple[dict[int, Photo], list[int]]:
    """Return photos by row, and the rows of the gallery.

    `indices` [N] are the indices of the scored images in the dataset. The rows `enlarged` have a
    larger picture. The gallery is a random sample if there are too many images.
    """

    def make(row: int) -> Photo:
        index = int(indices[row])
        size = PICTURE if row in enlarged else THUMBNAIL
        image = small_image(dataset, index, size[0])
        large = encode(image, size) if row in enlarged else None
        path = None
        if isinstance(dataset, StoredImages) and isinstance(dataset.storage, ImageFiles):
            path = Path(dataset.name(index))
        decisions = decisions_of(predictions, row)
        return Photo(dataset.name(index), path, decisions, encode(image, THUMBNAIL), large)

    order = np.random.default_rng(SEED).permutation(len(indices))[:MAX_GALLERY].tolist()
    rows = sorted(enlarged.union(order))
    # Threads are fast here: Pillow releases the GIL.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        results = progress_bar(threads.map(make, rows), desc="photos", total=len(rows))
        photos = dict(zip(rows, results, strict=True))

    sizes = np.cumsum([len(photos[row].thumbnail) for row in order])
    gallery = sorted(order[: np.searchsorted(sizes, MAX_GALLERY_BYTES, "right")])
    return {row: photos[row] for row in enlarged.union(gallery)}, gallery


def small_image(dataset: ImageDataset, index: int, side: int) -> Image.Image:
    """Return the model input with the aspect ratio of the stored image, at most `side` pixels."""
    transform = dataset.transform if isinstance(dataset, StoredImages) else None
    if isinstance(transform, EvalTransform) and transform.crop is None:
        image = picture(dataset, index, draft=side)
    else:
        pixels, _ = fixed_sample(dataset, index)
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.thumbnail((side, side))
    return image


def encode(image: Image.Image, size: tuple[int, int]) -> str:
    """Return an image as a data URL; `size` is the longer side in pixels and the JPEG quality."""
    side, quality = size
    image = image.copy()
    image.thumbnail((side, side))
    return data_url(image, quality=quality, optimize=True)


def add_heat_maps(
    examples: list[Example], setup: EvaluationSetup, indices: np.ndarray
) -> tuple[list[Example], str]:
    """Add heat maps to the examples, if the model supports them. The model is then on the CPU.

    `indices` [N] are the indices of the scored images in the validation split. Also returns a note
    on the method, or the reason why there are no heat maps.
    """
    # Zero-shot models score the classes of the data. Other models may have another class order.
    dataset = setup.data.val.dataset
    classes = setup.data.val.classes
    trained = classes
    if classes.word_vectors is None:
        trained = setup.loaded.classes
    column_of = {name: column for column, name in enumerate(trained.names)}

    # An image is an example of several classes, and passes through the backbone once.
    examples_of: dict[int, list[int]] = {}
    for number, example in enumerate(examples):
        examples_of.setdefault(example.row, []).append(number)
    # A batch needs as many backward passes as its image with the most classes.
    rows = sorted(examples_of, key=lambda row: len(examples_of[row]))

    explained = list(examples)
    model = setup.loaded.model.to(setup.device)
    try:
        explainer = Explainer(model, setup.data.transform.image_size, classes.word_vectors)
        for start in progress_bar(range(0, len(rows), HEAT_BATCH), desc="heat maps"):
            batch = rows[start : start + HEAT_BATCH]
            images = [fixed_sample(dataset, int(indices[row]))[0] for row in batch]
            columns = []
            for row in batch:
                own = [examples[number].class_index for number in examples_of[row]]
                columns.append([column_of[classes.names[index]] for index in own])

            maps = explainer.maps(torch.stack(images).to(setup.device), columns)
            for row, heats in zip(batch, maps, strict=True):
                for number, heat in zip(examples_of[row], heats, strict=True):
                    highest = heat.max()
                    if highest > 0:
                        pixels = (255 * heat / highest).round().byte().numpy()
                        explained[number] = replace(examples[number], heat=pixels)
    except ConfigError as error:
        return examples, f"There are no heat maps: {error}."
    finally:
        model.cpu()
    return explained, f"Heat maps: {explainer.method}."
