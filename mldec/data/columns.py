"""Interpretation of a table of labels: the roles of its columns, and the contents of its cells.

A table with a single meaning is read, and the meaning is logged. If several meanings are possible,
the error names the settings that select one, because a wrong guess would train on wrong labels.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

import numpy as np

from mldec.data.images import NOT_READ, READ
from mldec.data.labels import Labels, from_dense, from_entries
from mldec.data.splits import SPLITS
from mldec.errors import DataError, log
from mldec.files.tables import Cell, Unreadable, as_cell, simple_name
from mldec.names import abbreviate, as_name, check_names, format_list, indices_of, unknown_class

if TYPE_CHECKING:
    from pandas import DataFrame

# Common names of the columns of each role, as returned by `simple_name`, in order of precedence.
_PATHS = "path filepath imagepath filename imagename file image img imgpath imgname fname photo"
PATHS = (*_PATHS.split(), "photopath", "imageindex", "imageid", "imgid")
# A column whose name ends with one of these, such as finding_labels, is also used if no other
# column has such a name.
_NAMES = "labels label tags tag classes class categories category labelname classname tagname"
LABELS = (*_NAMES.split(), "species", "choice")
# Such names with a number are labels, too: label2, and label.1 as pandas calls a second column.
_LABELS = re.compile(rf".*({'|'.join(LABELS)})\.?\d*")
# Names of split columns. A column with another name is used if all its cells are names of splits.
_SPLIT_COLUMNS = ("split", "splits", "subset", "set", "partition", "fold", "kfold")
# Columns of flags, such as is_valid, and the splits of the rows where the flag is true and false.
_FLAGS = dict.fromkeys(("isvalid", "isval", "isvalidation"), ("val", "train"))
_FLAGS |= dict.fromkeys(("istest", "istesting"), ("test", "train"))
_FLAGS |= dict.fromkeys(("istrain", "istraining", "intrain"), ("train", "val"))
_SPLIT_WORD = re.compile("train|val|test|dev|holdout")

# Columns whose 0 and 1 belong to the label of the row: Open Images has a row per pair of an image
# and a label, and a label with the confidence 0 is absent.
_SCORES = ("confidence", "probability", "score")
_VALUES = ("present", "presence", "value", *_SCORES)
# Columns that are never classes, even if their cells are 0 and 1. `group` is the column of groups.
_NO_CLASSES = {"labels", "negatives", "group", "regioncount", "annotator", *_SCORES}
_NO_CLASSES |= {*_SPLIT_COLUMNS, *_FLAGS}
# Properties of photos whose small numbers are not counts of a class.
_PROPERTIES = ("age", "year", "month", "day", "hour", "width", "height", "size", "number", "rating")
# Names of columns of row numbers and ids, which are distinct. `DataFrame.to_csv` writes the index
# as a column without a name, which `read_csv` calls "Unnamed: 0". Its numbers 0 and 1 would look
# like a class.
_INDEX = re.compile(r"(unnamed: \d+|(.*[\s_])?(index|id|#))?", re.IGNORECASE)

_CERTAIN = ";|\n\t\u3001\uff1b"  # separators that names rarely contain, also in Chinese
# Words for missing values, and the words of class columns, in lower case. pandas writes 1.0 if an
# integer column has missing values, and some spreadsheets write a decimal comma. The words below
# `_MARKS` could also be codes ("f" and "m"), so a column of classes must not have any other words.
MISSING = {"", "nan", "na", "n/a", "#n/a", "<na>", "null", "none"}
_UNKNOWN = {"?", "unknown", "uncertain", "maybe"}
_PRESENT = {"1", "1.0", "1,0", "true", "yes"}
_ABSENT = {"0", "0.0", "0,0", "false", "no"}
_MINUS = {"-1", "-1.0", "-1,0"}
_MARKS = {"x", "\N{CHECK MARK}", "\N{HEAVY CHECK MARK}"}
_ALSO_PRESENT = {"t", "y", "wahr", "ja", "vrai", "oui", "verdadero", "present", "positive"} | _MARKS
_ALSO_PRESENT |= {"vero", "verdadeiro", "waar", "prawda", "pos"}
_ALSO_ABSENT = {"f", "n", "falsch", "nein", "faux", "non", "falso", "absent", "negative"}
_ALSO_ABSENT |= {"onwaar", "fa\N{LATIN SMALL LETTER L WITH STROKE}sz", "neg"}
# A dash usually means that there is no label, and dog:0.9 is a name with a score.
_NO_NAME = re.compile(r"[!-/:-@[-`{-~\u2013\u2014]+|.+: *[01]?[.]\d+")
_NO_SPLIT = MISSING | {"unassigned"}  # an image of no split; Vertex AI writes UNASSIGNED


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a `data` node that define the meaning of the columns and cells of a table."""

    # None: path, another common name such as file, or the only column with file names of images.
    path_column: str | None = None
    # None: labels, another common name such as tags, or one column per class.
    labels_column: str | None = None

    # Images with the same text in this column, such as the frames of a video, are never divided
    # between splits. None: group, if the table has it.
    group_column: str | None = None

    # None: split, or the only column whose cells are names of splits. If the column has numbers,
    # such as fold, set `val` to one of them. The training split then has the rows of `train`, or
    # all other rows if no row has this name.
    split_column: str | None = None

    # Separator between the labels in a cell of text. None detects it.
    separator: str | None = None

    # Names in the labels column for images without a label, such as "No Finding".
    no_label: str | list[str] | None = None

    # Meaning of empty cells in class columns. None: unknown if other cells are 0, and absent if all
    # other cells are x. All other tables are ambiguous.
    empty: Literal["absent", "unknown"] | None = None

    # Meaning of -1 in class columns: "absent", so that 0 is unknown, or "unknown". None: absent if
    # no cell is 0, otherwise the table is ambiguous.
    minus_one: Literal["absent", "unknown"] | None = None


