"""The forms of a CSV file: the sign between its columns, and how it holds the labels."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mldec.data.names import as_name, check_names, shown, split_names
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
