"""Roles of the columns of a table of labels. `mldec.data.cells` reads the labels in the cells.

A table with a single meaning is read, and the meaning is logged. If several meanings are possible,
the error names the settings that select one, because a wrong guess would train on wrong labels.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

import numpy as np

from mldec.data.images import NOT_READ, READ
from mldec.data.splits import SPLITS
from mldec.errors import DataError, log
from mldec.files.tables import Cell, as_cell, simple_name
from mldec.names import abbreviate, check_names, format_list

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
_SPLIT_COLUMNS = ("split", "splits", "subset", "set", "partition", "fold", "kfold", "foldid")
# Columns of flags, such as is_valid, and the splits of the rows where the flag is true and false.
_FLAGS = dict.fromkeys(("isvalid", "isval", "isvalidation"), ("val", "train"))
_FLAGS |= dict.fromkeys(("istest", "istesting"), ("test", "train"))
_FLAGS |= dict.fromkeys(("istrain", "istraining", "intrain"), ("train", "val"))
_SPLIT_WORD = re.compile(r"[^/\\]*(train|val|test|dev|holdout)[^/\\]*")

# Columns whose 0 and 1 belong to the label of the row: Open Images has a row per pair of an image
# and a label, and a label with the confidence 0 is absent.
_SCORES = ("confidence", "conf", "probability", "prob", "percent", "score", "scores", "count")
_VALUES = ("present", "presence", "value", *_SCORES)
# Columns that are never classes, even if their cells are 0 and 1. `group` is the column of groups.
_NO_CLASSES = {"labels", "negatives", "group", "regioncount", "annotator", *_SCORES}
_NO_CLASSES |= {*_SPLIT_COLUMNS, *_FLAGS}
# Properties of photos whose small numbers are not counts of a class.
_PROPERTIES = ("age", "year", "month", "day", "hour", "width", "height", "size", "number", "rating")
# Names of columns of row numbers and ids, which are distinct. `DataFrame.to_csv` writes the index
# as a column without a name, which `read_csv` calls "Unnamed: 0". Its numbers 0 and 1 would look
# like a class.
_INDEX = re.compile(r"(unnamed: [\d.]+|level_\d+|(.*[\s_])?(index|id|#))?", re.IGNORECASE)

# Words for missing values, and the words of class columns, in lower case; see `Column.words`.
MISSING = {"", "nan", "na", "n/a", "#n/a", "<na>", "null", "none"}
UNKNOWN = {"?", "unknown", "uncertain", "maybe"}
_PRESENT = {"1", "true", "yes"}
_ABSENT = {"0", "false", "no"}
MINUS = {"-1"}
_COMMON = _PRESENT | _ABSENT | MINUS
# Marks of forms and of tables that are filled in by hand, where an empty cell is absent.
TICKS = {"x", "\u2713", "\u2714", "\u2611", "\u2705", "checked"}
_CROSSES = {"\u2717", "\u2718", "\u2716", "\u2610", "\u274c", "unchecked"}
# Pairs of words that could also be codes, so that a column of classes must not have any other
# words. Excel writes true and false in the language of the user.
_PAIRS = """
    t/f y/n present/absent positive/negative pos/neg
    wahr/falsch vrai/faux vero/falso verdadero/falso verdadeiro/falso waar/onwaar prawda/fałsz
    sant/falskt sand/falsk sann/usann tosi/epätosi pravda/nepravda igaz/hamis doğru/yanliş
    ja/nein ja/nee oui/non sí/no si/no sim/não tak/nie on/off
    истина/ложь да/нет 是/否 はい/いいえ
