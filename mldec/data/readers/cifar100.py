"""CIFAR-100: 60,000 images of 32 x 32 pixels in pickles.

A pickle can run code when it is loaded. The unpickler of this module builds containers, numbers,
text and arrays only, and refuses any other object.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core.multiarray import _reconstruct
from PIL import Image

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.labels import from_single
from mldec.data.names import check_names
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder
from mldec.data.task import SingleLabel
from mldec.errors import DataError
from mldec.files.text import read_bytes

_SEE = "see DATASETS.md, section CIFAR-100"
_SIDE = 32


def cifar100(*, root: str, top_k: int | None = None) -> Source:
    """Return CIFAR-100: 50,000 training and 10,000 test images with the 100 fine classes.

    Args:
        root: the folder cifar-100-python with the files train, test and meta, or its parent.
        top_k: see `SingleLabelEvaluator`.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ConfigError: `top_k` is below 2.
    """
    task = SingleLabel(top_k)

    # The official archive unpacks into a folder of this name.
    folder = check_folder(root, "CIFAR-100", _SEE)
    if (folder / "cifar-100-python").is_dir():
        folder = folder / "cifar-100-python"

    return Source(
        load=partial(_load_split, folder),
        train="train",
        val="test",
        task=task,
        where=folder,
        see=_SEE,
    )


class Pictures:
    """N images in main memory; see `mldec.data.base.Storage`.

    Args:
        file: the file that they were read from, for messages.
        pixels: uint8 [N, 32, 32, 3], RGB.
        numbers: position of each image in the file, int64 [N]; None stands for 0 to N - 1.
    """

    def __init__(self, file: Path, pixels: np.ndarray, numbers: np.ndarray | None = None) -> None:
        self.file = file
        self.pixels = pixels
        self.numbers = np.arange(len(pixels)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, index: int) -> str:
        """Describe the image in messages: its position in the file."""
        return f"picture {self.numbers[index]} of {self.file}"

    @property
    def keys(self) -> np.ndarray:
        """What tells the images apart: their pixels, uint8 [N, 32, 32, 3]."""
        return self.pixels

    def content(self, index: int) -> bytes:
        """Return the image as the bytes of a PNG file, which is lossless."""
        buffer = io.BytesIO()
        Image.fromarray(self.pixels[index]).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def select(self, images: np.ndarray) -> "Pictures":
        """Return the images of a mask, bool [N], or of a list of indices, in its order."""
        return Pictures(self.file, self.pixels[images], self.numbers[images])

    def absent(self) -> np.ndarray:
        """Return which images are absent, bool [N]: none."""
        return np.zeros(len(self), bool)

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Do nothing: the pickles have no checksums; see `mldec.data.base.Storage`."""


def _load_split(folder: Path, split: str, cache: TableCache) -> LabelledImages:
    """Return the images of a split; the pickle loads fast, so nothing is cached."""
    classes = _read_names(folder / "meta")
    file = folder / split
    content = _unpickle(file)

    # Each row of the data is one image: all red values, then green, then blue.
    pixels = content.get("data")
    values_per_image = 3 * _SIDE * _SIDE
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (values_per_image,)
    ):
        raise DataError(
            f"{file}: its 'data' is not uint8 of {values_per_image} values per picture; {_SEE}"
        )

    labels = content.get("fine_labels")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not len(labels):
        raise DataError(f"{file}: its 'fine_labels' are not one label per picture; {_SEE}")
    for label in labels:
        if type(label) is not int or not 0 <= label < len(classes):
            raise DataError(f"{file}: the label {label!r} is not below {len(classes)}; {_SEE}")

    # [N, 3 * 32 * 32] becomes [N, 32, 32, 3].
    channels_first = pixels.reshape(-1, 3, _SIDE, _SIDE)
    images = np.ascontiguousarray(channels_first.transpose(0, 2, 3, 1))
    return LabelledImages(
        Pictures(file, images), from_single(np.array(labels), len(classes)), classes
    )


def _read_names(file: Path) -> tuple[str, ...]:
    """Read the names of the fine classes."""
    names = _unpickle(file).get("fine_label_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: it has no list of 'fine_label_names'; {_SEE}")
    return check_names(names, file, _SEE)


def _dtype(kind: str, align: Any = False, copy: Any = False) -> np.dtype:
    """Build a dtype as `numpy.dtype` does, from arguments that Python 2 pickled."""
    # Python 2 wrote 0 and 1 for the flags, which newer numpy warns about.
    return np.dtype(kind, bool(align), bool(copy))


class _ArraysOnly(pickle.Unpickler):
    """An unpickler for containers, numbers, text and numpy arrays; it refuses all other objects."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): _dtype,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no array needs")
        return allowed[module, name]


def _unpickle(file: Path) -> dict[str, Any]:
    """Read a pickled dictionary without running any code in it.

    Raises:
        DataError: The file cannot be read, is damaged, holds a refused object or no dictionary.
    """
    stream = io.BytesIO(read_bytes(file, _SEE))
    try:
        # The files were written by Python 2, whose byte strings need an encoding.
        content = _ArraysOnly(stream, encoding="latin1").load()
    # A damaged pickle raises almost any exception: EOFError, IndexError, MemoryError, ...
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file} is refused or damaged ({reason}); restore it, {_SEE}") from error

    if not isinstance(content, dict):
        raise DataError(f"{file} is not a CIFAR-100 file: it holds no dictionary; {_SEE}")
    return content
