"""A table of your own, as a CSV file: a list of labels per image, or a column per class."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.cache import TableCache
from mldec.data.settings import Source
from mldec.data.table import (
    Table,
    TableBuilder,
    as_name,
    check_fraction,
    check_names,
    check_val,
    given_names,
    hold_out,
    hold_out_stratified,
    log_split,
    path_inside,
    shown,
    split_names,
)
from mldec.data.tasks import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, refusing
from mldec.runtime.text import csv_rows, open_binary, reading

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Your own data"
_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons"}
_COLUMNS = ("path", "labels", "negatives", "split")

# Of a column per class. Table programs write 1.0 where a column also has empty cells.
_CELLS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "": -1}

HOLD_OUT = {"hash": hold_out, "stratified": hold_out_stratified}


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
    split: Literal["hash", "stratified"] = "hash",
    seed: int = 0,
    threshold: float = 0.5,
    skip_empty: bool = True,
    top_k: int | None = None,
) -> Source:
    """Return the images of a CSV file, in its order.

    The first row names the columns, in any order: path, optionally split, and either a column per
    class, whose cells are 1 (present), 0 (absent) or empty (not annotated, -1); or labels, names
    with a separator between them or a JSON list, and optionally negatives, likewise: a class in
    neither list is then not annotated. Where that may be, the metric is `mAP_partial`.

    Args:
        file: the CSV file in `root`: UTF-8, with commas, tabs or semicolons between the columns;
            fields that hold such a sign are in double quotes.
        images: folder in `root` that the paths are relative to.
        separator: the text between two labels of an image, if these are no JSON list.
        classes: class names in their order, or a text file with one per line; None takes the sorted
            labels of all rows, or the columns of the classes in the order of the file.
        exclusive: every image has exactly one label; the metric is top-1 instead of mAP.
        train: value of the column split in the rows to learn from; `val` likewise.
        val_fraction: without a column split, the share of the images to hold out, in (0, 1).
        split: without a column split, how images are held out: "hash": a hash of its path decides
            on each image, which stays in its split when others are added; "stratified": each class
            has about the same share of its positives held out, see `mldec.data.table.stratified`.
        seed: decides which images are held out.
    """
    check_fraction(val_fraction)
    if top_k is not None and not exclusive:
        raise ValueError(
            f"top_k is {top_k}, for one label per image: set data.exclusive=true or leave it out"
        )
    task: Task = SingleLabel(top_k) if exclusive else MultiLabel(threshold, skip_empty)
    folder = check_folder(root, "the CSV file", _SEE)
    source = folder / path_inside(file, "data.file", _SEE)
    image_folder = folder / path_inside(images, "data.images", _SEE) if images else folder

    names = given_names(classes, folder, _SEE)
    form = recognise(source)
    has_split = "split" in form.columns
    if split != "hash" and has_split:
        raise ValueError(f"split is {split}, but {source} has a column split: leave one out")
    for name, value in (("train", train), ("val", val)):
        if not has_split and value != name:
            fault = f"{name} is {value}: {source} has no column split"
            raise ValueError(f"{fault}: add one, or leave it out")
    if form.partial and not exclusive:
        task = PartialLabels(threshold)
    log.info("csv: %s has %s", source, form)

    def load(part: str, cache: TableCache) -> StoredImages:
        if has_split and part == val:
            check_val(val, form.splits, source, _SEE)

        # Each of the arguments changes the table, so all of them are part of the key in the cache.
        wanted = part if has_split else None
        parse = partial(_parse, source, form, wanted, names, separator, exclusive)
        key = sha256(repr(parse.args).encode(errors="surrogateescape")).hexdigest()
        table = cache.table(f"csv {key}", [source], parse)
        if not has_split:
            table = HOLD_OUT[split](table, val_fraction, seed, val=part == val)

        log_split("csv", part, table)
        if part == train:
            _log_doubts(form, table, separator, used={train, val}, exclusive=exclusive)
        return in_folder(table, image_folder, _SEE)

    result = Source(load=load, train=train, val=val, task=task, where=source, see=_SEE)
    return replace(result, folder_setting="data.images")


@dataclass(frozen=True)
class Form:
    """The form of a file.

    The columns path, labels, negatives and split are in lower case, the others are classes.
    """

    delimiter: str
    columns: tuple[str, ...]
    partial: bool  # a class may be not annotated: negatives have a column, or a cell is empty
    splits: dict[str, int]  # the number of rows of each split

    def __str__(self) -> str:
        """Describe the form in the log."""
        kind = "a column per class" if self.classes else "a list of labels per image"
        text = f"{kind}, columns between {_DELIMITERS[self.delimiter]}"
        unknown = "an empty cell" if self.classes else "a class in neither list"
        return f"{text}, {unknown} is not annotated" if self.partial else text

    @property
    def default(self) -> int:
        """The value of what is not listed: absent, or unknown if absent classes are listed too."""
        return -1 if self.partial else 0

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that have a column, in the order of the file."""
        return tuple(name for name in self.columns if name not in _COLUMNS)


