"""The meaning of a table: the roles of its columns, and the values and names in its cells.

One meaning is read and logged. If there are several, the error names the settings to add.
"""

import ast
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

import numpy as np

from mldec.data.images import NOT_READ, READ
from mldec.data.labels import Labels, from_dense, from_entries
from mldec.errors import DataError
from mldec.files.tables import Cell, Unreadable, as_cell, simple_name
from mldec.names import abbreviate, as_name, check_names, format_list, indices_of, unknown_class

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger("mldec")

# Simple names of the columns of each role, see `simple_name`. The first one in the table is used.
_PATHS = "path filepath imagepath filename imagename file image img imgpath imgname fname photo"
PATHS = (*_PATHS.split(), "photopath", "imageindex", "imageid", "imgid")
# A name that ends with one of these, such as finding_labels, is also used if there is only one.
LABELS = ("labels", "label", "tags", "tag", "classes", "class", "categories", "category")
# Names of columns with the splits. Other columns are used if all cells are names of splits.
_SPLIT_COLUMNS = ("split", "splits", "subset", "set", "partition", "fold", "kfold")
# Columns that are never classes. `group` is reserved for groups of images, such as scenes.
_NO_CLASSES = ("path", "labels", "negatives", "group", *_SPLIT_COLUMNS)
# Flags of rows, and the splits of rows where they are true and false.
_FLAGS = dict.fromkeys(("isvalid", "isval", "isvalidation"), ("val", "train"))
_FLAGS |= {"istest": ("test", "train"), "istrain": ("train", "val")}
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}
SPLITS |= {"dev": "val", "test": "test", "testing": "test"}

# Numbers of rows and things, such as the columns that pandas and Excel add.
_INDEX = re.compile(r"(unnamed: \d+|(.*[\s_])?(index|id|#))?", re.IGNORECASE)

