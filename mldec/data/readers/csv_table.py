"""A table of your own, as a CSV file in any of four forms."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.cache import TableCache
from mldec.data.settings import Source
from mldec.data.table import (
    Table,
    TableBuilder,
    as_name,
    check_fraction,
    check_names,
    given_names,
    hold_out,
    hold_out_stratified,
    log_split,
    path_inside,
    shown,
    split_names,
    unknown_class,
)
from mldec.data.tasks import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError
from mldec.files.text import csv_rows, open_binary, reading

_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons"}
_COLUMNS = ("path", "labels", "negatives", "split")

# Of a column per class. Table programs write 1.0 where a column also has empty cells.
_CELLS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "": -1}


class Kind(Enum):
    """How the labels of an image are written."""

    NAMES = "a list of labels per image"
    JSON = "a JSON list of labels per image"
    ONE_HOT = "a column per class"


@dataclass(frozen=True)
class Form:
    """The form of a file, as its header and its first labels tell.

    Attributes:
        delimiter: the sign between two columns.
        columns: their names: path, labels, negatives and split in lower case, and classes.
        kind: how the labels are written.
        partial: whether a class may be not annotated: there is a column of negatives, or a cell of
            a class is empty.
    """

    delimiter: str
    columns: tuple[str, ...]
    kind: Kind
    partial: bool

    def __str__(self) -> str:
        """Describe the form in the log."""
        text = f"{self.kind.value}, columns between {_DELIMITERS[self.delimiter]}"
        if not self.partial:
            return text
        unknown = "an empty cell" if self.kind is Kind.ONE_HOT else "a class in neither list"
        return f"{text}, {unknown} is not annotated"

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes that have a column, in the order of the file; None if they have none."""
        if self.kind is not Kind.ONE_HOT:
            return None
        return tuple(name for name in self.columns if name not in _COLUMNS)


@dataclass(frozen=True)
class Row:
    """An image of the file; the classes in neither list are absent, or not annotated."""

    where: str
    path: str
    split: str
    positives: list[str]
    negatives: list[str]


def recognise(source: Path, see: str) -> Form:
    """Return the form of a file.

    It is read up to the first image with a label; with a column per class, to the first empty cell.

    Args:
        source: the file.
        see: pointer to the documentation, for messages.

    Raises:
        DataError: if the file cannot be read, or its header has none of the forms.
    """
    delimiter = _delimiter(source, see)
    rows = csv_rows(source, see, delimiter=delimiter)
    line, fields = next(rows, (1, [""]))
    columns, classes = _columns(fields, f"{source}, row {line}", see)

    # Rows of another length are named when they are read.
    complete_rows = (fields for _, fields in rows if len(fields) == len(columns))
    if classes:
        # A path must not be empty, and an empty split means nothing here.
        cells = [column for column, name in enumerate(columns) if name not in _COLUMNS]
        partial = any(not fields[column].strip() for fields in complete_rows for column in cells)
        return Form(delimiter, columns, Kind.ONE_HOT, partial)

    lists = [column for column, name in enumerate(columns) if name in ("labels", "negatives")]
    texts = (fields[column].strip() for fields in complete_rows for column in lists)
    first = next(filter(None, texts), "")
    kind = Kind.JSON if _is_list(first) else Kind.NAMES
    return Form(delimiter, columns, kind, "negatives" in columns)


def read_rows(source: Path, form: Form, separator: str, see: str) -> Iterator[Row]:
    """Read the images of a file.

    Args:
        source: the file.
        form: see `recognise`.
        separator: the text between two labels of an image, unless they are JSON or have columns.
        see: pointer to the documentation, for messages.

    Raises:
        DataError: if a row does not have the form.
    """
    rows = csv_rows(source, see, delimiter=form.delimiter)
    next(rows, None)

    for line, fields in rows:
        where = f"{source}, row {line}"
        if len(fields) != len(form.columns):
            signs = _DELIMITERS[form.delimiter]
            too_many = len(fields) > len(form.columns)
            remedy = f"quote fields with {signs}" if too_many else "add the others"
            count = f"{len(fields)} fields, the header {len(form.columns)}"
            raise DataError(f"{where} has {count}: {remedy}; {see}")

        cells = dict(zip(form.columns, map(str.strip, fields), strict=True))
        if form.kind is Kind.ONE_HOT:
            positives, negatives = _from_columns(cells, form, where, see)
        else:
            split_text = _json_names if form.kind is Kind.JSON else _separated_names(separator)
            positives = _unique(split_text, cells["labels"], where, see)
            negatives = _unique(split_text, cells.get("negatives", ""), where, see)

        yield Row(where, cells["path"], cells.get("split", ""), positives, negatives)


