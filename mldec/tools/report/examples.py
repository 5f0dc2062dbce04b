"""The photos of a report: examples, confusions, thumbnails and heat maps."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, groupby, product
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from mldec.data.images import read_image
from mldec.data.transforms import EvalTransform
from mldec.data.types import ImageDataset, ImageFiles, StoredImages, fixed_sample
from mldec.errors import ConfigError
from mldec.evaluation.frozen_features import StoredTokens
from mldec.evaluation.inference import for_inference
from mldec.evaluation.open import EvaluationSetup
from mldec.runtime.console import progress_bar
from mldec.tools.heat_maps import Explainer
from mldec.tools.pages import data_url
from mldec.tools.report.statistics import SEED, Predictions

IMAGES_PER_KIND = 6  # images of each class and kind, and of each confusion
MAX_CLASSES = 100  # classes with images
MAX_CONFUSIONS = 4
MAX_DECISIONS = 50  # listed labels and predictions of an image
HEAT_BATCH = 4  # images; larger batches are slower on a CPU, whose cache they exceed

PICTURE_SIDE = 320  # pixels of the longer side of an enlarged image
THUMBNAIL_SIDE = 96
# Nearly as small as WebP, and written five times as fast.
JPEG: dict[str, Any] = {"quality": 65, "optimize": True}
# The gallery is a sample of larger data. The data URL of a thumbnail has about 2,200 bytes.
MAX_GALLERY = 5_000
MAX_GALLERY_BYTES = 20_000_000

# True positive, false positive, false negative, or predicted without an annotation.
Kind = Literal["right", "wrong", "missed", "unknown"]
KINDS: dict[int, Kind] = {1: "right", 0: "wrong", -1: "unknown"}  # of predictions, by label


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
    is_file: bool  # whether the name is the path of a file, not of an image in an archive
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


def list_decisions(predictions: Predictions, row: int) -> list[Decision]:
    """Return the labels and predictions of an image with the highest scores."""
    own = replace(predictions, logits=predictions.logits[[row]], labels=predictions.labels[[row]])
    decided = own.decided(slice(None), own.logits.T)[:, 0]
    [labels] = own.labels
    [scores] = own.probabilities(own.logits)

    decisions = []
    listed = np.flatnonzero(decided | (labels == 1))
    for index in listed[np.argsort(-scores[listed], kind="stable")[:MAX_DECISIONS]].tolist():
        kind: Kind = KINDS[labels[index]] if decided[index] else "missed"
        decisions.append(Decision(index, kind, round(float(scores[index]), 4)))
    return decisions


def find_confusions(decisions: list[list[Decision]]) -> list[Confusion]:
    """Find the pairs of a missed and a wrongly predicted class with the most images."""
    none: list[tuple[int | None, float]] = [(None, 0.0)]  # no class, and its score
    rows: dict[tuple[int | None, int | None], list[tuple[float, int]]] = defaultdict(list)
    for row, own in enumerate(decisions):
        missed = [(one.class_index, one.score) for one in own if one.kind == "missed"]
        wrong = [(one.class_index, one.score) for one in own if one.kind == "wrong"]
        if missed or wrong:
            for (first, low), (second, high) in product(missed or none, wrong or none):
                rows[first, second].append((low - high, row))

    confusions = []
    for pair in sorted(rows, key=lambda pair: -len(rows[pair]))[:MAX_CONFUSIONS]:
        best = [row for _, row in sorted(rows[pair])[:IMAGES_PER_KIND]]
        confusions.append(Confusion(*pair, len(rows[pair]), best))
    return confusions


def make_photos(
    dataset: ImageDataset,
    indices: np.ndarray,
    decisions: list[list[Decision]],
    enlarged: set[int],
    used_bytes: int = 0,
) -> tuple[dict[int, Photo], list[int]]:
    """Return photos by row, and the rows of the gallery.

    `indices` [N] are the indices of the scored images in the dataset. The rows `enlarged` have a
    larger picture. Other thumbnails take `used_bytes` of the bytes of the gallery.
    """
    are_files = isinstance(dataset, StoredImages) and isinstance(dataset.storage, ImageFiles)

    def make(row: int) -> Photo:
        index = int(indices[row])
        image = small_image(dataset, index, PICTURE_SIDE if row in enlarged else THUMBNAIL_SIDE)
        picture = data_url(image, **JPEG) if row in enlarged else None
        image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        name = dataset.name(index)
        return Photo(name, are_files, decisions[row], data_url(image, **JPEG), picture)

    order = np.random.default_rng(SEED).permutation(len(indices))[:MAX_GALLERY].tolist()
    rows = sorted(enlarged.union(order))
    # Threads are fast here: Pillow releases the GIL.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        results = progress_bar(threads.map(make, rows), desc="photos", total=len(rows))
        photos = dict(zip(rows, results, strict=True))

    sizes = np.cumsum([len(photos[row].thumbnail) for row in order])
    gallery = sorted(order[: np.searchsorted(sizes, MAX_GALLERY_BYTES - used_bytes, "right")])
    return {row: photos[row] for row in enlarged.union(gallery)}, gallery


def small_image(dataset: ImageDataset, index: int, side: int) -> Image.Image:
    """Return the model input with the aspect ratio of the stored image, at most `side` pixels."""
    if (
        isinstance(dataset, StoredImages)
        and isinstance(dataset.transform, EvalTransform)
        and dataset.transform.crop is None
    ):
        image = read_image(dataset.name(index), dataset.storage.content(index), draft=side)
    else:
        pixels, _ = fixed_sample(dataset, index)
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.thumbnail((side, side))
    return image


def model_columns(setup: EvaluationSetup) -> list[int]:
    """Return the index of each class of the data in the logits of the model."""
    # Zero-shot models score the classes of the data. Other models may have another class order.
    names = setup.data.val.classes.names
    if setup.data.val.classes.word_vectors is not None:
        return list(range(len(names)))
    columns_by_name = {name: column for column, name in enumerate(setup.loaded.classes.names)}
    return [columns_by_name[name] for name in names]


def thumbnail(dataset: ImageDataset, index: int) -> str:
    """Return the thumbnail of an image as a data URL; see `small_image`."""
    return data_url(small_image(dataset, index, THUMBNAIL_SIDE), **JPEG)


def add_heat_maps(
    examples: list[Example], setup: EvaluationSetup, scored: ImageDataset, indices: np.ndarray
) -> tuple[list[Example], str]:
    """Add heat maps to the examples, if the model supports them. The model is then on the CPU.

    `indices` [N] are the indices of the scored images in the validation split. `scored` is the
    dataset that was scored: this split, or its cached tokens. Also returns a note on the method, or
    the reason why there are no heat maps.
    """
    dataset = setup.data.val.dataset
    classes = setup.data.val.classes
    column_of = model_columns(setup)

    # Each image passes through the backbone once for all its classes. A batch needs as many
    # backward passes as its image with the most classes.
    by_row = sorted(examples, key=attrgetter("row"))
    groups = [list(group) for _, group in groupby(by_row, key=attrgetter("row"))]
    groups.sort(key=len)

    heats: dict[tuple[int, int], np.ndarray] = {}  # by row and class
    model = setup.loaded.model.to(setup.device)
    image_size = setup.data.transform.image_size
    if isinstance(scored, StoredTokens) and not model.needs_blocks:
        # The backbone has already computed these tokens. Blocks of features have no positions.
        dataset = scored
    else:
        model = for_inference(model, image_size, None, fold=setup.config.train.fold_batchnorms)
    # Convolutions are faster with this layout.
    model = model.to(memory_format=torch.channels_last)
    try:
        explainer = Explainer(model, image_size, classes.word_vectors)
        for start in progress_bar(range(0, len(groups), HEAT_BATCH), desc="heat maps"):
            batch = groups[start : start + HEAT_BATCH]
            inputs = [fixed_sample(dataset, int(indices[own[0].row]))[0] for own in batch]
            columns = [[column_of[example.class_index] for example in own] for own in batch]
            maps = explainer.maps(torch.stack(inputs).to(setup.device), columns)
            for example, heat in zip(chain(*batch), torch.cat(maps), strict=True):
                highest = heat.max()
                if highest > 0:
                    pixels = (255 * heat / highest).round().byte().numpy()
                    heats[example.row, example.class_index] = pixels
    except ConfigError as error:
        return examples, f"There are no heat maps: {error}."
    finally:
        setup.loaded.model.cpu()
    explained = [replace(each, heat=heats.get((each.row, each.class_index))) for each in examples]
    return explained, f"Heat maps: {explainer.method}."