@dataclass(frozen=True, eq=False)
class Column:
    """A column of N rows, stored as its distinct cells, because most of them occur in many rows."""

    name: str
    cells: list[Cell]  # distinct cells, in the order of their first rows
    codes: np.ndarray  # index of the cell of each row, int [N]

    @cached_property
    def words(self) -> list[str]:
        """The distinct cells in lower case."""
        return [str(cell).casefold() for cell in self.cells]

    @cached_property
    def filled(self) -> set[str]:
        """The words that are not missing values."""
        return set(self.words) - MISSING

    def has(self, words: Collection[str]) -> np.ndarray:
        """Return a mask of the rows whose lower-case cell is in `words`, bool [N]."""
        return np.isin(self.words, list(words))[self.codes]


@dataclass(frozen=True)
class Sheet:
    """The columns of a table, or of several concatenated tables with the same columns."""

    columns: list[Column]
    source: str  # names of the tables, for messages
    tables: np.ndarray  # name of the table of each row, [N]
    rows: np.ndarray  # number of each row in the file of its table, [N]

    def where(self, index: int) -> str:
        """Return the table and the row number in its file of row `index`, for messages."""
        return f"{self.tables[index]}, row {self.rows[index]}"


def names_of(columns: Sequence[Column]) -> list[str]:
    """Return the names of columns."""
    return [column.name for column in columns]


def sheet_of(frames: Mapping[str, "DataFrame"]) -> Sheet:
    """Concatenate tables, given by their names. Raises DataError if their columns differ."""
    import pandas

    first, *others = frames.values()
    for name, frame in frames.items():
        # pandas would fill the columns of the other tables with missing values.
        only = set(frame.columns) ^ set(first.columns)
        if only:
            fault = f"other columns than the first table ({format_list(sorted(map(str, only)))})"
            raise DataError(f"{name}: {fault}; use the same ones, or set data.file to one table")
        # pandas cannot match columns with the same name in several tables.
        if others and len(set(frame.columns)) < len(frame.columns):
            raise DataError(f"{name}: two columns have the same name; rename one")

    # The concatenation copies the data, so a single table is used as it is.
    table = first
    if others:
        table = pandas.concat(frames.values(), ignore_index=True)

    columns = []
    for number, name in enumerate(table.columns):
        values = table.iloc[:, number]
        # Cells are parsed once per distinct value, which is much faster for class columns.
        try:
            codes, distinct = pandas.factorize(values, use_na_sentinel=False)
        except TypeError:
            # Lists cannot be hashed, so each row has its own cell.
            codes = np.arange(len(table))
            distinct = values
        columns.append(Column(str(name).strip(), [as_cell(cell) for cell in distinct], codes))
    # Names are objects, because text of fixed width would take hundreds of bytes per row.
    tables = np.repeat(np.array(list(frames), object), list(map(len, frames.values())))
    rows = np.concatenate([frame.index for frame in frames.values()])
    return Sheet(columns, " and ".join(frames), tables, rows)


@dataclass(frozen=True)
class Roles:
    """The columns of a table by their role."""

    path: Column
    split: Column | None
    group: Column | None  # images with the same cell stay in one split
    labels: Column | None  # names of the classes of each image
    value: Column | None  # whether the classes in `labels` are present or absent
    negatives: Column | None  # names of the classes that are known to be absent
    classes: list[Column]  # one column per class if `labels` is None, otherwise empty


