"""CIFAR-100: 60,000 pictures of 32 x 32 pixels in three pickles, read with an unpickler that can only make arrays."""

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
from mldec.files.text import open_binary

_SEE = "see DATASETS.md, section CIFAR-100"
_SIDE = 32


def cifar100(*, root: str, top_k: int | None = None) -> Source:
    """Return CIFAR-100: 50,000 training and 10,000 test pictures with the 100 fine classes.

    Args:
        root: the folder cifar-100-python with its files train, test and meta, or the folder that holds it.
        top_k: see `SingleLabelEvaluator`.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ValueError: A value is out of range.
    """
    task = SingleLabel(top_k)
    folder = check_folder(root, "CIFAR-100", _SEE)
    folder = folder / "cifar-100-python" if (folder / "cifar-100-python").is_dir() else folder
    return Source(
        load=partial(_load_split, folder),
        train="train",
        val="test",
        task=task,
        where=folder,
        see=_SEE,
    )


class Pictures:
    """Pictures in main memory; see `mldec.data.base.Storage`.

    Args:
        file: that they come from, for messages.
        pixels: uint8 [N, 32, 32, 3].
        numbers: of the pictures in the file, int64 [N]; None counts from 0.
    """

    def __init__(self, file: Path, pixels: np.ndarray, numbers: np.ndarray | None = None) -> None:
        self.file = file
        self.pixels = pixels
        self.numbers = np.arange(len(pixels)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, index: int) -> str:
        """Describe the picture in messages: its number in the file."""
        return f"picture {self.numbers[index]} of {self.file}"

    @property
    def keys(self) -> np.ndarray:
        """The pixels, uint8 [N, 32, 32, 3]."""
        return self.pixels

    def content(self, index: int) -> bytes:
        """Return the picture as a PNG file, which loses nothing."""
        buffer = io.BytesIO()
        Image.fromarray(self.pixels[index]).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def select(self, images: np.ndarray) -> "Pictures":
        """Return some of the pictures: bool [N], or their indices in the wanted order."""
        return Pictures(self.file, self.pixels[images], self.numbers[images])

    def absent(self) -> np.ndarray:
        """Tell which pictures are not there: none, bool [N]."""
        return np.zeros(len(self), bool)

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """See `mldec.data.base.Storage`: there are no checksums to compare the pictures with."""


def _load_split(folder: Path, split: str, cache: TableCache) -> LabelledImages:
    """Return the pictures of a split; there is nothing to cache."""
    classes = _read_names(folder / "meta")
    file = folder / split
    content = _unpickle(file)

    pixels, labels = content.get("data"), content.get("fine_labels")
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (3 * _SIDE * _SIDE,)
    ):
        raise DataError(
            f"{file}: its 'data' is not uint8 of {3 * _SIDE * _SIDE} values per picture; {_SEE}"
        )
    if not isinstance(labels, list) or len(labels) != len(pixels) or not len(labels):
        raise DataError(f"{file}: its 'fine_labels' are not one label per picture; {_SEE}")
    wrong = next(
        (label for label in labels if type(label) is not int or not 0 <= label < len(classes)), None
    )
    if wrong is not None:
        raise DataError(f"{file}: the label {wrong!r} is not below {len(classes)}; {_SEE}")

    # Stored as rows of red, then green, then blue.
    pictures = np.ascontiguousarray(pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))
    return LabelledImages(
        Pictures(file, pictures), from_single(np.array(labels), len(classes)), classes
    )


def _read_names(file: Path) -> tuple[str, ...]:
    names = _unpickle(file).get("fine_label_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: it has no list of 'fine_label_names'; {_SEE}")
    return check_names(names, file, _SEE)


def _dtype(kind: str, align: Any = False, copy: Any = False) -> np.dtype:
    return np.dtype(
        kind, bool(align), bool(copy)
    )  # Python 2 wrote 0 and 1, of which numpy now warns


class _ArraysOnly(pickle.Unpickler):
    """An unpickler for containers, numbers, text and numpy arrays; whatever else a file names is refused."""

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
    try:
        with open_binary(file) as stream:
            content = _ArraysOnly(stream, encoding="latin1").load()  # written by Python 2
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); {_SEE}") from error
    except (
        Exception
    ) as error:  # of a damaged file almost anything: EOFError, IndexError, MemoryError
        what = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file} is refused or damaged ({what}); restore it, {_SEE}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a CIFAR-100 file: it holds no dictionary; {_SEE}")
    return content