"""
PRESENT, ABSENT = (
    set(words) for words in zip(*(pair.split("/") for pair in _PAIRS.split()), strict=True)
)
PRESENT |= _PRESENT | TICKS
ABSENT |= _ABSENT | _CROSSES
# Letters that are often codes, such as F (female) and N (north), and the other letter of the pair.
_CODES = {"t": "f", "f": "t", "n": "y"}
_NUMBER = re.compile(r"([+-]?\d+[.,]?\d*(?:e[+-]\d+)?)(%?)", re.IGNORECASE)
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
        """The distinct cells in lower case, with numbers and marks in their shortest form."""
        words = [_word(str(cell)) for cell in self.cells]
        # Survey forms write the name of a choice in the column of this name.
        own = self.name.casefold()
        if own not in MISSING | PRESENT | ABSENT and set(words) <= MISSING | {own}:
            words = ["x" if word == own else word for word in words]
        return words

    @cached_property
    def filled(self) -> set[str]:
        """The words that are not missing values."""
        return set(self.words) - MISSING

    def has(self, words: Collection[str]) -> np.ndarray:
        """Return a mask of the rows whose word is in `words`, bool [N]."""
        return np.array([word in words for word in self.words], bool)[self.codes]


def _word(text: str) -> str:
    """Return text in lower case without the variants of emoji, and numbers such as 1.0 as 1."""
    # pandas writes 1.0 if an integer column has missing values, and some spreadsheets write a
    # decimal comma. Digits only, such as 01, may be the name of a fold.
    number = _NUMBER.fullmatch(text)
    if number and not text.isdecimal():
        value = float(number[1].replace(",", "."))
        return str(value / 100 if number[2] else value).removesuffix(".0")
    return text.casefold().replace("\ufe0f", "")


@dataclass(frozen=True)
class Sheet:
    """The columns of a table, or of several concatenated tables with the same columns."""

    columns: list[Column]
    source: str  # names of the tables, for messages
    tables: np.ndarray  # name of the table of each row, [N]
    rows: np.ndarray  # number of each row in the file of its table, [N]

    @cached_property
    def marks(self) -> set[str]:
        """The words for presence and absence. Letters such as F need the other one of the pair."""
        marks = PRESENT | ABSENT | MINUS
        few = [column for column in self.columns if len(column.cells) <= len(marks)]
        used = set().union(*(column.filled for column in few if column.filled <= marks | UNKNOWN))
        return marks - {letter for letter, other in _CODES.items() if other not in used}

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
        # Names of several levels, as of a pivot table, end with that of the class.
        if isinstance(name, tuple):
            name = next((part for part in reversed(name) if part), "")
        values = table.iloc[:, number]
        # Cells are parsed once per distinct value, which is much faster for class columns.
        try:
            codes, distinct = pandas.factorize(values, use_na_sentinel=False)
        except (TypeError, NotImplementedError):
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
    if not files:
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
    value = None
    if labels is not None:
        value = next((column for column in left if _is_value(sheet, column)), None)
        if value is None and rules.labels_column is None:
            _check_scores(sheet, labels, left)
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
    named = [column for column in named if not _is_class(sheet, column, classes, all_marks=True)]
    if labels is None and len(named) == 1:
        labels = named.pop()
    others = [column for column in named if _numbers(column) is None]

    # A table may have both forms. Given classes select the columns with their names. Otherwise the
    # user must choose, because both forms may differ.
    class_columns = [
        column for column in left if _is_class(sheet, column, classes, all_marks=bool(labels))
    ]
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
    marks = (UNKNOWN | PRESENT | ABSENT | {"+", "-"}) - set("tyfn")
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
    num_alike = sum(_SPLIT_WORD.fullmatch(word) is not None for word in words)
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


def split_words(column: Column) -> list[str]:
    """Return the split of each distinct cell in lower case, or "" for none."""
    return ["" if word in _NO_SPLIT else word for word in column.words]


def _is_class(
    sheet: Sheet, column: Column, classes: Collection[str] | None, *, all_marks: bool
) -> bool:
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
    return _has_marks(sheet, column, all_marks=all_marks)


def _is_value(sheet: Sheet, column: Column) -> bool:
    # A column of ones only, such as the confidence of labels by hand, has no effect.
    has_absent = not column.filled.isdisjoint(ABSENT)
    return simple_name(column.name) in _VALUES and has_absent and _has_marks(sheet, column)


def _check_scores(sheet: Sheet, labels: Column, left: Sequence[Column]) -> None:
    """Raise DataError if a column has scores or counts of labels that are probably absent."""
    for column in left:
        numbers = _numbers(column) if simple_name(column.name) in _VALUES else None
        if numbers and min(numbers) < 0.5:
            fault = f"labels with {column.name} {min(numbers):g} may be absent"
            remedy = f"remove these rows, or add data.labels_column={labels.name} to keep them"
            raise DataError(f"{sheet.source}: {fault}; {remedy}")


def _has_marks(sheet: Sheet, column: Column, *, all_marks: bool = False) -> bool:
    num_common = column.has(_COMMON).sum()
    if num_common and not all_marks and 2 * num_common >= (~column.has(MISSING)).sum():
        return True
    return not sheet.marks.isdisjoint(column.filled) and column.filled <= sheet.marks | UNKNOWN


def _is_binary(column: Column) -> bool:
    """Return True for repeated zeros and ones only, which are not the numbers of rows or groups."""
    has_both = not (column.filled.isdisjoint(_PRESENT) or column.filled.isdisjoint(_ABSENT))
    is_repeated = len(column.cells) < len(column.codes)
    return has_both and is_repeated and column.filled <= _PRESENT | _ABSENT


def _numbers(column: Column) -> set[float] | None:
    """Return the distinct numbers in the filled cells, or None if there is other text."""
    try:
        return set(map(float, column.filled))
    except ValueError:
        return None