def recognize(
    sheet: Sheet,
    rules: Rules,
    classes: Collection[str] | None,
    label_columns: Sequence[str] = LABELS,
) -> Roles:
    """Return the roles of the columns of a table.

    The settings in `rules` have precedence over the names of the columns. Given `classes` also
    identify class columns. `label_columns` are possible names of the column of labels, as returned
    by `simple_name`.

    Raises:
        DataError: If a column is missing, or its role is ambiguous.
        ValueError: If a setting names a column that does not exist.
    """
    left = list(sheet.columns)  # columns without a role yet

    def take(wanted: Sequence[str], setting: str | None = None) -> Column | None:
        """Return the column of a role by its names or its setting, and remove it from `left`."""
        chosen = getattr(rules, setting) if setting else None
        for name in wanted if chosen is None else [simple_name(chosen)]:
            found = [column for column in left if simple_name(column.name) == name]
            if len(found) > 1:
                raise DataError(f"{sheet.source}: the column {name!r} is listed twice; rename one")
            if found:
                left.remove(found[0])
                return found[0]
        if chosen is not None:
            names = format_list(names_of(sheet.columns))
            raise ValueError(f"{setting} is {chosen!r}; {sheet.source} has the columns {names}")
        return None

    # The order matters: a column that one role takes is not a candidate for the next role.
    # A column of numbers may be called image or id, so a column with file names comes first.
    files = [column for column in left if _has_image_names(column)]
    of_files = {simple_name(column.name) for column in files}
    path = take(sorted(PATHS, key=lambda name: name not in of_files), "path_column")
    if path is None and len(files) == 1:
        path = files[0]
        left.remove(path)
    path = path or take(["id"])
    labels = take(label_columns, "labels_column")
    negatives = take(["negatives"])
    split = take(["split"], "split_column")
    if split is None:
        split = _find_split(sheet, left, classes or ())
    elif _is_flag(split):
        split = _from_flags(sheet, [split])
    group = None
    if rules.group_column is not None or "group" not in (classes or ()):
        group = take(["group"], "group_column")

    labels, class_columns = _choose_form(sheet, rules, classes, labels, left)
    if path is None or (labels is None and (not class_columns or negatives is not None)):
        raise _unknown_columns(sheet, path, labels, left)
    value = next(filter(_is_value, left), None) if labels is not None else None
    # Given classes select the columns, so that the meaning of the other ones does not matter.
    if labels is None and classes is None:
        groups = [group] if group is not None and rules.group_column is None else []
        _check_unused(sheet, class_columns, left + groups)

    roles = Roles(path, split, group, labels, value, negatives, class_columns)
    _log_roles(sheet, roles, left)
    names = check_names(names_of(class_columns), sheet.source)
    pairs = zip(class_columns, names, strict=True)
    return replace(roles, classes=[replace(column, name=name) for column, name in pairs])


def _choose_form(
    sheet: Sheet,
    rules: Rules,
    classes: Collection[str] | None,
    labels: Column | None,
    left: Sequence[Column],
) -> tuple[Column | None, list[Column]]:
    """Return the column of labels, or the class columns. The other one is None or empty."""
    # A class column may have such a name, too, such as no_label.
    named = [column for column in left if _LABELS.fullmatch(simple_name(column.name))]
    named = [column for column in named if not _is_class(column, classes, all_marks=True)]
    if labels is None and len(named) == 1:
        labels = named.pop()
    others = [column for column in named if _numbers(column) is None]

    # A table may have both forms. Given classes select the columns with their names. Otherwise the
    # user must choose, because both forms may differ.
    class_columns = [column for column in left if _is_class(column, classes, all_marks=labels)]
    chosen = [column for column in class_columns if column.name in (classes or ())]
    if classes and len(chosen) == len(classes) and rules.labels_column is None:
        return None, chosen
    if rules.labels_column is not None:
        return labels, []
    if labels is None:
        return None, class_columns
    if others or class_columns:
        names = format_list(names_of(others + class_columns))
        raise DataError(
            f"{sheet.source}: the column {labels.name} has labels, but {names} look like labels or "
            f"classes; add data.labels_column={labels.name} to ignore them, data.classes=[NAMES] "
            f"for classes, or name a column present if its 0 means that the label is absent"
        )
    return labels, []


