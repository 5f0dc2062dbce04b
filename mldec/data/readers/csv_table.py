"""A table of your own, as a CSV file: a list of labels per image, or a column per class."""

import codecs
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.settings import Source
from mldec.data.splits import check_fraction, check_val, hold_out, hold_out_stratified, log_split
from mldec.data.table import Table, TableBuilder, path_inside
from mldec.data.tasks import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, refusing
from mldec.files.text import csv_rows, read_bytes
from mldec.names import as_name, check_names, given_names, listed, shown, split_names

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Your own data"
_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons"}

# The names of columns that are recognized, see `_simple`; the first of several counts.
_PATHS = ("path", "filepath", "imagepath", "filename", "imagename", "file", "image")
_LABELS = ("labels", "label", "tags", "tag", "classes", "class")
_ROLES = {"path": _PATHS, "labels": _LABELS, "negatives": ("negatives",), "split": ("split",)}

# Columns of row numbers, as pandas and Excel write them.
_INDEX = re.compile(r"(unnamed: \d+|index|id)?", re.IGNORECASE)

_VAL = ("val", "valid", "validation")  # names of the validation split

# Of a column per class. Table programs write 1.0 where a column also has empty cells.
_CELLS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "": -1}
_BINARY = ("0", "0.0", "1", "1.0", "-1", "-1.0")  # -1 is refused with the row

HOLD_OUT = {"hash": hold_out, "stratified": hold_out_stratified}