# Words for missing values, and the words of class columns. Spreadsheets write 1.0 if a column also
# has empty cells. Words in the second lists could also be other codes, so they must fill a column.
MISSING = {"", "nan", "na", "n/a", "#n/a", "<na>", "null", "none"}
_UNKNOWN = {"?", "unknown", "uncertain", "maybe"}
_PRESENT = {"1", "1.0", "1,0", "true", "yes"}
_ABSENT = {"0", "0.0", "0,0", "false", "no"}
_MINUS = {"-1", "-1.0", "-1,0"}
_MARKS = {"x", "\N{CHECK MARK}", "\N{HEAVY CHECK MARK}"}
_ALSO_PRESENT = {"t", "y", "wahr", "ja", "vrai", "oui", "verdadero", "present", "positive"} | _MARKS
_ALSO_ABSENT = {"f", "n", "falsch", "nein", "faux", "non", "falso", "absent", "negative"}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a `data` node that say what the columns and cells of a table mean."""

    path_column: str | None = None  # None takes path or another common name
    labels_column: str | None = None  # None takes labels or another common name

    # Images with the same text, such as the frames of a video, stay in one split. None takes group.
    group_column: str | None = None

    # None takes split, or another column with the names of splits. With a column of numbers, such
    # as fold, set `val` to one of them; the training split is `train`, or all other rows.
    split_column: str | None = None

    # Separator between two labels of an image, unless they are a list. None detects it.
    separator: str | None = None

    # Names that mean that an image has no label, such as "No Finding".
    no_label: str | list[str] | None = None

    # Meaning of the empty cells of class columns. None: unknown if other cells are 0, and absent
    # if the others are x.
    empty: Literal["absent", "unknown"] | None = None

    # Meaning of -1 in class columns: absent (0 is then unknown) or unknown. None: absent if no
    # cell is 0.
    minus_one: Literal["absent", "unknown"] | None = None


@dataclass(frozen=True, eq=False)
class Column:
    """A column of N rows as its distinct cells, most of which occur in many rows."""

    name: str
    cells: list[Cell]
    codes: np.ndarray  # index of the cell of each row, int [N]


@dataclass(frozen=True)
class Sheet:
    """The columns of one table, or of several tables below each other."""

    columns: list[Column]
    parts: list[tuple[str, np.ndarray]]  # name of each table, and the numbers of its rows

    @property
    def source(self) -> str:
        """Names of the tables, for messages."""
        return " and ".join(name for name, _ in self.parts)

    def where(self, index: int) -> str:
        """Return table and row number of a row, for messages."""
        part = 0
        while index >= len(self.parts[part][1]):
            index -= len(self.parts[part][1])
            part += 1
        name, rows = self.parts[part]
        return f"{name}, row {rows[index]}"


def sheet_of(frames: Mapping[str, "DataFrame"]) -> Sheet:
    """Return the columns of tables. Raises DataError if they have different columns."""
    import pandas

    first, *others = frames.values()
    for name, frame in frames.items():
        only = set(frame.columns) ^ set(first.columns)
        if only or (others and len(set(frame.columns)) < len(frame.columns)):
            fault = f"other columns than the first table ({format_list(sorted(map(str, only)))})"
            raise DataError(f"{name}: {fault}; use the same ones, or set data.file to one table")
    table = pandas.concat(frames.values(), ignore_index=True) if others else first

    columns = []
    for number, name in enumerate(table.columns):
        values = table.iloc[:, number]
        try:
            codes, distinct = pandas.factorize(values, use_na_sentinel=False)
        except TypeError:
            # Lists cannot be hashed.
            codes, distinct = np.arange(len(table)), values
        columns.append(Column(str(name).strip(), [as_cell(cell) for cell in distinct], codes))
    return Sheet(columns, [(name, frame.index.to_numpy()) for name, frame in frames.items()])


@dataclass(frozen=True)
class Roles:
    """The columns of a table by their role."""

    path: Column
    split: Column | None
    group: Column | None  # images that stay in one split
    labels: Column | None  # a list of names per image
    negatives: Column | None  # the names of absent classes
    classes: list[Column]  # one column per class, instead of `labels`


def recognize(sheet: Sheet, rules: Rules, classes: Collection[str] | None) -> Roles:
    """Return the roles of the columns of a table.

    Raises:
        DataError: If a column is missing, or its role is ambiguous.
        ValueError: If a setting names a column that does not exist.
    """
    left = list(sheet.columns)

    def take(wanted: Sequence[str], setting: str | None = None) -> Column | None:
        """Remove the column of a role from `left`."""
        chosen = getattr(rules, setting) if setting else None
        for name in wanted if chosen is None else [simple_name(chosen)]:
            found = [column for column in left if simple_name(column.name) == name]
            if len(found) > 1:
                raise DataError(f"{sheet.source}: the column {name!r} is listed twice; rename one")
            if found:
                left.remove(found[0])
                return found[0]
        if chosen is not None:
            names = format_list([column.name for column in sheet.columns])
            raise ValueError(f"{setting} is {chosen!r}; {sheet.source} has the columns {names}")
        return None

    path = take(PATHS, "path_column")
    if path is None:
        with_images = [column for column in left if _has_image_names(column)]
        path = with_images[0] if len(with_images) == 1 else take(["id"])
        left = [column for column in left if column is not path]
    labels = take(LABELS, "labels_column")
    negatives = take(["negatives"])
    split = take(["split"], "split_column") or _find_split(left)
    group = take(["group"], "group_column")
    left = [column for column in left if column is not split]
    others = [column.name for column in left if simple_name(column.name) in _SPLIT_COLUMNS]
    if split is None and others:
        raise DataError(
            f"{sheet.source}: the column {others[0]} may be the split; rename it, or add "
            f"data.split_column={others[0]} data.val=VALUE"
        )

    named = [column for column in left if simple_name(column.name).endswith(LABELS)]
    named = [column for column in named if not _is_class(column, classes, all_marks=True)]
    if labels is None and len(named) == 1:
        labels = named[0]

    # A table may have both forms. Given classes choose the columns with their names.
    class_columns = [column for column in left if _is_class(column, classes, all_marks=labels)]
    chosen = [column for column in class_columns if column.name in (classes or ())]
    if classes and len(chosen) == len(classes) and rules.labels_column is None:
        labels = None
        class_columns = chosen
    names_of_classes = format_list([column.name for column in class_columns])
    if labels is not None and class_columns and rules.labels_column is None:
        raise DataError(
            f"{sheet.source}: the column {labels.name} has labels, but {names_of_classes} look "
            f"like classes; add data.labels_column={labels.name}, or data.classes=[NAMES] for them"
        )
    if path is None or (labels is None and (not class_columns or negatives is not None)):
        raise _unknown_columns(sheet, path, labels, left)

    if labels is not None:
        class_columns = []
    used = [path, labels, negatives, split, group, *class_columns]
    unused = [c.name or "(no name)" for c in left if not any(c is column for column in used)]
    kind = f"labels in {labels.name}" if labels is not None else f"classes {names_of_classes}"
    text = f"csv: {sheet.source} has image paths in {path.name}, {kind}"
    text += f", splits in {split.name}" if split is not None else ""
    text += f", groups in {group.name}" if group is not None else ""
    log.info(text + (f"; not used: {format_list(unused)}" if unused else ""))
    check_names([column.name for column in class_columns], sheet.source)
    return Roles(path, split, group, labels, negatives, class_columns)


def _unknown_columns(
    sheet: Sheet, path: Column | None, labels: Column | None, left: list[Column]
) -> DataError:
    """Return the error for a table without image paths or labels, with all settings to add."""
    names = [column.name for column in sheet.columns]
    if any(_is_image(name) for name in names):
        return DataError(f"{sheet.source}: row 1 has no column names; add them, as path,labels")
    settings = []
    if path is None or simple_name(path.name) not in PATHS:
        settings.append(f"data.path_column={path.name if path else 'NAME'}")
    if labels is None:
        others = [column.name for column in left if column is not path]
        settings.append(f"data.labels_column={others[0] if len(others) == 1 else 'NAME'}")
    what = "image paths" if path is None else "labels"
    return DataError(
        f"{sheet.source}: no column of {what} is known among {format_list(names)}; add "
        f"{' '.join(settings)}, or name the columns path and labels, or one per class with 0 and 1"
    )


def _is_image(text: object) -> bool:
    return isinstance(text, str) and PurePath(text).suffix.lower() in READ | NOT_READ


def _has_image_names(column: Column) -> bool:
    cells = [cell for cell in column.cells[:100] if cell != ""]
    return bool(cells) and all(map(_is_image, cells))


def _words(column: Column) -> list[str]:
    """Return the distinct cells of a column in lower case."""
    return [str(cell).casefold() for cell in column.cells]


def _find_split(columns: Sequence[Column]) -> Column | None:
    """Return the only column of which all cells are names of splits, or such as is_valid."""
    found = []
    for column in columns:
        words = set(_words(column)) - MISSING
        is_flag = simple_name(column.name) in _FLAGS and words <= _PRESENT | _ABSENT
        if is_flag or (words <= set(SPLITS) and not words.isdisjoint(("train", "training"))):
            found.append(column)
    return found[0] if len(found) == 1 else None


def split_names(column: Column) -> np.ndarray:
    """Return the split of each row in lower case, text [N]. True and False are translated."""
    words = _words(column)
    if simple_name(column.name) in _FLAGS:
        present, absent = _FLAGS[simple_name(column.name)]
        meanings = dict.fromkeys(_PRESENT, present) | dict.fromkeys(_ABSENT, absent)
        words = [meanings.get(word, word) for word in words]
    return np.array(words, str)[column.codes]


def _is_class(column: Column, classes: Collection[str] | None, *, all_marks: object = None) -> bool:
    """Return True for a column of marks of a class, or with the name of a given class.

    At least half of the filled cells are 0, 1, -1 or a common word, so that an error can name the
    others. With `all_marks`, and for other words, all filled cells must be marks.
    """
    if column.name in (classes or ()):
        return True
    simple = simple_name(column.name)
    if simple in (*_NO_CLASSES, *_FLAGS) or _INDEX.fullmatch(column.name):
        return False
    filled = Counter[str]()
    for word, number in zip(_words(column), np.bincount(column.codes).tolist(), strict=True):
        if word not in MISSING:
            filled[word] += number
    common = _PRESENT | _ABSENT | _MINUS
    num_common = sum(number for word, number in filled.items() if word in common)
    if num_common and not all_marks and 2 * num_common >= filled.total():
        return True
    marks = common | _ALSO_PRESENT | _ALSO_ABSENT
    return not marks.isdisjoint(filled) and set(filled) <= marks | _UNKNOWN


def class_labels(sheet: Sheet, columns: Sequence[Column], rules: Rules) -> Labels:
    """Return the labels of a table with one column per class, in the order of the columns.

    Raises:
        DataError: If a cell has no meaning, or several.
    """
    words = [_words(column) for column in columns]
    used = {word for column in words for word in column}
    has_zeros = not used.isdisjoint(_ABSENT | _ALSO_ABSENT)
    has_minus = not used.isdisjoint(_MINUS)
    minus_one = rules.minus_one or ("unknown" if has_zeros else "absent")
    has_absent = has_zeros or (has_minus and minus_one == "absent")
    only_marks = used <= MISSING | _MARKS
    has_empty = not used.isdisjoint(MISSING)
    # Beside 0 and 1, an empty cell of a column with only x may be absent or unknown.
    mixes = any(
        set(column) <= MISSING | _MARKS and not _MARKS.isdisjoint(column) for column in words
    )
    empty = rules.empty or ("absent" if only_marks and not has_absent else "unknown")

    settings = []
    if has_minus and has_zeros and rules.minus_one is None:
        settings.append("data.minus_one=unknown (or absent, if 0 is unknown)")
    if has_empty and not rules.empty and not only_marks and (mixes or not has_absent):
        settings.append("data.empty=absent (or unknown)")
    if settings:
        raise DataError(
            f"{sheet.source}: the cells of {format_list([column.name for column in columns])} have "
            f"several meanings; add {' '.join(settings)}"
        )
    for found, cell, meaning in ((has_minus, "-1", minus_one), (has_empty, "an empty cell", empty)):
        if found:
            log.info(f"csv: {sheet.source}: {cell} in a class column is {meaning}")

    zero = -1 if has_minus and minus_one == "absent" and has_zeros else 0
    values = dict.fromkeys(_PRESENT | _ALSO_PRESENT, 1) | dict.fromkeys(_UNKNOWN, -1)
    values |= dict.fromkeys(_ABSENT | _ALSO_ABSENT, zero)
    values |= dict.fromkeys(_MINUS, 0 if minus_one == "absent" else -1)
    values |= dict.fromkeys(MISSING, 0 if empty == "absent" else -1)
    matrix = np.empty((len(columns[0].codes), len(columns)), np.int8)
    for number, column in enumerate(columns):
        cells = np.array([values.get(word, 2) for word in words[number]], np.int8)
        matrix[:, number] = cells[column.codes]
        if 2 in cells:
            row = int(matrix[:, number].argmax())
            raise DataError(
                f"{sheet.where(row)}: the class {column.name!r} has "
                f"{abbreviate(column.cells[column.codes[row]])}, not 0, 1 or an empty cell; "
                f"correct it"
            )
    return from_dense(matrix, default=-1 if (matrix < 0).any() else 0)


def named_labels(
    sheet: Sheet, roles: Roles, rules: Rules, classes: Sequence[str] | None, *, exclusive: bool
) -> tuple[Labels, tuple[str, ...]]:
    """Return the labels of a table with lists of names, and the classes, by default sorted.

    With a column of negatives, a class in neither list is unknown.

    Raises:
        DataError: If a cell is not a list of names, or its separator is ambiguous.
    """
    assert roles.labels is not None
    given = frozenset(classes or ())
    names = _cell_names(sheet, roles.labels, rules, given, exclusive=exclusive)
    entries = [dict.fromkeys(cell, 1) for cell in names]
    codes = roles.labels.codes
    if roles.negatives is not None:
        # Combine the distinct pairs of both cells.
        negatives = _cell_names(sheet, roles.negatives, rules, given, exclusive=exclusive)
        pairs = codes.astype(np.int64) * len(negatives) + roles.negatives.codes
        pairs, first, codes = np.unique(pairs, return_index=True, return_inverse=True)
        positives = entries
        entries = []
        for pair, row in zip(pairs.tolist(), first.tolist(), strict=True):
            present, absent = (positives[pair // len(negatives)], negatives[pair % len(negatives)])
            for name in present:
                if name in absent:
                    fault = f"the class {name!r} is in labels and in negatives"
                    raise DataError(f"{sheet.where(row)}: {fault}; remove one")
            entries.append(dict.fromkeys(absent, 0) | present)

    found = {name for cell in entries for name in cell}
    if classes is None:
        if not found:
            raise DataError(f"{sheet.source}: no image has a label; add labels")
        classes = check_names(sorted(found), sheet.source)
    for name in sorted(found.difference(classes)):
        code = next(code for code, cell in enumerate(entries) if name in cell)
        raise unknown_class(name, classes, sheet.where(int((codes == code).argmax())))

    columns = indices_of(classes)
    numbered = [{columns[name]: value for name, value in cell.items()} for cell in entries]
    default = 0 if roles.negatives is None else -1
    labels = from_entries(numbered, num_classes=len(classes), default=default)
    return labels.select(codes), tuple(classes)


def _cell_names(
    sheet: Sheet, column: Column, rules: Rules, given: frozenset[str], *, exclusive: bool
) -> list[list[str]]:
    """Return the names in each distinct cell of a column. `given` are the names of the setting."""
    cells: list[Cell] = []
    for cell in column.cells:
        if isinstance(cell, str) and cell.casefold() in MISSING and cell not in given:
            # The only label of an image may be called none.
            if exclusive and cell.casefold() == "none":
                cells.append((cell,))
                continue
            if cell:
                log.info(f"csv: {sheet.source}: images with {cell} in {column.name} have no label")
            cell = ()
        cells.append(_parse_list(cell) if isinstance(cell, str) else cell)
    texts = [cell for cell in cells if isinstance(cell, str)]
    separator = rules.separator or (";" if exclusive else _find_separator(sheet, texts, given))
    no_label = [rules.no_label] if isinstance(rules.no_label, str) else rules.no_label or ()

    names = []
    first_rows = np.unique(column.codes, return_index=True)[1]
    for row, cell in zip(first_rows, cells, strict=True):
        where = sheet.where(row)
        if isinstance(cell, bool | Unreadable):
            fault = f"{cell} is not a class name or a list of class names"
            raise DataError(f"{where}: {fault}; write text or a list of text")
        parts = cell.split(separator) if isinstance(cell, str) else cell
        found = [as_name(part.strip(), where) for part in parts if part.strip()]
        names.append([name for name in found if name not in no_label])
    return names


def _parse_list(text: str) -> Cell:
    """Return the names of a list in JSON, Python or as printed by NumPy, or else the text."""
    # Names may contain brackets, so a list starts with a quote, a number, or such as null.
    start = r"\[\s*([\"'\d{]|(null|nan|None)\s*,)|[({]\s*[\"']"
    if not re.fullmatch(rf"({start}).*[\])}}]|\[\s*\]", text, re.DOTALL):
        return text
    with suppress(ValueError):
        return as_cell(json.loads(text))
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return as_cell(ast.literal_eval(re.sub(r"(['\"])\s+(['\"])", r"\1, \2", text)))
    return Unreadable(abbreviate(text))


def _find_separator(sheet: Sheet, texts: Sequence[str], given: frozenset[str]) -> str:
    """Return the separator of the names in cells. Raises DataError if it is ambiguous."""
    results = {sign: _separates(texts, sign, given) for sign in ";|\n\t, "}
    # Names with spaces are common. In lists with another separator, a space is a part of names.
    if any(result is not False for sign, result in results.items() if sign != " "):
        del results[" "]
    found = [sign for sign, result in results.items() if result]
    unclear = [sign for sign, result in results.items() if result is None]
    if len(found) == 1 or not found + unclear:
        separator = found[0] if found else ";"
        if separator != ";":
            log.info(f"csv: {sheet.source}: labels are separated by {separator!r}")
        return separator

    sign = (found + unclear)[-1]
    example = next(text for text in texts if sign in text)
    settings = [f"data.separator={sign!r}" for sign in dict.fromkeys(found + unclear + [";"])]
    fault = f"the labels {abbreviate(example)} are one name or several"
    raise DataError(f"{sheet.source}: {fault}; add {' or '.join(settings)}")


def _separates(texts: Sequence[str], sign: str, given: frozenset[str]) -> bool | None:
    """Return whether a sign separates names, or None if it may also be a part of names."""
    if not any(sign in text for text in texts):
        return False
    cells = [[part.strip() for part in text.split(sign) if part.strip()] for text in texts]
    several = [parts for parts in cells if len(parts) > 1]
    if not several or given.issuperset(texts):
        return False
    names = Counter(name for parts in cells for name in set(parts))
    if sign not in ", " or given.issuperset(names) or all(name.isdecimal() for name in names):
        return True

    # Names of lists occur in several cells. Words of a name, such as "hot dog" and "dog", may also.
    alone = {parts[0] for parts in cells if len(parts) == 1}
    num_repeated = sum(any(names[part] > 1 for part in parts) for parts in several)
    if sign == ",":
        return True if 2 * num_repeated >= len(several) else None
    num_alone = sum(alone.issuperset(parts) for parts in several)
    num_lengths = len(set(map(len, cells)))
    if 2 * num_alone >= len(several) or (2 * len(names) <= len(cells) and num_lengths > 2):
        return True
    return None if num_repeated else False
