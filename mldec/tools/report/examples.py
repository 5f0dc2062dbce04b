"""The images of a report: their selection, thumbnails and heat maps."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image

from mldec.data.transforms import EvalTransform
from mldec.data.types import ImageDataset, StoredImages, fixed_sample, picture
from mldec.errors import ConfigError
from mldec.evaluation.open import EvaluationSetup
from mldec.tools.heat_maps import Explainer
from mldec.tools.pages import data_url
from mldec.tools.report.statistics import Predictions

IMAGES_PER_KIND = 3  # images of each class and kind
MAX_CLASSES = 100  # classes with images
SIDE = 160  # pixels of the longer side of a thumbnail
JPEG_QUALITY = 75

Kind = Literal["right", "wrong", "missed"]  # true positive, false positive, false negative


@dataclass(frozen=True)
class Example:
    """An image of one class."""

    class_index: int
    kind: Kind
    row: int  # row of the image in the scores
    score: float  # score of the class in [0, 1]
    heat: np.ndarray | None = None  # heat map, uint8 [h, w], with maximum 255


@dataclass(frozen=True)
class Thumbnail:
    """A thumbnail."""

    name: str  # path or key of the image
    url: str  # its JPEG file as a data URL
    labels: list[str]  # names of the positive classes


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


def make_thumbnail(dataset: ImageDataset, index: int, labels: list[str]) -> Thumbnail:
    """Return a thumbnail of the model input, with the aspect ratio of the stored image."""
    transform = dataset.transform if isinstance(dataset, StoredImages) else None
    if isinstance(transform, EvalTransform) and transform.crop is None:
        image = picture(dataset, index)
    else:
        pixels, _ = fixed_sample(dataset, index)
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())

    image.thumbnail((SIDE, SIDE))
    return Thumbnail(dataset.name(index), data_url(image, quality=JPEG_QUALITY), labels)


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

    explained = []
    model = setup.loaded.model.to(setup.device)
    try:
        explainer = Explainer(model, setup.data.transform.image_size, classes.word_vectors)
        for example in examples:
            image, _ = fixed_sample(dataset, int(indices[example.row]))
            column = trained.names.index(classes.names[example.class_index])
            [[heat]] = explainer.maps(image[None].to(setup.device), [[column]])
            highest = heat.max()
            if highest > 0:
                pixels = (255 * heat / highest).round().byte().numpy()
                example = replace(example, heat=pixels)
            explained.append(example)
    except ConfigError as error:
        return examples, f"There are no heat maps: {error}."
    finally:
        model.cpu()
    return explained, f"Heat maps: {explainer.method}."