def _check_unused(sheet: Sheet, class_columns: Sequence[Column], left: Sequence[Column]) -> None:
    """Raise DataError if a column in `left` may have labels or be a class, and is not used."""
    classes = ",".join(names_of(class_columns))
    for column in left:
        # A single column of 0 and 1 may be a property of photos, such as is_night, next to the
        # labels, whose names occur in several rows. Next to several classes, such a column is
        # rather a property itself, such as the author.
        is_repeated = 1 < len(column.filled) < len(column.codes) and not _has_image_names(column)
        is_text = any(word[0].isalpha() for word in column.filled)
        if column in class_columns:
            continue
        if _resembles_class(column):
            remedy = "correct its cells if it is a class"
        elif len(class_columns) == 1 and is_repeated and is_text:
            remedy = f"add data.labels_column={column.name}"
        else:
            continue
        fault = f"{column.name} with {abbreviate(column.cells[0])} is not used"
        raise DataError(f"{sheet.source}: {fault}; {remedy}, or add data.classes=[{classes[:200]}]")


def _resembles_class(column: Column) -> bool:
    """Return True for scores in [0, 1], counts with a 0, and few words with a mark among them."""
    name = simple_name(column.name)
    if name == "group":
        return _is_binary(column)
    if name in (*_PROPERTIES, *_NO_CLASSES) or _INDEX.fullmatch(column.name):
        return False
    numbers = _numbers(column)
    if numbers:
        is_count = 0 in numbers and numbers <= set(range(21))
        return is_count or 0 <= min(numbers) <= max(numbers) <= 1
    # Single letters, such as f and m, are often codes.
    marks = (_UNKNOWN | _ALSO_PRESENT | _ALSO_ABSENT | {"+", "-"}) - set("tyfn")
    return len(column.filled) <= 3 and not marks.isdisjoint(column.filled)


def _log_roles(sheet: Sheet, roles: Roles, left: Sequence[Column]) -> None:
    """Log the roles, and the columns in `left` that have no role, so that users can check them."""
    text = f"data: {sheet.source} has images in {roles.path.name}"
    if roles.labels is not None:
        text += f", labels in {roles.labels.name}"
    else:
        text += f", classes {format_list(names_of(roles.classes))}"
    if roles.split is not None:
        text += f", splits in {roles.split.name}"
    if roles.group is not None:
        text += f", groups in {roles.group.name}"
    if roles.value is not None:
        text += f", which {roles.value.name} marks as present (1) or absent (0)"

    used = {roles.labels, roles.value, *roles.classes}
    left = [column for column in left if column not in used]
    unused = [column.name or "(no name)" for column in left if column.filled]
    if unused:
        text += f"; not used: {format_list(unused)}"
    empty = [column.name or "(no name)" for column in left if not column.filled]
    if empty:
        text += f"; empty ({len(empty)}): {format_list(empty)}"
    log.info(text)


def _unknown_columns(
    sheet: Sheet, path: Column | None, labels: Column | None, left: list[Column]
) -> DataError:
    """Return the error for a table without image paths or labels. It names all missing settings."""
    names = names_of(sheet.columns)
    # Without a header, the first row of data became the names of the columns.
    if any(_is_image(name) for name in names):
        return DataError(f"{sheet.source}: row 1 has no column names; add them, as path,labels")
    settings = []
    if path is None or simple_name(path.name) not in PATHS:
        settings.append(f"data.path_column={path.name if path else 'NAME'}")
    if labels is None:
        settings.append(f"data.labels_column={left[0].name if len(left) == 1 else 'NAME'}")
    what = "image paths" if path is None else "labels"
    return DataError(
        f"{sheet.source}: no column of {what} is known among {format_list(names)}; add "
        f"{' '.join(settings)}, or name the columns path and labels, or one per class with 0 and 1"
    )


def _is_image(text: object) -> bool:
    """Return True for text that ends with the suffix of an image file."""
    return isinstance(text, str) and PurePath(text).suffix.lower() in READ | NOT_READ


def _has_image_names(column: Column) -> bool:
    # A hundred cells are sufficient: this only selects one of the columns.
    cells = [cell for cell in column.cells[:100] if cell != ""]
    return bool(cells) and all(map(_is_image, cells))


