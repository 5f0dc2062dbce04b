"""Stanford Cars and CIFAR-100, which have one label per image."""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core.multiarray import _reconstruct
from PIL import Image
from scipy.io import loadmat

from mldec.data.cache import TableCache
from mldec.data.settings import Source
from mldec.data.table import Table, TableBuilder, check_names, from_single, log_split
from mldec.data.tasks import SingleLabel
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError
from mldec.files.text import read_bytes

_SEE = "see DATASETS.md, section Stanford-Cars"
_LABELLED = "cars_test_annos_withlabels.mat"
_ONE_FILE = "cars_annos.mat"


def cars(*, root: str, train: str = "train", val: str = "test", top_k: int | None = None) -> Source:
    """Return Stanford Cars: 8,144 training and 8,041 test images.

    Two layouts are known. The first has devkit/, cars_train/ and cars_test/, and
    cars_test_annos_withlabels.mat in `root` or in devkit/; the image folders may be nested, as in
    cars_test/cars_test/. The second has cars_annos.mat and car_ims/.

    Args:
        root: folder of the data set, in either layout.
        train: split to learn from, "train" or "test".
        val: split to evaluate on.
        top_k: see `SingleLabelEvaluator`.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ConfigError: `top_k` is below 2.
    """
    task = SingleLabel(top_k)
    folder = check_folder(root, "Stanford-Cars", _SEE)

    return Source(
        load=partial(_load_split, folder), train=train, val=val, task=task, where=folder, see=_SEE
    )


def _load_split(root: Path, split: str, cache: TableCache) -> StoredImages:
    """Return the images of a split, in either layout."""
    if split not in ("train", "test"):
        raise DataError(f"Stanford-Cars has no split {split!r}: choose train or test; {_SEE}")

    if (root / _ONE_FILE).is_file():
        folder, sources = root, [root / _ONE_FILE]
    else:
        folder = root / f"cars_{split}"

        # The copy on Kaggle nests each image folder in another one of the same name.
        if (folder / folder.name).is_dir():
            folder = folder / folder.name
        sources = [_annotations(root, split), root / "devkit" / "cars_meta.mat"]

    table = cache.table(f"cars {split}", sources, partial(_parse, sources, split))
    log_split("cars", split, table)
    return in_folder(table, folder, _SEE)


def _annotations(root: Path, split: str) -> Path:
    """Return the annotation file of a split."""
    if split == "train":
        return root / "devkit" / "cars_train_annos.mat"

    # The devkit's own test file has no labels: they were published later, in another file.
    for file in (root / _LABELLED, root / "devkit" / _LABELLED):
        if file.is_file():
            return file
    raise DataError(
        f"{root}: {_LABELLED} is absent; cars_test_annos.mat of the devkit has no labels; {_SEE}"
    )


def _parse(sources: list[Path], split: str) -> Table:
    """Read the images and labels of a split.

    Args:
        sources: the annotation file and the file with the class names, or the one file with both.
        split: "train" or "test".
    """
    annotations = _load(sources[0], "annotations")

    # The single file holds both splits and marks the test images with a flag.
    one_file = len(sources) == 1
    file_key = "relative_im_path" if one_file else "fname"
    required_fields = [file_key, "class"]
    if one_file:
        required_fields.append("test")
    for field in required_fields:
        if field not in (annotations.dtype.names or ()):
            raise DataError(f"{sources[0]}: its annotations have no field {field!r}; {_SEE}")

    names = check_names(
        [str(name) for name in _load(sources[-1], "class_names")], sources[-1], _SEE
    )

    builder = TableBuilder(_SEE, classes=names)
    for number, annotation in enumerate(annotations, 1):
        if one_file and bool(annotation["test"]) != (split == "test"):
            continue

        where = f"{sources[0]}, annotation {number}"
        label = annotation["class"]
        if not isinstance(label, int | np.integer) or not 1 <= label <= len(names):
            raise DataError(
                f"{where}: class {label} is not a number from 1 to {len(names)}; {_SEE}"
            )

        # MATLAB counts from 1.
        builder.add(str(annotation[file_key]), {int(label) - 1: 1}, where)

    return builder.build(sources[0])


def _load(file: Path, name: str) -> np.ndarray:
    """Read one variable of a MATLAB file as an array of at least one dimension.

    scipy only parses arrays; no code in the file is run.

    Raises:
        DataError: The file cannot be read, is not a MATLAB file, or lacks the variable.
    """
    stream = io.BytesIO(read_bytes(file, _SEE))
    try:
        content: dict[str, Any] = loadmat(stream, squeeze_me=True, variable_names=[name])
    # On a damaged file scipy raises almost any exception.
    except Exception as error:
        raise DataError(
            f"{file} is not a MATLAB file ({' '.join(str(error).split())}); {_SEE}"
        ) from error

    if name not in content:
        raise DataError(f"{file} has no variable {name!r}; {_SEE}")
    return np.atleast_1d(content[name])


_SEE_CIFAR = "see DATASETS.md, section CIFAR-100"
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
    folder = check_folder(root, "CIFAR-100", _SEE_CIFAR)
    if (folder / "cifar-100-python").is_dir():
        folder = folder / "cifar-100-python"

    return Source(
        load=partial(_load_cifar_split, folder),
        train="train",
        val="test",
        task=task,
        where=folder,
        see=_SEE_CIFAR,
    )


class Pictures:
    """N images in main memory; see `mldec.data.types.Storage`.

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
        """Do nothing: the pickles have no checksums; see `mldec.data.types.Storage`."""


def _load_cifar_split(folder: Path, split: str, cache: TableCache) -> StoredImages:
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
            f"{file}: its 'data' is not uint8 of {values_per_image} values per picture; "
            f"{_SEE_CIFAR}"
        )

    labels = content.get("fine_labels")
    if not isinstance(labels, list) or len(labels) != len(pixels) or not len(labels):
        raise DataError(f"{file}: its 'fine_labels' are not one label per picture; {_SEE_CIFAR}")
    for label in labels:
        if type(label) is not int or not 0 <= label < len(classes):
            raise DataError(
                f"{file}: the label {label!r} is not below {len(classes)}; {_SEE_CIFAR}"
            )

    # [N, 3 * 32 * 32] becomes [N, 32, 32, 3].
    channels_first = pixels.reshape(-1, 3, _SIDE, _SIDE)
    images = np.ascontiguousarray(channels_first.transpose(0, 2, 3, 1))
    return StoredImages(
        Pictures(file, images), from_single(np.array(labels), len(classes)), classes
    )


def _read_names(file: Path) -> tuple[str, ...]:
    """Read the names of the fine classes."""
    names = _unpickle(file).get("fine_label_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: it has no list of 'fine_label_names'; {_SEE_CIFAR}")
    return check_names(names, file, _SEE_CIFAR)


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
    stream = io.BytesIO(read_bytes(file, _SEE_CIFAR))
    try:
        # The files were written by Python 2, whose byte strings need an encoding.
        content = _ArraysOnly(stream, encoding="latin1").load()
    # A damaged pickle raises almost any exception: EOFError, IndexError, MemoryError, ...
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{file} is refused or damaged ({reason}); restore it, {_SEE_CIFAR}"
        ) from error

    if not isinstance(content, dict):
        raise DataError(f"{file} is not a CIFAR-100 file: it holds no dictionary; {_SEE_CIFAR}")
    return content
