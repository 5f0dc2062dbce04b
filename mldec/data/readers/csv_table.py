"""Your own images with one or several labels each, listed in a CSV file."""

import logging
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.names import given_names, unknown_class
from mldec.data.readers.csv_forms import Form, Row, read_rows, recognise
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.stratify import hold_out_stratified
from mldec.data.table import Table, TableBuilder, check_fraction, hold_out, log_split, path_inside
from mldec.data.task import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.errors import DataError

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Your own data"
HOLD_OUT = {"hash": hold_out, "stratified": hold_out_stratified}
MAX_NAMES = 20  # of classes without an image, in a warning


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
    split: str = "hash",
    seed: int = 0,
    threshold: float = 0.5,
    top_k: int | None = None,
) -> Source:
    """Return the images of a CSV file, in its order.

    The first row names the columns, in any order. There are two forms:

    - path and labels, optionally negatives and split, and no others. The labels of an image are
      names with a separator between them, or a JSON list. An image without a label is a negative
      of every class. With a column negatives, a class in neither list is not annotated (-1).
    - path, optionally split, and a column per class, whose cells are 1 (present), 0 (absent) or
      empty (not annotated, -1).

    If a class may be not annotated, the metric is `mAP_partial`.

    Args:
        root: folder of the file.
        file: the CSV file in `root`: UTF-8, with commas, tabs or semicolons between the columns;
            fields that hold such a sign are in double quotes.
        images: folder in `root` that the paths are relative to.
        separator: the text between two labels of an image, if these are no JSON list.
        classes: class names in their order, or a text file with one per line; None takes the sorted
            labels of all rows, or the columns of the classes in the order of the file.
        exclusive: every image has exactly one label; the metric is top-1 instead of mAP.
        train: value of the column split in the rows to learn from.
        val: value of the column split in the rows to evaluate on.
        val_fraction: without a column split, the share of the images to hold out, in (0, 1).
        split: without a column split, how images are held out: "hash": a hash of its path decides
            on each image, which stays in its split when others are added; "stratified": each class
            has about the same share of its positives held out, see `mldec.data.stratify`.
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
    if split not in HOLD_OUT:
        raise ValueError(f"split is {split!r}: choose {' or '.join(HOLD_OUT)}")
    task = _task(exclusive, threshold, top_k)

    folder = check_folder(root, "the CSV file", _SEE)
    source = folder / path_inside(file, "data.file", _SEE)
    image_folder = folder / path_inside(images, "data.images", _SEE) if images else folder

    names = given_names(classes, folder, _SEE)
    form = recognise(source, _SEE)
    if split != "hash" and "split" in form.columns:
        raise ValueError(
            f"split is {split}, but {source} has a column split: leave one of them out"
        )
    if form.partial and not exclusive:
        task = PartialLabels(threshold)
    log.info("csv: %s has %s", source, form)

    settings = Settings(separator, names, exclusive, val, val_fraction, split, seed)
    load = partial(_load_split, source, image_folder, form, settings)

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
class Settings:
    """How the rows of a file are to be used; for the attributes see `csv_table`."""

    separator: str
    classes: tuple[str, ...] | None
    exclusive: bool
    val: str
    val_fraction: float
    split: str
    seed: int


def _task(exclusive: bool, threshold: float, top_k: int | None) -> Task:
    """Return the task that the settings stand for, if every label is annotated."""
    if exclusive:
        return SingleLabel(top_k)
    if top_k is not None:
        raise ValueError(
            f"top_k is {top_k}, for one label per image: set data.exclusive=true or leave it out"
        )
    return MultiLabel(threshold)


def _load_split(
    source: Path, image_folder: Path, form: Form, settings: Settings, split: str, cache: TableCache
) -> LabelledImages:
    """Return the images of a split."""
    # Each of these changes the table, so all of them are part of the key in the cache.
    key = sha256(repr((split, form, settings)).encode(errors="surrogateescape")).hexdigest()
    table = cache.table(f"csv {key}", [source], partial(_parse, source, split, form, settings))

    log_split("csv", split, table, max_names=MAX_NAMES)
    return in_folder(table, image_folder, _SEE)


def _parse(source: Path, split: str, form: Form, settings: Settings) -> Table:
    """Return the images of a split.

    All rows are read, so that both splits have the same classes and a faulty row is always found.
    """
    # What is not listed is absent, or unknown where absent classes are listed too.
    classes = _classes(source, form, settings)
    builder = TableBuilder(_SEE, classes=classes, default=-1 if form.partial else 0)

    split_of_rows = []
    for row in read_rows(source, form, settings.separator, _SEE):
        builder.add(row.path, _labels(row, settings), row.where)
        split_of_rows.append(row.split)

    table = builder.build(source)
    if "split" in form.columns:
        return table.select(_rows_of(split, split_of_rows, source))

    divide = HOLD_OUT[settings.split]
    part = divide(table, settings.val_fraction, settings.seed, val=split == settings.val)
    if not len(part):
        raise DataError(
            f"{source}: data.split={settings.split} leaves no image to {split}, of {len(table)}: "
            f"change data.val_fraction, {settings.val_fraction}; {_SEE}"
        )
    return part


def _classes(source: Path, form: Form, settings: Settings) -> tuple[str, ...] | None:
    """Return the class names in their order; None if the rows name them.

    Raises:
        DataError: if the columns of the file are not those of `data.classes`.
    """
    if settings.classes is None or form.classes is None:
        return settings.classes or form.classes

    where = f"{source}, row 1"
    if unknown := sorted(set(form.classes) - set(settings.classes)):
        raise unknown_class(unknown[0], settings.classes, where, _SEE)
    if absent := sorted(set(settings.classes) - set(form.classes)):
        raise DataError(
            f"{where}: the class {absent[0]!r} of data.classes has no column: add one, or leave "
            f"the class out; {_SEE}"
        )
    return settings.classes


def _labels(row: Row, settings: Settings) -> dict[str, int]:
    """Return the annotated classes of a row: 1 for its labels, 0 for its negatives."""
    if both := set(row.positives) & set(row.negatives):
        raise DataError(
            f"{row.where}: the class {min(both)!r} is in labels and in negatives; {_SEE}"
        )
    if settings.exclusive and len(row.positives) != 1:
        raise DataError(
            f"{row.where} has {len(row.positives)} labels; data.exclusive=true wants one; {_SEE}"
        )
    return {**dict.fromkeys(row.negatives, 0), **dict.fromkeys(row.positives, 1)}


def _rows_of(split: str, split_of_rows: list[str], source: Path) -> np.ndarray:
    """Return which rows belong to a split, bool [N]."""
    in_split = np.array([name == split for name in split_of_rows], bool)
    if not in_split.any():
        known = ", ".join(sorted(set(split_of_rows))[:5])
        raise DataError(f"{source}: no row of the split {split!r}; it has {known}; {_SEE}")
    return in_split