def _find_split(sheet: Sheet, left: list[Column], classes: Collection[str]) -> Column | None:
    """Return the column of splits by its cells, or from flags, and remove it from `left`.

    Raises DataError if several columns may be the split, or one has other words: ignoring them
    would train on test images.
    """
    flags = [column for column in left if _is_flag(column)]
    found = [column for column in left if _has_splits(column)]
    are_known = all(column.filled <= SPLITS.keys() | _NO_SPLIT for column in found)
    if len(found) + bool(flags) == 1 and are_known:
        for column in found or flags:
            left.remove(column)
        return found[0] if found else _from_flags(sheet, flags)

    found += flags
    for column in [] if found else left:
        # Most images are for training, but only a few of them may show a train.
        name = simple_name(column.name)
        is_split = name in SPLITS and column.filled <= _PRESENT | _ABSENT
        is_class = column.name in classes or (name == "train" and column.has(_PRESENT).mean() < 0.5)
        if name in _SPLIT_COLUMNS or (is_split and column.filled and not is_class):
            found.append(column)
    if not found:
        return None
    name = found[0].name
    settings = f"data.split_column={name} data.val=NAME data.train=NAME, or data.classes=[NAMES]"
    fault = f"{format_list(names_of(found))} may be the split, with "
    fault += format_list(sorted(found[0].filled), 5)
    raise DataError(f"{sheet.source}: {fault}; rename it, or add {settings}")


def _has_splits(column: Column) -> bool:
    """Return True if the column has at most ten words, most like names of splits, such as train."""
    words = column.filled - _NO_SPLIT if len(column.filled) <= 10 else set()
    num_alike = sum(_SPLIT_WORD.search(word) is not None for word in words)
    has_train = any("train" in word for word in words)
    return has_train and 2 * num_alike > len(words) and not _has_image_names(column)


def _is_flag(column: Column) -> bool:
    words = column.filled - _NO_SPLIT if simple_name(column.name) in _FLAGS else set()
    return bool(words) and words <= _PRESENT | _ABSENT


def _from_flags(sheet: Sheet, flags: Sequence[Column]) -> Column:
    """Return the splits of flags, such as is_val and is_test, of which at most one is true."""
    splits = np.full(len(flags[0].codes), "", object)
    for flag in flags:
        present, absent = _FLAGS[simple_name(flag.name)]
        is_true = flag.has(_PRESENT)
        if (is_true & (splits != "")).any():
            row = int((is_true & (splits != "")).argmax())
            fault = f"{flag.name} is true, and the image is in {splits[row]}"
            raise DataError(f"{sheet.where(row)}: {fault}; correct it, or set data.split_column")
        splits[is_true] = present
    # The images of no flag are for training, unless there is a flag for this.
    if len(flags) == 1 or all(_FLAGS[simple_name(flag.name)][0] != "train" for flag in flags):
        splits[(splits == "") & ~flags[0].has(_NO_SPLIT)] = absent
    cells, codes = np.unique(splits.astype(str), return_inverse=True)
    return Column(" and ".join(names_of(flags)), cells.tolist(), codes)


def split_names(column: Column) -> np.ndarray:
    """Return the split of each row in lower case, text [N], or "" for none."""
    words = ["" if word in _NO_SPLIT else word for word in column.words]
    return np.array(words, str)[column.codes]


def _is_class(column: Column, classes: Collection[str] | None, *, all_marks: object = None) -> bool:
    """Return True if a column has the name of a given class, or marks for presence and absence.

    It is sufficient if at least half of the filled cells are 0, 1, -1, true, false, yes or no. The
    other cells are probably mistakes, which `class_labels` reports. If `all_marks` is true, or if
    the column has no such cell, all filled cells must be marks or words for unknown labels.
    """
    if column.name in (classes or ()):
        return True
    name = simple_name(column.name)
    if name in _NO_CLASSES or (all_marks and name in _VALUES):
        return False
    if _INDEX.fullmatch(column.name):
        return _is_binary(column)
    return _has_marks(column, all_marks=bool(all_marks))


def _is_value(column: Column) -> bool:
    # A column of ones only, such as the confidence of labels by hand, has no effect.
    has_absent = not column.filled.isdisjoint(_ABSENT | _ALSO_ABSENT)
    return simple_name(column.name) in _VALUES and has_absent and _has_marks(column)


def _has_marks(column: Column, *, all_marks: bool = False) -> bool:
    filled = Counter[str]()
    num_rows = np.bincount(column.codes).tolist()  # of each distinct cell
    for word, number in zip(column.words, num_rows, strict=True):
        if word not in MISSING:
            filled[word] += number
    common = _PRESENT | _ABSENT | _MINUS
    num_common = sum(number for word, number in filled.items() if word in common)
    if num_common and not all_marks and 2 * num_common >= filled.total():
        return True
    marks = common | _ALSO_PRESENT | _ALSO_ABSENT
    return not marks.isdisjoint(filled) and set(filled) <= marks | _UNKNOWN


def _is_binary(column: Column) -> bool:
    """Return True for repeated zeros and ones only, which are not the numbers of rows or groups."""
    has_both = not (column.filled.isdisjoint(_PRESENT) or column.filled.isdisjoint(_ABSENT))
    is_repeated = len(column.cells) < len(column.codes)
    return has_both and is_repeated and column.filled <= _PRESENT | _ABSENT


