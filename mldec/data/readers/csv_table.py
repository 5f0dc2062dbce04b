"""Your own images with one or several labels each, listed in a CSV file.

Its columns are path and labels, and optionally negatives and split.
"""

from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.names import given_names, split_names
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table, TableBuilder, check_fraction, hold_out, log_split, path_inside
from mldec.data.task import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.errors import DataError
from mldec.files.text import csv_rows, open_binary

_SEE = "see DATASETS.md, section Your own data"
_COLUMNS = ("path", "labels", "negatives", "split")


def csv_table(
    *,
    root: str,
    file: str = "data.csv",
    images: str = "",
    separator: str = ";",
    classes: str | list[str] | None = None,
    exclusive: bool = False,
    train: str = "train",
    val: str = "val",
    val_fraction: float = 0.1,
    seed: int = 0,
    threshold: float = 0.5,
    top_k: int | None = None,
) -> Source:
    """Return the images of a CSV file, in its order.

    The first row names the columns, in any order: path and labels, optionally negatives and split,
    and no others. An image without a label is a negative of every class. With a column negatives,
    a class in neither list is not annotated (-1), and the metric is `mAP_partial`.

    Args:
        root: folder of the file.
        file: the CSV file in `root`: UTF-8, separated by commas, fields that hold commas in double
            quotes.
        images: folder in `root` that the paths are relative to.
        separator: the text between two labels of an image.
        classes: class names in their order, or a text file with one per line; None takes the sorted
            labels of all rows.
        exclusive: every image has exactly one label; the metric is top-1 instead of mAP.
        train: value of the column split in the rows to learn from.
        val: value of the column split in the rows to evaluate on.
        val_fraction: without a column split, the share of the images to hold out, in (0, 1); a hash
            of its path decides on each image.
        seed: decides which images are held out.
        threshold: with several labels, see `MultiLabel`.
        top_k: with one label per image, see `SingleLabelEvaluator`.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    check_fraction(val_fraction)
    if not separator.strip():
        raise ValueError("separator is blank: give the sign between two labels, such as ';'")

    folder = check_folder(root, "the CSV file", _SEE)
    source = folder / path_inside(file, "data.file", _SEE)
    image_folder = folder / path_inside(images, "data.images", _SEE) if images else folder

    form = Form(separator, given_names(classes, folder, _SEE), exclusive, val, val_fraction, seed)
    task = _task(source, exclusive, threshold, top_k)
    load = partial(_load_split, source, image_folder, form)

    return Source(
        load=load,
        train=train,
        val=val,
        task=task,
        where=source,
        see=_SEE,
        folder_setting="data.images",
    )


@dataclass(frozen=True)
class Form:
    """How the rows of a file are to be read; for the attributes see `csv_table`."""

    separator: str
    classes: tuple[str, ...] | None
    exclusive: bool
    val: str
    val_fraction: float
    seed: int


def _task(source: Path, exclusive: bool, threshold: float, top_k: int | None) -> Task:
    """Return the task that the settings and the header of the file stand for."""
    if exclusive:
        return SingleLabel(top_k)
    if top_k is not None:
        raise ValueError(
            f"top_k is {top_k}, for one label per image: set data.exclusive=true or leave it out"
        )
    task = MultiLabel(threshold)

    # A file that cannot be read is reported when a split is first used.
    try:
        with open_binary(source) as file:
            has_negatives = b"negatives" in file.readline().lower()
    except OSError:
        has_negatives = False
    return PartialLabels() if has_negatives else task


def _load_split(
    source: Path, image_folder: Path, form: Form, split: str, cache: TableCache
) -> LabelledImages:
    """Return the images of a split."""
    # Each of these settings changes the table, so all of them are part of the key in the cache.
    settings = sha256(repr((split, form)).encode(errors="surrogateescape")).hexdigest()
    table = cache.table(f"csv {settings}", [source], partial(_parse, source, split, form))

    log_split("csv", split, table)
    return in_folder(table, image_folder, _SEE)


def _parse(source: Path, split: str, form: Form) -> Table:
    """Return the images of a split.

    All rows are read, so that both splits have the same classes and a faulty row is always found.
    """
    rows = csv_rows(source, _SEE)
    _, header = next(rows, (1, [""]))
    header = [name.strip().lower() for name in header]

    has_known_columns = {"path", "labels"} <= set(header) <= set(_COLUMNS)
    has_duplicates = len(set(header)) < len(header)
    if not has_known_columns or has_duplicates:
        columns = ", ".join(header)
        raise DataError(
            f"{source}: the columns {columns} are not path, labels[, negatives][, split]; {_SEE}"
        )

    # Explicit negatives mean that a class in neither list is unknown.
    default = -1 if "negatives" in header else 0
    builder = TableBuilder(_SEE, classes=form.classes, default=default)
    split_of_rows = []
    for number, fields in rows:
        where = f"{source}, row {number}"
        if len(fields) != len(header):
            count = f"{len(fields)} fields, the header {len(header)}"
            raise DataError(f"{where} has {count}: quote fields with commas; {_SEE}")

        row = dict(zip(header, map(str.strip, fields), strict=True))
        builder.add(row["path"], _labels(row, form, where), where)
        split_of_rows.append(row.get("split", ""))

    table = builder.build(source)
    if "split" in header:
        return table.select(_rows_of(split, split_of_rows, source))
    return hold_out(table, form.val_fraction, form.seed, val=split == form.val)


def _labels(row: dict[str, str], form: Form, where: str) -> dict[str, int]:
    """Return the annotated classes of a row: 1 for its labels, 0 for its negatives."""
    positives = _names(row["labels"], form, where)
    negatives = _names(row.get("negatives", ""), form, where)

    if both := set(positives) & set(negatives):
        raise DataError(f"{where}: the class {min(both)!r} is in labels and in negatives; {_SEE}")
    if form.exclusive and len(positives) != 1:
        raise DataError(
            f"{where} has {len(positives)} labels; data.exclusive=true wants one; {_SEE}"
        )
    return {**dict.fromkeys(negatives, 0), **dict.fromkeys(positives, 1)}


def _names(text: str, form: Form, where: str) -> list[str]:
    """Split a field into class names."""
    # A separator at the end of the field is allowed: blank names are skipped.
    names = split_names(text, form.separator, where, _SEE)
    if len(set(names)) < len(names):
        raise DataError(f"{where}: {text!r} has a label twice; {_SEE}")
    return names


def _rows_of(split: str, split_of_rows: list[str], source: Path) -> np.ndarray:
    """Return which rows belong to a split, bool [N]."""
    in_split = np.array([name == split for name in split_of_rows], bool)
    if not in_split.any():
        known = ", ".join(sorted(set(split_of_rows))[:5])
        raise DataError(f"{source}: no row of the split {split!r}; it has {known}; {_SEE}")
    return in_split