def csv_table(
    *,
    root: str,
    file: str = "data.csv",
    images: str = "",
    path_column: str | None = None,
    labels_column: str | None = None,
    encoding: str = "utf-8",
    separator: str = ";",
    classes: str | list[str] | None = None,
    exclusive: bool = False,
    train: str = "train",
    val: str = "val",
    val_fraction: float = 0.1,
    split: Literal["stratified", "hash"] = "stratified",
    seed: int = 0,
    threshold: float = 0.5,
    skip_empty: bool = True,
    top_k: int | None = None,
) -> Source:
    """Return the images of a CSV file, in its order.

    The first row names the columns, in any order: path, optionally split, and either a column per
    class, whose cells are 1 (present), 0 (absent) or empty (not annotated, -1); or labels, names
    with a separator between them or a JSON list, and optionally negatives, likewise: a class in
    neither list is then not annotated. Where that may be, the metric is `mAP_partial`. Other usual
    names of the columns are recognized, and other columns are not used; see `recognise`.

    Args:
        file: the CSV file in `root`, with commas, tabs or semicolons between the columns; fields
            that hold such a sign are in double quotes.
        images: folder in `root` that the paths are relative to; absolute paths lie in it.
        path_column: name of the column of the paths; None takes path or another usual name.
        labels_column: name of the column of the labels; None takes labels or another usual name.
        encoding: of the file, such as cp1252 (Excel on Windows) or utf-16.
        separator: the text between two labels of an image, if these are no JSON list.
        classes: class names in their order, or a text file with one per line; None takes the sorted
            labels of all rows, or the columns of the classes in the order of the file.
        exclusive: every image has exactly one label; the metric is top-1 instead of mAP.
        train: value of the column split in the rows to learn from, in any case; `val` likewise,
            where val, valid and validation mean the same.
        val_fraction: without a column split, the share of the images to hold out, in (0, 1).
        split: without a column split, how images are held out: "stratified": each class has about
            the same share of its positives held out, see `hold_out_stratified`; "hash": a hash of
            its path decides on each image, which stays in its split when others are added.
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
    form = recognise(
        source,
        encoding=encoding,
        path_column=path_column,
        labels_column=labels_column,
        classes=names,
    )
    has_split = "split" in form.columns
    for name, value in (("train", train), ("val", val)):
        if not has_split and value != name:
            fault = f"{name} is {value}: {source} has no column split"
            raise ValueError(f"{fault}: add one, or leave it out")
    if form.partial and not exclusive:
        task = PartialLabels(threshold)
    log.info("csv: %s has %s", source, form)

    def load(part: str, cache_dir: str | None) -> StoredImages:
        if has_split and part == val:
            check_val(form.find_split(val), form.splits, source, _SEE)

        # Each of the arguments changes the table, so all of them are part of the key in the cache.
        wanted = form.find_split(part) if has_split else None
        parse = partial(_parse, source, form, wanted, names, separator, exclusive, image_folder)
        key = sha256(repr(parse.args).encode(errors="surrogateescape")).hexdigest()
        table = cached_table(f"csv {key}", [source], parse, cache_dir, _SEE)
        if not has_split:
            num_images = len(table)
            table = HOLD_OUT[split](table, val_fraction, seed, val=part == val)
            if part == val:
                log.info(
                    f"csv: no column split, so {len(table):,} of {num_images:,} images are held "
                    f"out for validation ({split}); see data.val_fraction and data.split"
                )

        log_split("csv", part, table)
        if part == train:
            used = {form.find_split(train), form.find_split(val)}
            _log_doubts(form, table, separator, used=used, exclusive=exclusive)
        return in_folder(table, image_folder, _SEE)

    result = Source(load=load, train=train, val=val, task=task, where=source, see=_SEE)
    return replace(result, folder_setting="data.images")


@dataclass(frozen=True)
class Form:
    """The form of a file."""

    delimiter: str
    encoding: str  # a codec of Python

    # For each column path, labels, negatives, split or the name of its class; "" if it is not used.
    columns: tuple[str, ...]

    classes: tuple[str, ...]  # those that have a column, in the order of the file
    partial: bool  # a class may be not annotated: negatives have a column, or a cell is empty
    splits: dict[str, int]  # number of rows of each split, whose name is in lower case

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

    def find_split(self, wanted: str) -> str:
        """Return the name of a split in the file, where validation has several usual names."""
        wanted = wanted.strip().lower()
        if wanted in self.splits or wanted not in _VAL:
            return wanted
        others = [name for name in _VAL if name in self.splits]
        return others[0] if len(others) == 1 else wanted


def recognise(
    source: Path,
    *,
    encoding: str = "utf-8",
    path_column: str | None = None,
    labels_column: str | None = None,
    classes: Sequence[str] | None = None,
) -> Form:
    """Return the form of a file, which is read once for it; the arguments are those of the table.

    docs/data.md, section Forms of a table, describes how columns are recognized.
    """
    encoding, delimiter = _text_format(source, encoding, path_column)
    rows = _filled_rows(source, delimiter, encoding)
    line, header = next(rows, (1, [""]))
    where = f"{source}, row {line}"
    names = [name.strip() for name in header]
    roles = _find_roles(names, path_column, labels_column, where)

    # The number of rows with each cell of the short columns.
    counts = {i: Counter[str]() for i in range(len(names)) if i not in _long(roles)}
    for _, row in rows:
        for column, count in counts.items():
            count[row[column].strip()] += 1

    splits = Counter[str]()
    for name, number in counts.pop(roles.get("split", -1), {}).items():
        splits[name.lower()] += number

    shares = {i: _binary_share(count) for i, count in counts.items() if _may_be_class(names[i])}
    if "labels" in roles:
        class_columns = []
        if labels_column is None:
            _refuse_both_forms(names, roles["labels"], shares, where)
    else:
        given = classes or ()
        class_columns = [i for i, share in shares.items() if share >= 0.5 or names[i] in given]
        if not class_columns or "negatives" in roles:
            raise DataError(
                f"{where}: none of the columns {shown(', '.join(names))} has labels: call one "
                f"labels, name one with data.labels_column, or add a column of 0 and 1 per class; "
                f"{_SEE}"
            )
    class_names = check_names([names[column] for column in class_columns], where, _SEE)

    columns = [""] * len(names)
    for role, column in roles.items():
        columns[column] = role
    for column in class_columns:
        columns[column] = names[column]

    unused = [names[i] or f"column {i + 1}" for i, name in enumerate(columns) if not name]
    if unused:
        log.info(f"csv: {source} has columns that are not used: {listed(unused)}")
    has_empty_cell = any(counts[column][""] for column in class_columns)
    is_partial = "negatives" in roles or has_empty_cell
    return Form(delimiter, encoding, tuple(columns), class_names, is_partial, dict(splits))


def _text_format(source: Path, encoding: str, path_column: str | None) -> tuple[str, str]:
    """Return the codec of a file and the sign between its columns; raise for another encoding."""
    content = read_bytes(source, _SEE)
    try:
        is_utf8 = codecs.lookup(encoding).name == "utf-8"
        codec = "utf-8-sig" if is_utf8 else encoding
        text = content.decode(codec)
    except LookupError as error:
        raise ValueError(f"encoding is {encoding!r}, an unknown text encoding") from error
    except UnicodeError as error:
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        likely = "utf-16" if is_utf16 else "cp1252"
        remedy = "save it as UTF-8"
        if likely != encoding:
            remedy = f"pass data.encoding={likely}, or {remedy}"
        raise DataError(f"{source} is not {encoding.upper()} text: {remedy}; {_SEE}") from error

    # The first sign that leaves a column of paths; a file without one is faulty, whatever the sign.
    first_line = next(filter(str.strip, io.StringIO(text, newline=None)), "")
    known = _PATHS if path_column is None else (_simple(path_column),)
    delimiter = ","
    for sign in reversed(_DELIMITERS):
        titles = [_simple(title.strip(' "\n')) for title in first_line.split(sign)]
        if len(titles) > 1 and not set(known).isdisjoint(titles):
            delimiter = sign
    return codec, delimiter


def _find_roles(
    names: Sequence[str], path_column: str | None, labels_column: str | None, where: str
) -> dict[str, int]:
    """Return the indices of the columns path, labels, negatives and split that a file has."""
    simple_names = [_simple(name) for name in names]
    settings = {"path": path_column, "labels": labels_column}
    roles = {}
    for role, usual_names in _ROLES.items():
        setting = settings.get(role)
        wanted = usual_names if setting is None else (_simple(setting),)
        found = next((name for name in wanted if name in simple_names), None)
        if found is None and setting is not None:
            columns = shown(", ".join(names))
            raise ValueError(f"{role}_column is {setting!r}: {where} has the columns {columns}")
        if found is None:
            continue
        if simple_names.count(found) > 1:
            raise DataError(f"{where}: the column {found!r} is there twice: rename one; {_SEE}")
        roles[role] = simple_names.index(found)
        simple_names[roles[role]] = ""  # a column has one role

    if "path" not in roles:
        raise DataError(
            f"{where}: none of the columns {shown(', '.join(names))} has the paths of the images: "
            f"call one path, or name one with data.path_column; {_SEE}"
        )
    return roles


def _refuse_both_forms(
    names: Sequence[str], labels: int, shares: Mapping[int, float], where: str
) -> None:
    """Raise a `DataError` if a file with a column of labels also has a column of only 0 and 1."""
    doubtful = [names[column] for column, share in shares.items() if share == 1]
    if doubtful:
        raise DataError(
            f"{where}: the labels may be in the column {shown(names[labels])}, or in columns of 0 "
            f"and 1 such as {shown(doubtful[0])}: pass data.labels_column={names[labels]}, or "
            f"leave out the columns that are no labels; {_SEE}"
        )


def _simple(name: str) -> str:
    """Return the name of a column in lower case, without blanks, underscores and hyphens."""
    return re.sub(r"[\s_-]", "", name.lower())


def _long(roles: Mapping[str, int]) -> set[int]:
    """Return the columns with a text of their own in each row."""
    return {roles[role] for role in ("path", "labels", "negatives") if role in roles}


def _may_be_class(name: str) -> bool:
    """Return whether a column may be a class; the index that pandas writes is none."""
    return _simple(name) not in _ROLES and not _INDEX.fullmatch(name)


def _binary_share(count: Counter[str]) -> float:
    """Return the share of the filled cells of a column that are -1, 0 or 1."""
    filled = count.total() - count[""]
    return sum(count[cell] for cell in _BINARY) / max(filled, 1)


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
    folder: Path,
) -> Table:
    """Return the images of a split, or all; the classes and the faults are those of all rows."""
    known = classes or form.classes or None
    builder = TableBuilder(_SEE, classes=known, default=form.default, folder=folder)
    split_of_rows = []
    for where, cells in _rows(source, form):
        labels = _labels(cells, form, separator, where)
        count = sum(value == 1 for value in labels.values())
        if exclusive and count != 1:
            raise DataError(f"{where} has {count} labels; data.exclusive=true wants one; {_SEE}")
        builder.add(cells["path"], labels, where)
        split_of_rows.append(cells.get("split", "").lower())

    table = builder.build(source)
    if split is None:
        return table
    return table.select(np.array([name == split for name in split_of_rows], bool))


def _filled_rows(source: Path, delimiter: str, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a file as `csv_rows`, without empty ones, which Excel writes as ",,".

    Raises a `DataError` for a row of another length than the first one.
    """
    num_columns = None
    for line, fields in csv_rows(source, _SEE, delimiter=delimiter, encoding=encoding):
        if not any(field.strip() for field in fields):
            continue
        if num_columns is None:
            num_columns = len(fields)
        if len(fields) != num_columns:
            raise DataError(
                f"{source}, row {line} has {len(fields)} fields, the header {num_columns}: add the "
                f"others, or quote those with {_DELIMITERS[delimiter]}; {_SEE}"
            )
        yield line, fields


def _rows(source: Path, form: Form) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield for each image the file and row, for messages, and its fields by column."""
    rows = _filled_rows(source, form.delimiter, form.encoding)
    next(rows, None)
    for line, fields in rows:
        cells = dict(zip(form.columns, map(str.strip, fields), strict=True))
        yield f"{source}, row {line}", cells


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
                f"correct it, or leave out the column; {_SEE}"
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