def _numbers(column: Column) -> set[float] | None:
    """Return the distinct numbers in the filled cells, or None if there is other text."""
    try:
        return {float(word.replace(",", ".")) for word in column.filled}
    except ValueError:
        return None


def class_labels(sheet: Sheet, columns: Sequence[Column], rules: Rules) -> Labels:
    """Return the labels of a table with one column per class, in the order of the columns.

    The meaning of -1 and of empty cells depends on the other cells of all class columns, see
    `Rules`. Classes are then consistent, even if a column has only ones and empty cells.

    Raises:
        DataError: If a cell has no meaning, or if -1 or the empty cells have several meanings.
    """
    values = _meanings(sheet, columns, rules)

    # The value 2 marks a cell without a meaning, so that its row can be found.
    matrix = np.empty((len(columns[0].codes), len(columns)), np.int8)
    for number, column in enumerate(columns):
        cells = np.array([values.get(word, 2) for word in column.words], np.int8)
        matrix[:, number] = cells[column.codes]
        if 2 in cells:
            row = int(matrix[:, number].argmax())
            raise DataError(
                f"{sheet.where(row)}: the class {column.name!r} has "
                f"{abbreviate(column.cells[column.codes[row]])}, not 0, 1 or an empty cell; "
                f"correct it"
            )
    return from_dense(matrix, default=-1 if (matrix < 0).any() else 0)


def _meanings(sheet: Sheet, columns: Sequence[Column], rules: Rules) -> dict[str, int]:
    """Return the label of each word in class columns."""
    used = set().union(*(column.words for column in columns))
    has_zeros = not used.isdisjoint(_ABSENT | _ALSO_ABSENT)
    has_minus = not used.isdisjoint(_MINUS)
    minus_one = rules.minus_one or ("unknown" if has_zeros else "absent")
    has_absent = has_zeros or (has_minus and minus_one == "absent")

    # In a table that is filled in by hand, x marks the present classes, and empty cells are absent.
    # In a table with 0 and 1, an empty cell is usually an unknown label. If some columns have only
    # x and others have 0 and 1, both meanings are possible.
    only_marks = used <= MISSING | _MARKS
    has_empty = not used.isdisjoint(MISSING)
    has_column_of_marks = any(column.filled and column.filled <= _MARKS for column in columns)
    empty = rules.empty or ("absent" if only_marks else "unknown")

    # An empty cell next to cells of 1 only may be an absent class or a missing annotation. A table
    # with -1, 0 and 1 may use -1 or 0 for unknown labels.
    settings = []
    if has_minus and has_zeros and rules.minus_one is None:
        settings.append("data.minus_one=unknown (or absent, if 0 is unknown)")
    is_ambiguous = not only_marks and (has_column_of_marks or not has_absent)
    if has_empty and not rules.empty and is_ambiguous:
        settings.append("data.empty=absent (or unknown)")
    if settings:
        raise DataError(
            f"{sheet.source}: the cells of {format_list(names_of(columns))} have "
            f"several meanings; add {' '.join(settings)}"
        )
    if has_minus:
        log.info(f"data: {sheet.source}: -1 in a class column is {minus_one}")
    if has_empty:
        log.info(f"data: {sheet.source}: an empty cell in a class column is {empty}")

    # If -1 is absent, 0 is unknown. In the labels of this package it is the other way around.
    zero = -1 if has_minus and minus_one == "absent" and has_zeros else 0
    values = dict.fromkeys(_PRESENT | _ALSO_PRESENT, 1) | dict.fromkeys(_UNKNOWN, -1)
    values |= dict.fromkeys(_ABSENT | _ALSO_ABSENT, zero)
    values |= dict.fromkeys(_MINUS, 0 if minus_one == "absent" else -1)
    return values | dict.fromkeys(MISSING, 0 if empty == "absent" else -1)


