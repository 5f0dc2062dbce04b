"""Roles of the columns of a table of labels. `mldec.data.cells` reads the labels in the cells.

A table with a single meaning is read, and the meaning is logged. If several meanings are possible,
the error names the settings that select one, because a wrong guess would train on wrong labels.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mldec.data.sheet import (
    ABSENT,
    CODES,
    COMMON,
    FALSE,
    MISSING,
    PRESENT,
    TRUE,
    UNKNOWN,
    Column,
    Sheet,
    is_image_name,
    names_of,
)
from mldec.data.splits import SPLITS
from mldec.errors import DataError, log
from mldec.files.tables import simple_name
from mldec.names import abbreviate, check_names, format_list

# Common names of the columns of each role, as returned by `simple_name`, in order of precedence.
_PATHS = "path filepath imagepath filename imagename file image img imgpath imgname fname photo"
PATHS = (*_PATHS.split(), "photopath", "imageindex", "imageid", "imgid")
# A column whose name ends with one of these, such as finding_labels, is also used if no other
# column has such a name.
_NAMES = "labels label tags tag classes class categories category labelname classname tagname"
LABELS = (*_NAMES.split(), "species", "choice")
# Such names with a suffix are labels, too: label_names, label2, and the label.1 of pandas.
_LABELS = re.compile(rf".*({'|'.join(LABELS)})(names?)?\.?\d*")
# Names of split columns. A column with another name is used if all its cells are names of splits.
_SPLIT_COLUMNS = ("split", "splits", "subset", "set", "partition", "fold", "kfold", "foldid")
# Columns of flags, such as is_valid, and the splits of the rows where the flag is true and false.
_FLAGS = dict.fromkeys(("isvalid", "isval", "isvalidation"), ("val", "train"))
_FLAGS |= dict.fromkeys(("istest", "istesting"), ("test", "train"))
_FLAGS |= dict.fromkeys(("istrain", "istraining", "intrain"), ("train", "val"))
_SPLIT_WORD = re.compile(r"[^/\\]*(train|val|test|dev|holdout)[^/\\]*")

# Columns whose 0 and 1 belong to the label of the row: Open Images has a row per pair of an image
# and a label, and a label with the confidence 0 is absent.
_SCORES = ("confidence", "probability", "score")
_VALUES = ("present", "presence", "value", *_SCORES)
_AMOUNTS = (*_VALUES, "conf", "prob", "percent", "scores", "count")
# Columns that are never classes, even if their cells are 0 and 1. `group` is the column of groups.
_NO_CLASSES = {"labels", "negatives", "group", "regioncount", "annotator", *_SCORES}
_NO_CLASSES |= {*_SPLIT_COLUMNS, *_FLAGS}
# Properties of photos whose small numbers are not counts of a class.
_PROPERTIES = ("age", "year", "month", "day", "hour", "width", "height", "size", "number", "rating")
# Names of columns of row numbers and ids, which are distinct. `DataFrame.to_csv` writes the index
# as a column without a name, which `read_csv` calls "Unnamed: 0". Its numbers 0 and 1 would look
# like a class.
_INDEX = re.compile(r"(unnamed: [\d.]+|level_\d+|(.*[\s_])?(index|id|#))?", re.IGNORECASE)

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
    search = _Search(sheet, rules, frozenset(classes or ()))
    # The order matters: a column that one role takes is not a candidate for the next role.
    path = search.path()
    labels = search.take(label_columns, "labels_column")
    negatives = search.take(["negatives"])
    split = search.split()
    group = None
    if rules.group_column is not None or "group" not in search.given:
        group = search.take(["group"], "group_column")

    labels, columns = search.choose_form(labels)
    if path is None or (labels is None and (not columns or negatives is not None)):
        raise search.unknown_columns(path, labels)
    value = None
    if labels is not None:
        value = next(filter(search.is_value, search.left), None)
    # Given classes select the columns, so that the meaning of the other ones does not matter.
    elif not search.given:
        groups = [group] if group is not None and rules.group_column is None else []
        search.check_unused(columns, groups)

    roles = Roles(path, split, group, labels, value, negatives, columns)
    search.log_roles(roles)
    names = check_names(names_of(columns), sheet.source)
    pairs = zip(columns, names, strict=True)
    return replace(roles, classes=[replace(column, name=name) for column, name in pairs])


class _Search:
    """Search for the columns of each role. A column with a role is no candidate for another one."""

    def __init__(self, sheet: Sheet, rules: Rules, given: frozenset[str]) -> None:
        self.sheet = sheet
        self.source = sheet.source
        self.rules = rules
        self.given = given  # the given classes
        self.left = list(sheet.columns)  # columns without a role yet

    def take(self, wanted: Sequence[str], setting: str | None = None) -> Column | None:
        """Return the column of a role by its names or its setting, and remove it from `left`."""
        chosen = getattr(self.rules, setting) if setting else None
        for name in wanted if chosen is None else [simple_name(chosen)]:
            found = [column for column in self.left if column.key == name]
            if len(found) > 1:
                raise DataError(f"{self.source}: the column {name!r} is listed twice; rename one")
            if found:
                self.left.remove(found[0])
                return found[0]
        if chosen is not None:
            names = format_list(names_of(self.sheet.columns))
            raise ValueError(f"{setting} is {chosen!r}; {self.source} has the columns {names}")
        return None

    def path(self) -> Column | None:
        """Return the column of image paths."""
        # A column of numbers may be called image or id, so a column with file names comes first.
        files = [column.key for column in self.left if column.has_image_names]
        path = self.take(sorted(PATHS, key=lambda name: name not in files), "path_column")
        if path is None and len(files) < 2:
            path = self.take(files or ["id"])
        return path

    def choose_form(self, labels: Column | None) -> tuple[Column | None, list[Column]]:
        """Return the column of labels, or the class columns. The other one is None or empty."""
        if self.rules.labels_column is not None:
            return labels, []
        # A class column may have such a name, too, such as no_label.
        named = [column for column in self.left if _LABELS.fullmatch(column.key)]
        named = [column for column in named if not self.is_class(column, all_marks=True)]
        if labels is None and len(named) == 1:
            labels = named.pop()
        others = [column for column in named if column.numbers is None]
        for column in self.left:
            # A label with a low score or the count 0 is probably absent.
            is_amount = column.key in _AMOUNTS and not self.is_value(column)
            if is_amount and min(column.numbers or [1]) < 0.5:
                others.append(column)

        # A table may have both forms. Given classes select the columns with their names. Otherwise
        # the user must choose, because both forms may differ.
        has_labels = labels is not None
        classes = [column for column in self.left if self.is_class(column, all_marks=has_labels)]
        chosen = [column for column in classes if column.name in self.given]
        if chosen and len(chosen) == len(self.given):
            return None, chosen
        if labels is None:
            return None, classes
        if others or classes:
            names = format_list(names_of(others + classes))
            raise DataError(
                f"{self.source}: the column {labels.name} has labels, but {names} look like labels "
                f"or classes; add data.labels_column={labels.name} to ignore them, "
                f"data.classes=[NAMES] for classes, or name a column present if its 0 means that "
                f"the label is absent"
            )
        return labels, []

    def is_class(self, column: Column, *, all_marks: bool) -> bool:
        """Return True if a column has the name of a given class, or marks, see `has_marks`."""
        if column.name in self.given:
            return True
        if column.key in _NO_CLASSES or (all_marks and column.key in _VALUES):
            return False
        if _INDEX.fullmatch(column.name):
            return column.is_binary
        return self.has_marks(column, all_marks=all_marks)

    def is_value(self, column: Column) -> bool:
        """Return True if a column has marks for the label of its row, and some are absent."""
        # A column of ones only, such as the confidence of labels by hand, has no effect.
        has_absent = not column.filled.isdisjoint(ABSENT)
        return column.key in _VALUES and has_absent and self.has_marks(column, all_marks=False)

    def has_marks(self, column: Column, *, all_marks: bool) -> bool:
        """Return True if a column has marks for presence and absence.

        It is sufficient if at least half of the filled cells are 0, 1, -1, true, false, yes or no.
        The other cells are probably mistakes, which `class_labels` reports. If `all_marks` is true,
        or if there is no such cell, all filled cells must be marks or words for unknown labels.
        """
        num_common = column.has(COMMON).sum()
        if num_common and not all_marks and 2 * num_common >= (~column.has(MISSING)).sum():
            return True
        marks = self.sheet.marks
        return not marks.isdisjoint(column.filled) and column.filled <= marks | UNKNOWN

    def check_unused(self, classes: Sequence[Column], groups: Sequence[Column]) -> None:
        """Raise DataError if an unused column, or a group, may have labels or be a class."""
        names = ",".join(names_of(classes))
        for column in self.left + list(groups):
            if column in classes:
                continue
            # A single column of 0 and 1 may be a property of photos, such as is_night, next to the
            # labels, whose names occur in several rows. Next to several classes, such a column is
            # rather a property itself, such as the author.
            is_repeated = 1 < len(column.filled) < len(column.codes) and not column.has_image_names
            is_text = any(word[0].isalpha() for word in column.filled)
            if _resembles_class(column):
                remedy = "correct its cells if it is a class"
            elif len(classes) == 1 and is_repeated and is_text:
                remedy = f"add data.labels_column={column.name}"
            else:
                continue
            fault = f"{column.name} with {abbreviate(column.cells[0])} is not used"
            raise DataError(
                f"{self.source}: {fault}; {remedy}, or add data.classes=[{names[:200]}]"
            )

    def log_roles(self, roles: Roles) -> None:
        """Log the roles, and the columns without a role, so that users can check them."""
        text = f"data: {self.source} has images in {roles.path.name}"
        named = {"labels": roles.labels, "splits": roles.split, "groups": roles.group}
        for what, column in named.items():
            if column is not None:
                text += f", {what} in {column.name}"
        if roles.classes:
            text += f", classes {format_list(names_of(roles.classes))}"
        if roles.value is not None:
            text += f", and {roles.value.name} marks labels as present (1) or absent (0)"
        left = [column for column in self.left if column not in (roles.value, *roles.classes)]
        unused = [column.name or "(no name)" for column in left if column.filled]
        if unused:
            text += f"; not used: {format_list(unused)}"
        empty = [column.name or "(no name)" for column in left if not column.filled]
        if empty:
            text += f"; empty ({len(empty)}): {format_list(empty)}"
        log.info(text)

    def unknown_columns(self, path: Column | None, labels: Column | None) -> DataError:
        """Return the error for a table without paths or labels. It names all missing settings."""
        names = names_of(self.sheet.columns)
        # Without a header, the first row of data became the names of the columns.
        if any(is_image_name(name) for name in names):
            fault = "row 1 has no column names"
            return DataError(f"{self.source}: {fault}; add them, as path,labels")
        settings = []
        if path is None or path.key not in PATHS:
            settings.append(f"data.path_column={path.name if path else 'NAME'}")
        if labels is None:
            name = self.left[0].name if len(self.left) == 1 else "NAME"
            settings.append(f"data.labels_column={name}")
        what = "image paths" if path is None else "labels"
        return DataError(
            f"{self.source}: no column of {what} is known among {format_list(names)}; add "
            f"{' '.join(settings)}, or name the columns path and labels, or one per class with 0 "
            f"and 1"
        )

    def split(self) -> Column | None:
        """Return the column of splits by its name or cells, or from flags.

        Raises DataError if several columns may be the split, or one has other words: ignoring them
        would train on test images.
        """
        split = self.take(["split"], "split_column")
        if split is not None:
            if _is_flag(split):
                return self.from_flags([split])
            return split
        flags = [column for column in self.left if _is_flag(column)]
        found = [column for column in self.left if _has_splits(column)]
        are_known = all(column.filled <= SPLITS.keys() | _NO_SPLIT for column in found)
        if len(found) + bool(flags) == 1 and are_known:
            for column in found or flags:
                self.left.remove(column)
            return found[0] if found else self.from_flags(flags)

        found += flags
        for column in [] if found else self.left:
            # Most images are for training, but only a few of them may show a train.
            is_split = column.key in SPLITS and column.filled <= TRUE | FALSE
            is_rare = column.key == "train" and column.has(TRUE).mean() < 0.5
            is_class = column.name in self.given or is_rare
            if column.key in _SPLIT_COLUMNS or (is_split and column.filled and not is_class):
                found.append(column)
        if not found:
            return None
        name = found[0].name
        remedy = f"data.split_column={name} data.val=NAME data.train=NAME, or data.classes=[NAMES]"
        fault = f"{format_list(names_of(found))} may be the split, with "
        fault += format_list(sorted(found[0].filled), 5)
        raise DataError(f"{self.source}: {fault}; rename it, or add {remedy}")

    def from_flags(self, flags: Sequence[Column]) -> Column:
        """Return the splits of flags, such as is_val and is_test, of which at most one is true."""
        splits = np.full(len(flags[0].codes), "", object)
        for flag in flags:
            is_true = flag.has(TRUE)
            if (is_true & (splits != "")).any():
                row = int((is_true & (splits != "")).argmax())
                fault = f"{flag.name} is true, and the image is in {splits[row]}"
                remedy = "correct it, or set data.split_column"
                raise DataError(f"{self.sheet.where(row)}: {fault}; {remedy}")
            splits[is_true] = _FLAGS[flag.key][0]
        # The images of no flag are for training, unless there is a flag for this.
        if len(flags) == 1 or all(_FLAGS[flag.key][0] != "train" for flag in flags):
            absent = _FLAGS[flags[-1].key][1]
            splits[(splits == "") & ~flags[0].has(_NO_SPLIT)] = absent
        cells, codes = np.unique(splits.astype(str), return_inverse=True)
        return Column(" and ".join(names_of(flags)), cells.tolist(), codes)


def _resembles_class(column: Column) -> bool:
    """Return True for scores in [0, 1], counts with a 0, and few words with a mark among them."""
    if column.key == "group":
        return column.is_binary
    if column.key in (*_PROPERTIES, *_NO_CLASSES) or _INDEX.fullmatch(column.name):
        return False
    numbers = column.numbers
    if numbers:
        is_count = 0 in numbers and numbers <= set(range(21))
        return is_count or 0 <= min(numbers) <= max(numbers) <= 1
    marks = (UNKNOWN | PRESENT | ABSENT | {"+", "-"}) - {"y", *filter(str.isalpha, CODES)}
    return len(column.filled) <= 3 and not marks.isdisjoint(column.filled)


def _has_splits(column: Column) -> bool:
    """Return True if the column has at most ten words, most like names of splits, such as train."""
    words = column.filled - _NO_SPLIT if len(column.filled) <= 10 else set()
    num_alike = sum(_SPLIT_WORD.fullmatch(word) is not None for word in words)
    has_train = any("train" in word for word in words)
    return has_train and 2 * num_alike > len(words) and not column.has_image_names


def _is_flag(column: Column) -> bool:
    words = column.filled - _NO_SPLIT if column.key in _FLAGS else set()
    return bool(words) and words <= TRUE | FALSE


def split_words(column: Column) -> list[str]:
    """Return the split of each distinct cell in lower case, or "" for none."""
    return ["" if word in _NO_SPLIT else word for word in column.words]
