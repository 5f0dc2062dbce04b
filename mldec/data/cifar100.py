"""CIFAR-100: 60,000 pictures of 32 x 32 pixels in three pickles, read with an unpickler that can only make arrays."""

import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from PIL import Image
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.files import check_folder
from mldec.data.labels import Labels, from_single
from mldec.data.names import check_names
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import DataError
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.inputs import open_binary

_SEE = "see DATASETS.md, section CIFAR-100"
_SIDE = 32


def cifar100(
    *,
    root: str,
    image_size: int = 224,
    augment: str = "none",
    cutout: float = 0.0,
    flip: bool = True,
    crop: float = 0.6,
    interpolation: str = "bicubic",
    erase: float = 0.0,
    top_k: int | None = None,
    bad_images: str = "stop",
) -> DataModule:
    """Return CIFAR-100: 50,000 training and 10,000 test pictures, scaled up, with the 100 fine classes.

    Args:
        root: the folder cifar-100-python with its files train, test and meta, or the folder that holds it.
        image_size: side of the square input in pixels.
        augment: this and the next five are described at `mldec.data.transforms.TrainTransform`.
        cutout: see there.
        flip: see there.
        crop: see there.
        interpolation: see there; "random" evaluates with bicubic.
        erase: see there.
        top_k: see `SingleLabelEvaluator`.
        bad_images: see `DataModule`; these pictures are part of the files and whole or not at all.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(
        image_size=image_size,
        augment=augment,
        cutout=cutout,
        flip=flip,
        crop=crop,
        interpolation=interpolation,
        erase=erase,
    )
    check = EvalTransform(image_size=image_size, interpolation=interpolation.replace("random", "bicubic"))
    evaluator = partial(SingleLabelEvaluator, top_k=top_k)
    evaluator()  # refuses a wrong value now
    folder = check_folder(root, "CIFAR-100", _SEE)
    folder = folder / "cifar-100-python" if (folder / "cifar-100-python").is_dir() else folder

    def read(name: str, transform: Callable[[Image.Image], Tensor]) -> Split:
        classes = _read_names(folder / "meta")
        nothing = torch.zeros(0, len(classes))
        evaluator().update(nothing, nothing)  # refuses a top_k above the number of classes now
        return Split(_read_pictures(folder / name, len(classes), transform), Classes(classes, exclusive=True))

    return DataModule(lambda: read("train", learn), lambda: read("test", check), evaluator, check, bad_images)


class Pictures:
    """The pictures of a split; see `mldec.data.base.ImageDataset`."""

    def __init__(
        self, file: Path, pictures: np.ndarray, labels: Labels, transform: Callable[[Image.Image], Tensor]
    ) -> None:
        self.file, self.pictures, self.labels, self.transform = file, pictures, labels, transform
        self.image_keys = pictures  # see `mldec.data.fingerprint.Identified`

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K]."""
        target = self.labels.row(index)
        return self.transform(Image.fromarray(self.pictures[index])), target

    def content(self, index: int) -> bytes:
        """Return the picture as a PNG file, which loses nothing."""
        buffer = io.BytesIO()
        Image.fromarray(self.pictures[index]).save(buffer, "PNG")
        return buffer.getvalue()

    def name(self, index: int) -> str:
        """Return where the picture is."""
        return f"picture {index} of {self.file}"


def _read_pictures(file: Path, num_classes: int, transform: Callable[[Image.Image], Tensor]) -> Pictures:
    content = _unpickle(file)
    pixels, labels = content.get("data"), content.get("fine_labels")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * _SIDE * _SIDE,):
        raise DataError(f"{file}: its 'data' is not uint8 of {3 * _SIDE * _SIDE} values a picture; {_SEE}")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not len(labels):
        raise DataError(f"{file}: its 'fine_labels' are not one label a picture; {_SEE}")
    wrong = next((label for label in labels if type(label) is not int or not 0 <= label < num_classes), None)
    if wrong is not None:
        raise DataError(f"{file}: the label {wrong!r} is not below {num_classes}; {_SEE}")
    # Stored as rows of red, then green, then blue.
    pictures = np.ascontiguousarray(pixels.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))
    return Pictures(file, pictures, from_single(np.array(labels), num_classes), transform)


def _read_names(file: Path) -> tuple[str, ...]:
    names = _unpickle(file).get("fine_label_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: it has no list of 'fine_label_names'; {_SEE}")
    return check_names(names, file, _SEE)


def _dtype(kind: str, align: Any = False, copy: Any = False) -> np.dtype:
    return np.dtype(kind, bool(align), bool(copy))  # Python 2 wrote 0 and 1, of which numpy now warns


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
    except Exception as error:  # of a damaged file almost anything: EOFError, IndexError, MemoryError
        what = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file} is refused or damaged ({what}); restore it, {_SEE}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} is not a CIFAR-100 file: it holds no dictionary; {_SEE}")
    return content
