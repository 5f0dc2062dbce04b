"""Stanford Cars: 196 car models, read from the MATLAB files of the devkit."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.names import check_names
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table, TableBuilder, log_split
from mldec.data.task import SingleLabel
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


def _load_split(root: Path, split: str, cache: TableCache) -> LabelledImages:
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