def _delimiter(source: Path, see: str) -> str:
    """Return the sign between the columns: the first one that leaves a column path in the header.

    A file without such a column is faulty, whatever the sign.
    """
    with reading(source, see), open_binary(source) as file:
        line = next(filter(bytes.strip, file), b"")
    header = line.decode("utf-8-sig", errors="replace").strip().lower()

    for delimiter in _DELIMITERS:
        names = [name.strip().strip('"').strip() for name in header.split(delimiter)]
        if "path" in names and len(names) > 1:
            return delimiter
    return ","


def _columns(
    header: Sequence[str], where: str, see: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the columns, and those of them that are classes.

    Raises:
        DataError: if the header has none of the forms, or a class twice.
    """
    names = [name.strip() for name in header]
    names = [name.lower() if name.lower() in _COLUMNS else name for name in names]
    known = [name for name in names if name in _COLUMNS]
    classes = [name for name in names if name not in _COLUMNS]

    has_lists = "labels" in known and not classes
    has_classes = classes and not {"labels", "negatives"} & set(known)
    has_duplicates = len(set(known)) < len(known)
    if "path" not in known or has_duplicates or not (has_lists or has_classes):
        columns = shown(", ".join(names))
        raise DataError(
            f"{where}: the columns {columns} are not path, labels[, negatives][, split], and not "
            f"path[, split] and a column per class: rename them or leave some out; {see}"
        )
    return tuple(names), check_names(classes, where, see)


def _from_columns(
    cells: dict[str, str], form: Form, where: str, see: str
) -> tuple[list[str], list[str]]:
    """Return the classes whose cell is 1, and those whose cell is 0 if that is not the default."""
    names: dict[int, list[str]] = {1: [], 0: [], -1: []}
    for name in form.classes or ():
        value = _CELLS.get(cells[name])
        if value is None:
            raise DataError(
                f"{where}: the class {name!r} has {shown(cells[name])}, which is not 0, 1 or empty "
                f"(not annotated): correct it, leave out the column, or call it labels if it lists "
                f"them; {see}"
            )
        names[value].append(name)
    return names[1], names[0] if form.partial else []


SplitText = Callable[[str, str, str], list[str]]


def _unique(split_text: SplitText, text: str, where: str, see: str) -> list[str]:
    """Return the class names in a field, each of which is there once."""
    names = split_text(text, where, see)
    if len(set(names)) < len(names):
        raise DataError(f"{where}: {shown(text)} has a label twice: leave one out; {see}")
    return names


def _separated_names(separator: str) -> SplitText:
    """Return a function that splits a field at the separators."""

    def split_text(text: str, where: str, see: str) -> list[str]:
        if _is_list(text):
            raise DataError(
                f"{where}: {shown(text)} is a JSON list, but the labels before are not: write all "
                f"of them in one form; {see}"
            )
        # A separator at the end of the field is allowed: blank names are skipped.
        return split_names(text, separator, where, see)

    return split_text


def _json_names(text: str, where: str, see: str) -> list[str]:
    """Return the class names in a JSON list; an empty field is an empty list."""
    names = _parsed(text or "[]")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(
            f'{where}: {shown(text)} is no JSON list of strings such as ["cat", "dog"], as the '
            f"file has elsewhere: correct it; {see}"
        )
    return [as_name(name.strip(), where, see) for name in names]


def _is_list(text: str) -> bool:
    """Return whether a field is a list in JSON or, with other quotes, in Python's form."""
    if not (text.startswith("[") and text.endswith("]")):
        return False
    is_quoted = text[1:].lstrip()[:1] in ("'", '"')
    return is_quoted or isinstance(_parsed(text), list)


def _parsed(text: str) -> object:
    """Return the content of a JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
            has about the same share of its positives held out, see `mldec.data.settings`.
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
) -> StoredImages:
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
