"""Stanford Cars and CIFAR-100 (single-label)."""

import io
import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core.multiarray import _reconstruct
from PIL import Image

from mldec.data.cache import cached_table
from mldec.data.labels import from_single
from mldec.data.source import Source
from mldec.data.splits import log_split
from mldec.data.table import Table, TableBuilder
from mldec.data.tasks import single_label
from mldec.data.types import Storage, StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.text import read_bytes
from mldec.names import check_names

_LABELED = "cars_test_annos_withlabels.mat"
_ONE_FILE = "cars_annos.mat"


def cars(*, root: str, train: str = "train", val: str = "test", top_k: int | None = None) -> Source:
    """Return Stanford Cars: 8,144 training and 8,041 test images.

    `root` has devkit/, cars_train/, cars_test/, and cars_test_annos_withlabels.mat (or in devkit/).
    The image folders may be nested, as in cars_test/cars_test/. Another layout is cars_annos.mat
    and car_ims/.
    """
    evaluator = single_label(top_k)
    folder = check_folder(root, "Stanford-Cars")
    load = partial(_load_split, folder)
    return Source(
        load=load, train=train, val=val, where=folder, evaluator=evaluator, exclusive=True
    )


def _load_split(root: Path, split: str, cache_dir: str | None) -> StoredImages:
    if split not in ("train", "test"):
        raise DataError(f"{root}: there is no split {split!r}; choose train or test")

    folder = root
    sources = [root / _ONE_FILE]
    if not sources[0].is_file():
        devkit = root / "devkit"
        annotations = devkit / f"cars_{split}_annos.mat"

        # The test file of the devkit has no labels. They were published later in another file.
        if split == "test":
            in_devkit = devkit / _LABELED
            annotations = in_devkit if in_devkit.is_file() else root / _LABELED
        sources = [annotations, devkit / "cars_meta.mat"]

        # The image folders of the Kaggle copy are nested.
        folder = root / f"cars_{split}"
        if (folder / folder.name).is_dir():
            folder = folder / folder.name

    table = cached_table(f"cars {split}", sources, partial(_parse, sources, split), cache_dir)
    return log_split("cars", split, in_folder(table, folder))


def _parse(sources: list[Path], split: str) -> Table:
    """Read a split. `sources` are annotations and class names, or a single file with both."""
    annotations = sources[0]
    meta = sources[-1]
    names = check_names(map(str, _load_variable(meta, "class_names")), meta)

    # The single file has both splits and a flag for test images.
    one_file = len(sources) == 1
    file_key = "relative_im_path" if one_file else "fname"

    builder = TableBuilder(names)
    with naming_errors(annotations, DataError, remedy="use annotations with labels"):
        for number, annotation in enumerate(_load_variable(annotations, "annotations"), 1):
            if one_file and bool(annotation["test"]) != (split == "test"):
                continue

            # MATLAB indices start at 1.
            column = int(annotation["class"]) - 1
            where = f"{annotations}, annotation {number}"
            builder.add(str(annotation[file_key]), {column: 1}, where)
    return builder.build(annotations)


def _load_variable(file: Path, name: str) -> np.ndarray:
    """Read a variable of a MATLAB file, at least 1-d. scipy does not execute code of the file."""
    from scipy.io import loadmat  # slow to import

    stream = io.BytesIO(read_bytes(file))
    with naming_errors(file, DataError, remedy="restore it"):
        content: dict[str, Any] = loadmat(stream, squeeze_me=True, variable_names=[name])
        return np.atleast_1d(content[name])


_SIDE = 32


def cifar100(*, root: str, top_k: int | None = None) -> Source:
    """Return CIFAR-100: 50,000 training and 10,000 test images with the 100 fine classes.

    `root` is the folder cifar-100-python with the files train, test and meta, or its parent.
    """
    evaluator = single_label(top_k)

    # The official archive has this folder.
    folder = check_folder(root, "CIFAR-100")
    if (folder / "cifar-100-python").is_dir():
        folder = folder / "cifar-100-python"

    load = partial(_load_cifar_split, folder)
    return Source(load=load, val="test", where=folder, evaluator=evaluator, exclusive=True)


@dataclass(frozen=True, eq=False)
class _Pictures(Storage):
    """N images in memory, read from one file."""

    file: Path
    pixels: np.ndarray  # uint8 [N, 32, 32, 3], RGB; also the keys
    numbers: np.ndarray  # int64 [N], indices of the images in the file

    def name(self, index: int) -> str:
        return f"picture {self.numbers[index]} of {self.file}"

    @property
    def keys(self) -> np.ndarray:
        return self.pixels

    def content(self, index: int) -> bytes:
        # PNG is a lossless format.
        buffer = io.BytesIO()
        Image.fromarray(self.pixels[index]).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def select(self, images: np.ndarray) -> "_Pictures":
        return _Pictures(self.file, self.pixels[images], self.numbers[images])


def _load_cifar_split(folder: Path, split: str, cache_dir: str | None) -> StoredImages:
    names = _unpickle(folder / "meta", "fine_label_names")
    classes = check_names(names, folder / "meta")

    file = folder / split
    pixels = _unpickle(file, "data")
    labels = _unpickle(file, "fine_labels")
    with naming_errors(file, DataError, remedy="restore it"):
        # Reshape [N, 3 * 32 * 32] (red, green, blue planes) to [N, 32, 32, 3].
        images = pixels.reshape(len(labels), 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
        pictures = _Pictures(file, np.ascontiguousarray(images, np.uint8), np.arange(len(images)))
        return StoredImages(pictures, from_single(np.array(labels), len(classes)), classes)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for plain containers and numpy arrays. Other objects raise an error."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            module = "numpy._core.multiarray"
        allowed = {
            ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy", "ndarray"): np.ndarray,
            # Python 2 wrote the flags as 0 and 1, which causes a warning in newer numpy.
            ("numpy", "dtype"): lambda kind, *flags: np.dtype(kind, *map(bool, flags)),
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")
        return allowed[module, name]


def _unpickle(file: Path, key: str) -> Any:
    """Return an entry of a pickled dictionary without executing code of the file."""
    stream = io.BytesIO(read_bytes(file))
    with naming_errors(file, DataError, remedy="restore it"):
        # Byte strings of Python 2 need an encoding.
        return _ArraysOnly(stream, encoding="latin1").load()[key]
