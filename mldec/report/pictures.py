"""Small copies of the images of a report, within a budget of bytes."""

import io

import numpy as np
from PIL import Image

from mldec.data.base import ImageDataset, StoredImages, fixed_sample, picture
from mldec.data.transforms import EvalTransform
from mldec.report.content import Picture

SIDE = 160  # pixels of the longer side
QUALITY = 75  # of the JPEG files
BUDGET = 12_000_000  # bytes of all JPEG files: a third more as text of the page


class Album:
    """The pictures of a report, each image once.

    Args:
        dataset: that the images are from.
        indices: index of each of the N scored images in the dataset, [N].
        labels: of the images, int8 [N, K].
        names: of the K classes.
        budget: bytes that all pictures together may have.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        indices: np.ndarray,
        labels: np.ndarray,
        names: tuple[str, ...],
        *,
        budget: int = BUDGET,
    ) -> None:
        self.dataset, self.indices, self.labels, self.names = dataset, indices, labels, names
        self.left = budget
        self.pictures: list[Picture] = []
        self._number_of: dict[int, int] = {}

    def add(self, row: int) -> int | None:
        """Return the number of an image's picture; None if the budget is used up.

        Args:
            row: of the image among the N.

        Raises:
            DataError: if the image cannot be read again.
        """
        if row in self._number_of:
            return self._number_of[row]
        if self.left <= 0:
            return None

        index = int(self.indices[row])
        buffer = io.BytesIO()
        thumbnail(self.dataset, index).save(buffer, "JPEG", quality=QUALITY)
        self.left -= buffer.tell()

        labels = tuple(self.names[k] for k in np.flatnonzero(self.labels[row] == 1))
        self.pictures.append(Picture(self.dataset.name(index), buffer.getvalue(), labels))
        self._number_of[row] = len(self.pictures) - 1
        return self._number_of[row]


def thumbnail(dataset: ImageDataset, index: int) -> Image.Image:
    """Return a small copy of what the model sees of an image.

    The transform of evaluation shows the model the whole image, squeezed into a square, which the
    small copy does not need; or it crops the centre, beyond which there is nothing to explain.
    """
    if sees_all(dataset):
        shown = picture(dataset, index)
    else:
        image, _ = fixed_sample(dataset, index)
        shown = Image.fromarray(image.permute(1, 2, 0).numpy())
    shown.thumbnail((SIDE, SIDE))
    return shown


def sees_all(dataset: ImageDataset) -> bool:
    """Tell whether the model sees the whole of an image file."""
    if not isinstance(dataset, StoredImages):
        return False
    return isinstance(dataset.transform, EvalTransform) and dataset.transform.crop is None