def recognise(source: Path) -> Form:
    """Return the form of a file, which is read once for it."""
    with reading(source, _SEE), open_binary(source) as file:
        first_line = next(filter(bytes.strip, file), b"")
    header = first_line.decode("utf-8-sig", errors="replace").strip().lower()

    # The first sign that leaves a column path; a file without one is faulty, whatever the sign.
    delimiter = ","
    for sign in reversed(_DELIMITERS):
        titles = [title.strip(' "') for title in header.split(sign)]
        if "path" in titles and len(titles) > 1:
            delimiter = sign

    rows = csv_rows(source, _SEE, delimiter=delimiter)
    line, fields = next(rows, (1, [""]))
    names = []
    for name in map(str.strip, fields):
        is_column = name.lower() in _COLUMNS
        names.append(name.lower() if is_column else name)

    known = [name for name in names if name in _COLUMNS]
    cells = [column for column, name in enumerate(names) if name not in _COLUMNS]

    has_lists = "labels" in known and not cells
    has_cells = cells and not {"labels", "negatives"} & set(known)
    has_duplicates = len(set(known)) < len(known)
    if "path" not in known or has_duplicates or not (has_lists or has_cells):
        columns = shown(", ".join(names))
        raise DataError(
            f"{source}, row {line}: the columns {columns} are not path, labels[, negatives]"
            f"[, split], and not path[, split] and a column per class: rename them or leave some "
            f"out; {_SEE}"
        )
    check_names((names[column] for column in cells), f"{source}, row {line}", _SEE)

    is_partial = "negatives" in known
    splits = Counter[str]()
    for _, row in rows:
        # Rows of another length are named when they are read.
        if len(row) == len(names):
            is_partial = is_partial or not all(row[column].strip() for column in cells)
            if "split" in known:
                splits[row[names.index("split")].strip()] += 1
    return Form(delimiter, tuple(names), is_partial, dict(splits))


def _log_doubts(
    form: Form, table: Table, separator: str, *, used: set[str], exclusive: bool
) -> None:
    """Log what may be a mistake: rows of splits that are not used, and another separator."""
    for name, count in form.splits.items():
        if name not in used:
            remedy = f"evaluate them by data.val={name}"
            log.info(f"csv: {count:,} rows of the split {name!r} are not used; {remedy}")

    if exclusive or form.classes:
        return
    signs = [sign for sign in "|;," if sign != separator]
    if doubt := joined_name(table.classes, signs):
        name, sign = doubt
        log.warning(f"csv: class {name!r} looks like several names: pass data.separator={sign!r}")


def joined_name(classes: Sequence[str], signs: Sequence[str]) -> tuple[str, str] | None:
    """Return a class name that a sign divides into names that occur in others too, and the sign."""
    for sign in signs:
        parts: dict[str, list[str]] = {}
        num_names: Counter[str] = Counter()  # with this part
        for name in classes:
            parts[name] = [part.strip() for part in name.split(sign)]
            num_names.update(set(parts[name]))

        for name, of_name in parts.items():
            if len(of_name) > 1 and all(num_names[part] > 1 for part in of_name):
                return name, sign
    return None


def _parse(
    source: Path,
    form: Form,
    split: str | None,
    classes: tuple[str, ...] | None,
    separator: str,
    exclusive: bool,
) -> Table:
    """Return the images of a split, or all; the classes and the faults are those of all rows."""
    builder = TableBuilder(_SEE, classes=classes or form.classes or None, default=form.default)
    split_of_rows = []
    for where, cells in _rows(source, form):
        labels = _labels(cells, form, separator, where)
        count = sum(value == 1 for value in labels.values())
        if exclusive and count != 1:
            raise DataError(f"{where} has {count} labels; data.exclusive=true wants one; {_SEE}")
        builder.add(cells["path"], labels, where)
        split_of_rows.append(cells.get("split"))

    table = builder.build(source)
    if split is None:
        return table
    return table.select(np.array([name == split for name in split_of_rows], bool))


def _rows(source: Path, form: Form) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield for each image the file and row, for messages, and its fields by column."""
    rows = csv_rows(source, _SEE, delimiter=form.delimiter)
    next(rows, None)
    for line, fields in rows:
        where = f"{source}, row {line}"
        if len(fields) != len(form.columns):
            remedy = f"add the others, or quote those with {_DELIMITERS[form.delimiter]}"
            count = f"{len(fields)} fields, the header {len(form.columns)}"
            raise DataError(f"{where} has {count}: {remedy}; {_SEE}")
        yield where, dict(zip(form.columns, map(str.strip, fields), strict=True))


def _labels(cells: dict[str, str], form: Form, separator: str, where: str) -> dict[str, int]:
    """Return the values of the classes of an image that are not the default."""
    if not form.classes:
        positives = _names(cells["labels"], separator, where)
        negatives = _names(cells.get("negatives", ""), separator, where)
        if both := set(positives) & set(negatives):
            fault = f"the class {min(both)!r} is in labels and in negatives"
            raise DataError(f"{where}: {fault}; {_SEE}")
        return {**dict.fromkeys(negatives, 0), **dict.fromkeys(positives, 1)}

    labels = {}
    for name in form.classes:
        if cells[name] not in _CELLS:
            raise DataError(
                f"{where}: the class {name!r} has {shown(cells[name])}, not 0, 1 or nothing: "
                f"leave out the column, or call it labels if it lists them; {_SEE}"
            )
        labels[name] = _CELLS[cells[name]]

    return {name: value for name, value in labels.items() if value != form.default}


def _names(text: str, separator: str, where: str) -> list[str]:
    """Return the class names in a field: a JSON list, or names with a separator between them."""
    # Names may have brackets too. One separator at the end is allowed: blank names are skipped.
    if not re.fullmatch(r"\[\s*([\"'\d].*)?\]", text):
        return split_names(text, separator, where, _SEE)
    with refusing(where, DataError, remedy=f'write a JSON list such as ["cat", "dog"]; {_SEE}'):
        return [as_name(name.strip(), where, _SEE) for name in json.loads(text)]