def named_labels(
    sheet: Sheet, roles: Roles, rules: Rules, classes: Sequence[str] | None, *, exclusive: bool
) -> tuple[Labels, tuple[str, ...]]:
    """Return the labels of a table with names of classes in its cells, and the classes.

    If the table has a column of negatives, a class in neither column is unknown (-1). Otherwise all
    classes that are not named are absent (0). Without `classes`, the sorted names in the table are
    the classes. With `exclusive`, each image has exactly one label.

    Raises:
        DataError: If a cell is not a list of names, or its separator is ambiguous.
    """
    assert roles.labels is not None
    given = frozenset(classes or ())
    names = _cell_names(sheet, roles.labels, rules, given, exclusive=exclusive)
    entries = [dict.fromkeys(cell, 1) for cell in names]
    codes = roles.labels.codes
    if roles.value is not None:
        # The class of a row is in `labels`, and its value, as in a class column, in another column.
        rules = replace(rules, minus_one="unknown", empty="unknown")
        values = class_labels(sheet, [roles.value], rules).dense()[:, 0]
        pairs, codes = np.unique([codes, values], axis=1, return_inverse=True)
        entries = [dict.fromkeys(entries[code], value) for code, value in pairs.T.tolist()]
    if roles.negatives is not None:
        # Each distinct pair of cells in both columns gets a code.
        negatives = _cell_names(sheet, roles.negatives, rules, given, exclusive=exclusive)
        pairs = codes.astype(np.int64) * len(negatives) + roles.negatives.codes
        pairs, first, codes = np.unique(pairs, return_index=True, return_inverse=True)
        positives = entries
        entries = []
        for pair, row in zip(pairs.tolist(), first.tolist(), strict=True):
            present = positives[pair // len(negatives)]
            absent = negatives[pair % len(negatives)]
            for name in present:
                if name in absent:
                    fault = f"the class {name!r} is in labels and in negatives"
                    raise DataError(f"{sheet.where(row)}: {fault}; remove one")
            entries.append(dict.fromkeys(absent, 0) | present)

    found = set().union(*entries)
    if classes is None:
        if not found:
            raise DataError(f"{sheet.source}: no image has a label; add labels")
        classes = check_names(sorted(found), sheet.source)
    for name in sorted(found.difference(classes)):
        code = next(code for code, cell in enumerate(entries) if name in cell)
        raise unknown_class(name, classes, sheet.where(int((codes == code).argmax())))

    columns = indices_of(classes)
    numbered = [{columns[name]: value for name, value in cell.items()} for cell in entries]
    default = 0 if roles.negatives is None and roles.value is None else -1
    labels = from_entries(numbered, num_classes=len(classes), default=default)
    return labels.select(codes), tuple(classes)


def _cell_names(
    sheet: Sheet, column: Column, rules: Rules, given: frozenset[str], *, exclusive: bool
) -> list[list[str]]:
    """Return the class names in each distinct cell of a column. `given` are the given classes."""
    # Convert cells of text to lists, if they contain one. Other text is split by the separator.
    cells = [_parse_list(cell) if isinstance(cell, str) else cell for cell in column.cells]
    # Lists of PostgreSQL and makesense.ai have brackets without quotes: {cat,dog} and [cat,dog].
    filled = {cell for cell in cells if isinstance(cell, str) and cell}
    for inner in (r"\{[^{}]*\}", r"\[[^][]*\]"):
        if (
            filled
            and given.isdisjoint(filled)
            and all(re.fullmatch(inner, cell) for cell in filled)
        ):
            cells = [str(cell)[1:-1] if cell in filled else cell for cell in cells]
            log.info(f"data: {sheet.source}: the brackets in {column.name} are not a part of names")

    # Words for missing values are names if they are given. With exactly one label per image, none
    # is one, too.
    missing = MISSING - given - ({"none"} if exclusive else set())
    # The name of a single label may contain a comma or a space, so nothing is detected. A semicolon
    # still separates names, so that two labels raise an error.
    texts = [cell for cell in cells if isinstance(cell, str) and cell.casefold() not in missing]
    separator = rules.separator
    if not separator:
        separator = ";" if exclusive else _find_separator(sheet, texts, given)
    no_label = rules.no_label or ()
    if isinstance(no_label, str):
        no_label = [no_label]

    names = []
    ignored: set[str] = set()
    first_rows = np.unique(column.codes, return_index=True)[1]
    for row, cell in zip(first_rows, cells, strict=True):
        where = sheet.where(row)
        if isinstance(cell, bool | Unreadable):
            fault = f"{cell} is not a class name or a list of class names"
            raise DataError(f"{where}: {fault}; write text or a list of text")
        if isinstance(cell, str) and cell.casefold() in missing:
            cell = (cell,)  # such as N/A, which is not divided
        parts = cell.split(separator) if isinstance(cell, str) else cell
        found = [as_name(part.strip(), where) for part in parts if part.strip()]
        ignored.update(name for name in found if name.casefold() in missing and name not in given)
        names.append([name for name in found if name not in ignored and name not in no_label])
        for name in names[-1]:
            if _NO_NAME.fullmatch(name) and name not in given:
                fault = f"{name!r} is probably not a class name"
                raise DataError(f"{where}: {fault}; add data.no_label=[{name}] or data.classes")
    if ignored:
        text = format_list(sorted(ignored))
        log.info(f"data: {sheet.source}: {text} in {column.name} are missing values, not labels")

    is_vector = all(len(cell) == len(names[0]) > 1 for cell in names)
    if is_vector and set().union(*names) == {"0", "1"}:
        fault = f"the cells of {column.name} are vectors of 0 and 1"
        raise DataError(f"{sheet.source}: {fault}; write one column per class, or names")
    return names


def _parse_list(text: str) -> Cell:
    """Return the names in a list in JSON, in Python, or printed by NumPy. Other text is returned.

    Text that starts like a list and cannot be parsed is `Unreadable`.
    """
    # Names may contain brackets, as in "[red] car". The first item of a list is in quotes, is a
    # number or a mapping, or is null, nan or None.
    start = r"\[\s*([\"'\d{]|(null|nan|None)\s*,)|[({]\s*[\"']"
    if not re.fullmatch(rf"({start}).*[\])}}]|\[\s*\]", text, re.DOTALL):
        return text
    with suppress(ValueError):
        return as_cell(json.loads(text))
    # NumPy prints ['a' 'b'] without commas, which Python would read as the text 'ab'.
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return as_cell(ast.literal_eval(re.sub(r"(['\"])\s+(['\"])", r"\1, \2", text)))
    return Unreadable(abbreviate(text))


def _find_separator(sheet: Sheet, texts: Sequence[str], given: frozenset[str]) -> str:
    """Return the separator of the class names in cells, by default a semicolon.

    Raises:
        DataError: If several characters may be the separator, or one may be a part of the names.
    """
    results = {sign: _separates(texts, sign, given) for sign in _CERTAIN + ",\uff0c/+&-_: "}
    # Names with spaces are common. If another sign separates names, a space is a part of them.
    if any(result is not False for sign, result in results.items() if sign != " "):
        del results[" "]
    found = [sign for sign, result in results.items() if result]
    unclear = [sign for sign, result in results.items() if result is None]
    if len(found) == 1 or not found + unclear:
        separator = found[0] if found else ";"
        if separator != ";":
            log.info(f"data: {sheet.source}: labels are separated by {separator!r}")
        return separator

    # Show the setting for each candidate. With a semicolon, each cell is one name.
    sign = (found + unclear)[-1]
    example = next(text for text in texts if sign in text)
    settings = [f"data.separator={sign!r}" for sign in dict.fromkeys(found + unclear + [";"])]
    fault = f"the labels {abbreviate(example)} are one name or several"
    raise DataError(f"{sheet.source}: {fault}; add {' or '.join(settings)}")


def _separates(texts: Sequence[str], sign: str, given: frozenset[str]) -> bool | None:
    """Return whether a character separates names in cells, or None if this cannot be decided."""
    if not any(sign in text for text in texts):
        return False
    cells = [[part.strip() for part in text.split(sign) if part.strip()] for text in texts]
    several = [parts for parts in cells if len(parts) > 1]
    # The given classes may contain the character.
    if not several or given.issuperset(texts):
        return False
    names = Counter[str]()  # number of cells with each name
    for parts in cells:
        names.update(set(parts))
    # Class names rarely contain a semicolon, a bar, a line break, a tab, or the marks of lists in
    # Chinese and Japanese.
    if sign in _CERTAIN or given.issuperset(names):
        return True
    # Ranges, such as 25-32, are names.
    if sign not in "-_:" and all(name.isdecimal() for name in names):
        return True

    # The names in a list also occur in other cells. Words of a name rarely do, except for nouns, as
    # in "hot dog" and "dog". A comma is therefore a separator if at least half of the lists have a
    # repeated name. Otherwise it may be a part of names, such as "Smith, Anna".
    alone = {parts[0] for parts in cells if len(parts) == 1}
    num_repeated = sum(any(names[part] > 1 for part in parts) for parts in several)
    if sign in ",\uff0c":
        return True if 2 * num_repeated >= len(several) else None

    # Names with spaces are more common than lists with spaces, so a space needs stronger evidence:
    # the names of at least half of the lists also occur alone, or few names form lists of several
    # lengths.
    num_alone = sum(alone.issuperset(parts) for parts in several)
    # Names such as "black & white" and "indoor/kitchen" are common, too, and lists with these signs
    # are rare, so they are never read as lists without a setting.
    if sign in "/+&-_:":
        return None if 2 * num_alone >= len(several) else False
    num_lengths = len(set(map(len, cells)))
    if 2 * num_alone >= len(several) or (2 * len(names) <= len(cells) and num_lengths > 2):
        return True
    return None if num_repeated else False
