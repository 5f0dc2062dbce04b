"""Stanford-Cars: 196 models of cars, from the MATLAB files of its devkit, which are data only."""

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
from mldec.files.text import open_binary

_SEE = "see DATASETS.md, section Stanford-Cars"
_LABELLED = "cars_test_annos_withlabels.mat"
_ONE_FILE = "cars_annos.mat"


def cars(*, root: str, train: str = "train", val: str = "test", top_k: int | None = None) -> Source:
    """Return Stanford-Cars: 8,144 training and 8,041 test images.

    Args:
        root: folder with devkit/, cars_train/ and cars_test/ (also nested: cars_test/cars_test/) and
            cars_test_annos_withlabels.mat in it or in devkit/; or the other form: cars_annos.mat and car_ims/.
        train: split to learn from, "train" or "test".
        val: split to evaluate on.
        top_k: see `SingleLabelEvaluator`.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ValueError: A value is out of range.
    """
    task = SingleLabel(top_k)
    folder = check_folder(root, "Stanford-Cars", _SEE)
    return Source(
        load=partial(_load_split, folder), train=train, val=val, task=task, where=folder, see=_SEE
    )


def _load_split(root: Path, split: str, cache: TableCache) -> LabelledImages:
    if split not in ("train", "test"):
        raise DataError(f"Stanford-Cars has no split {split!r}: choose train or test; {_SEE}")

    if (root / _ONE_FILE).is_file():
        folder, sources = root, [root / _ONE_FILE]
    else:
        folder = root / f"cars_{split}"
        folder = (
            folder / folder.name if (folder / folder.name).is_dir() else folder
        )  # as the copy on Kaggle nests it
        sources = [_annotations(root, split), root / "devkit" / "cars_meta.mat"]

    table = cache.table(f"cars {split}", sources, partial(_parse, sources, split))
    log_split("cars", split, table)
    return in_folder(table, folder, _SEE)


def _annotations(root: Path, split: str) -> Path:
    """Return the file with the labels of a split: those of the test images came later, in a file of their own."""
    if split == "train":
        return root / "devkit" / "cars_train_annos.mat"
    for file in (root / _LABELLED, root / "devkit" / _LABELLED):
        if file.is_file():
            return file
    raise DataError(
        f"{root}: {_LABELLED} is absent; cars_test_annos.mat of the devkit has no labels; {_SEE}"
    )


def _parse(sources: list[Path], split: str) -> Table:
    annotations = _load(sources[0], "annotations")
    one_file = len(sources) == 1
    file_key = "relative_im_path" if one_file else "fname"
    for key in [file_key, "class", *(["test"] if one_file else [])]:
        if key not in (annotations.dtype.names or ()):
            raise DataError(f"{sources[0]}: its annotations have no field {key!r}; {_SEE}")

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
        builder.add(str(annotation[file_key]), {int(label) - 1: 1}, where)  # MATLAB counts from 1
    return builder.build(sources[0])


def _load(file: Path, name: str) -> np.ndarray:
    """Read one variable of a MATLAB file; scipy makes arrays of it and runs nothing."""
    try:
        with open_binary(file) as stream:
            content: dict[str, Any] = loadmat(stream, squeeze_me=True, variable_names=[name])
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); {_SEE}") from error
    except Exception as error:  # on a damaged file scipy raises almost anything
        raise DataError(
            f"{file} is not a MATLAB file ({' '.join(str(error).split())}); {_SEE}"
        ) from error
    if name not in content:
        raise DataError(f"{file} has no variable {name!r}; {_SEE}")
    return np.atleast_1d(content[name])
