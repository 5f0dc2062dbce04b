"""Custom datasets in a CSV file with a list of labels per image or a column per class."""

import codecs
import io
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress
from pathlib import Path

import numpy as np

from mldec.data.settings import Source
from mldec.data.splits import HELD_OUT, HoldOut, check_val, log_split
from mldec.data.table import Table, TableBuilder, encode_paths, path_inside
from mldec.data.tasks import multi_label, partial_labels, single_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.atomic import csv_lines
from mldec.files.text import csv_rows, read_bytes
from mldec.names import abbreviate, as_name, check_names, format_list, given_names, split_names

log = logging.getLogger("mldec")

_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons"}

# Recognized column names, see `_simple`. The first match is used.
_PATHS = ("path", "filepath", "imagepath", "filename", "imagename", "file", "image")
_LABELS = ("labels", "label", "tags", "tag", "classes", "class")
_ROLES = {"path": _PATHS, "labels": _LABELS, "negatives": ("negatives",), "split": ("split",)}
_ROLES |= {"group": ("group",)}

# Row number columns of pandas and Excel.
_INDEX = re.compile(r"(unnamed: \d+|index|id)?", re.IGNORECASE)

_VAL = ("val", "valid", "validation")  # common names of the validation split

# Values of class columns. Spreadsheets write 1.0 if a column also has empty cells.
_CELLS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "": -1}
# Cells of a class column. Cells with -1 are errors, which `_labels` reports with their row.
_BINARY = ("0", "0.0", "1", "1.0", "-1", "-1.0")


def csv_table(
    *,
    root: str,
    file: str = "data.csv",
    images: str = "",
    path_column: str | None = None,
    labels_column: str | None = None,
    group_column: str | None = None,
    encoding: str = "utf-8",
    separator: str = ";",
    classes: str | list[str] | None = None,
    exclusive: bool = False,
    train: str = "train",
    val: str = "val",
    division: HoldOut = HELD_OUT,
    threshold: float = 0.5,
    skip_empty: bool = True,
    top_k: int | None = None,
) -> Source:
    """Return the images of a CSV file in the order of its rows.

    The header has these columns in any order:

    - path: Path of the image.
    - split: Name of the split (optional).
    - One column per class with 1 (present), 0 (absent) or an empty cell (not annotated, -1).
    - labels: Class names with a separator, or a JSON list, instead of a column per class.
    - group: Images with the same text, such as the frames of a video, stay in one split (optional).
    - negatives: The absent classes, in the form of labels (optional). With this column, a class in
      neither list is not annotated.

    The metric is `mAP_partial` if labels may be not annotated. Other common column names are
    recognized, see `recognize`. Other columns are ignored.

    Args:
        file: CSV file, relative to `root` or absolute, separated by commas, tabs or semicolons.
            Fields that contain the separator are in double quotes.
        images: Folder in `root` that the paths are relative to. Absolute paths must be inside it.
        path_column: Name of the path column. None takes "path" or another common name.
        labels_column: Name of the label column. None takes "labels" or another common name.
        group_column: Name of the column of groups. None takes "group".
        encoding: Encoding of the file, such as cp1252 (Excel on Windows) or utf-16.
        separator: Separator between two labels of an image, unless they are a JSON list.
        classes: Class names in order, or a text file with one name per line. None takes the sorted
            labels of all rows, or the class columns in the order of the file.
        exclusive: Each image has exactly one label. The metric is top-1 instead of mAP.
        train: Value of the split column in training rows, ignoring case.
        val: Value of the split column in validation rows. val, valid and validation are equivalent.
        division: Held-out images if there is no split column.
        top_k: k of the accuracy (`exclusive`) or of precision, recall and F1 at top-k.

    Raises:
        ValueError: If an argument is out of range or does not fit the file.
    """
    evaluator = multi_label(threshold, top_k=top_k, skip_empty=skip_empty)
    folder = check_folder(root, "the CSV file")
    source = folder / Path(file).expanduser()
    image_folder = folder / path_inside(images or ".", "data.images")

    names = given_names(classes, folder)
    form = recognize(source, encoding, path_column, labels_column, names, group_column)
    has_split = "split" in form.columns
    for name, value in (("train", train), ("val", val)):
        if not has_split and value != name:
            raise ValueError(f"{name} is {value}; {source} has no column split: add one")
    if exclusive:
        evaluator = single_label(top_k)
    elif form.partial:
        evaluator = partial_labels(threshold, top_k=top_k)
    kind = "a column per class" if form.classes else "a column of labels"
    unknown = ", and labels that are not annotated" if form.partial else ""
    separated = _DELIMITERS[form.delimiter]
    log.info(f"csv: {source} has columns separated by {separated}, with {kind}{unknown}")

    @cache
    def parse() -> tuple[Table, np.ndarray]:
        return _parse(source, form, names, separator, exclusive, image_folder)

    def load(part: str, _: str | None) -> StoredImages:
        table, splits = parse()
        if has_split:
            if part == val:
                check_val(form.find_split(val), form.splits, source)
            table = table.select(splits == form.find_split(part))
        else:
            num_images = len(table)
            table = division.select(table, val=part == val)
            if part == val:
                log.info(
                    f"csv: no column split, so {len(table):,} of {num_images:,} images are held "
                    f"out for validation ({division.split}); see data.val_fraction and data.split"
                )

        log_split("csv", part, table)
        if part == train:
            used = {form.find_split(train), form.find_split(val)}
            for name, count in form.splits.items():
                if name not in used:
                    log.info(f"csv: {count:,} rows of the split {name!r} are not used")
        return in_folder(table, image_folder)

    result = Source(load=load, train=train, val=val, where=source, evaluator=evaluator)
    return replace(result, exclusive=exclusive, folder_setting="data.images")


@dataclass(frozen=True)
class Form:
    """Format of a CSV file."""

    delimiter: str
    encoding: str  # Python codec

    # Role of each column (path, labels, negatives, split, group), a class name, or "" if not used.
    columns: tuple[str, ...]

    classes: tuple[str, ...]  # classes with a column, in the order of the file
    partial: bool  # whether labels may be not annotated: a negatives column or empty cells
    splits: dict[str, int]  # lowercase name -> number of rows

    @property
    def default(self) -> int:
        """Value of unlisted labels: 0 (absent), or -1 if absent labels are also listed."""
        return -1 if self.partial else 0

    def find_split(self, wanted: str) -> str:
        """Return the name of a split in the file. Validation has several common names."""
        wanted = wanted.strip().lower()
        if wanted in self.splits or wanted not in _VAL:
            return wanted
        others = [name for name in _VAL if name in self.splits]
        if len(others) == 1:
            return others[0]
        return wanted


def recognize(
    source: Path,
    encoding: str,
    path_column: str | None,
    labels_column: str | None,
    classes: Sequence[str] | None,
    group_column: str | None = None,
) -> Form:
    """Detect the format of a CSV file.

    See docs/data.md, section Forms of a table, for the rules. Raises ValueError if a named column
    does not exist, and DataError if the file has no paths, no labels or ambiguous columns.
    """
    codec, delimiter = _text_format(source, encoding, path_column)
    rows = _filled_rows(source, delimiter, codec)
    line, header = next(rows, (1, [""]))
    where = f"{source}, row {line}"
    names = list(map(str.strip, header))
    settings = {"path": path_column, "labels": labels_column, "group": group_column}
    roles = _find_roles(names, settings, where)

    # Count the cells of each column, except for columns with a different text in each row.
    counts: dict[int, Counter[str]] = {}
    for column in range(len(names)):
        if column not in [roles.get(role) for role in ("path", "labels", "negatives", "group")]:
            counts[column] = Counter()
    for _, row in rows:
        for column, count in counts.items():
            count[row[column].strip()] += 1

    splits = Counter[str]()
    for name, number in counts.pop(roles.get("split", -1), {}).items():
        splits[name.lower()] += number

    # A class column has 0, 1 or -1 in at least half of its filled cells. Role names and the index
    # columns of pandas and Excel are not classes.
    class_columns: list[int] = []
    if "labels" not in roles:
        for column, count in counts.items():
            if _simple(names[column]) in _ROLES or _INDEX.fullmatch(names[column]):
                continue
            num_filled = count.total() - count[""]
            num_binary = sum(count[cell] for cell in _BINARY)
            is_class = num_binary >= max(num_filled, 1) / 2
            if is_class or names[column] in (classes or ()):
                class_columns.append(column)
        if not class_columns or "negatives" in roles:
            raise DataError(
                f"{where}: no labels among the columns {abbreviate(', '.join(names))}; rename one "
                f"to labels, set data.labels_column, or add a column of 0 and 1 per class"
            )
    class_names = check_names([names[column] for column in class_columns], where)

    columns = [""] * len(names)
    for role, column in roles.items():
        columns[column] = role
    is_partial = "negatives" in roles
    for column in class_columns:
        columns[column] = names[column]
        is_partial |= counts[column][""] > 0

    unused = []
    for number, (name, role) in enumerate(zip(names, columns, strict=True), 1):
        if not role:
            unused.append(name or f"column {number}")
    if unused:
        log.info(f"csv: {source} has columns that are not used: {format_list(unused)}")
    return Form(delimiter, codec, tuple(columns), class_names, is_partial, dict(splits))


def _text_format(source: Path, encoding: str, path_column: str | None) -> tuple[str, str]:
    """Return codec and delimiter of a file. Raises DataError if the encoding does not match."""
    content = read_bytes(source)
    try:
        codec = encoding
        if codecs.lookup(encoding).name == "utf-8":
            codec = "utf-8-sig"
        text = content.decode(codec)
    except LookupError as error:
        raise ValueError(f"encoding is {encoding!r}; pass a codec of Python") from error
    except UnicodeError as error:
        raise DataError(
            f"{source}: it is not {encoding} text; save it as UTF-8, or set data.encoding, such as "
            f"cp1252 (Excel on Windows) or utf-16"
        ) from error

    # Use the first delimiter that gives a path column. A file without such a column is invalid.
    first_line = next(filter(str.strip, io.StringIO(text, newline=None)), "")
    known = _PATHS if path_column is None else (_simple(path_column),)
    delimiter = ","
    for sign in reversed(_DELIMITERS):
        titles = [_simple(title.strip(' "\n')) for title in first_line.split(sign)]
        if len(titles) > 1 and not set(known).isdisjoint(titles):
            delimiter = sign
    return codec, delimiter


def _find_roles(
    names: Sequence[str], settings: Mapping[str, str | None], where: str
) -> dict[str, int]:
    simple_names = [_simple(name) for name in names]
    roles = {}
    for role, common_names in _ROLES.items():
        setting = settings.get(role)
        wanted = common_names if setting is None else (_simple(setting),)
        found = next((name for name in wanted if name in simple_names), None)
        if found is None and setting is not None:
            columns = abbreviate(", ".join(names))
            raise ValueError(f"{role}_column is {setting!r}; {where} has the columns {columns}")
        if found is None:
            continue
        if simple_names.count(found) > 1:
            raise DataError(f"{where}: the column {found!r} is listed twice; rename one")
        roles[role] = simple_names.index(found)
        simple_names[roles[role]] = ""  # a column has only one role

    if "path" not in roles:
        raise DataError(
            f"{where}: no column with image paths among {abbreviate(', '.join(names))}; "
            f"rename one to path, or set data.path_column"
        )
    return roles


def _simple(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


def _parse(
    source: Path,
    form: Form,
    classes: tuple[str, ...] | None,
    separator: str,
    exclusive: bool,
    folder: Path,
) -> tuple[Table, np.ndarray]:
    """Return the images of all splits, and the split of each image in lowercase."""
    builder = TableBuilder(
        classes=classes or form.classes or None, default=form.default, folder=folder
    )
    split_of_rows = []
    group_of_rows = []
    rows = _filled_rows(source, form.delimiter, form.encoding)
    next(rows, None)  # the header
    for line, fields in rows:
        where = f"{source}, row {line}"
        cells = dict(zip(form.columns, map(str.strip, fields), strict=True))
        labels = _labels(cells, form, separator, where)
        count = list(labels.values()).count(1)
        if exclusive and count != 1:
            raise DataError(f"{where}: {count} labels instead of one (data.exclusive); correct it")
        builder.add(cells["path"], labels, where)
        split_of_rows.append(cells.get("split", "").lower())
        group_of_rows.append(cells.get("group", ""))

    table = builder.build(source)
    if "group" in form.columns:
        # A row without a group is a single image.
        groups = encode_paths(group_of_rows)
        table = replace(table, groups=np.where(groups == b"", table.files, groups))
    return table, np.array(split_of_rows, str)


def _filled_rows(source: Path, delimiter: str, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fields of each non-empty row. Excel writes empty rows as ",,"."""
    num_columns = None
    for line, fields in csv_rows(source, delimiter=delimiter, encoding=encoding):
        if not "".join(fields).strip():
            continue
        if num_columns is None:
            num_columns = len(fields)
        if len(fields) != num_columns:
            raise DataError(
                f"{source}, row {line}: {len(fields)} fields instead of {num_columns}; add the "
                f"missing ones, or quote fields with {_DELIMITERS[delimiter]}"
            )
        yield line, fields


def _labels(cells: dict[str, str], form: Form, separator: str, where: str) -> dict[str, int]:
    """Return the non-default labels of an image, by class name."""
    if not form.classes:
        positives = _names(cells["labels"], separator, where)
        negatives = _names(cells.get("negatives", ""), separator, where)
        both = set(positives) & set(negatives)
        if both:
            fault = f"the class {min(both)!r} is in labels and in negatives"
            raise DataError(f"{where}: {fault}; remove one")
        return dict.fromkeys(negatives, 0) | dict.fromkeys(positives, 1)

    labels = {}
    for name in form.classes:
        if cells[name] not in _CELLS:
            raise DataError(
                f"{where}: the class {name!r} has {abbreviate(cells[name])}, not 0, 1 or an empty "
                f"cell; correct it"
            )
        value = _CELLS[cells[name]]
        if value != form.default:
            labels[name] = value
    return labels


def _names(text: str, separator: str, where: str) -> list[str]:
    """Return the class names of a cell: a JSON list, or names with a separator."""
    # Names may contain brackets. Blank names are skipped, so a trailing separator is allowed.
    if not re.fullmatch(r"\[\s*([\"'\d].*)?\]", text):
        return split_names(text, separator, where)
    with naming_errors(where, DataError, remedy='write a list such as ["cat", "dog"]'):
        return [as_name(name.strip(), where) for name in json.loads(text)]


def to_csv(table: Table, splits: np.ndarray) -> str:
    """Return the text of a table that `csv_table` reads. `splits` are text [N], or "" for none."""
    is_partial = -1 in (table.labels.default, *table.labels.values)
    columns = {"labels": 1, "negatives": 0} if is_partial else {"labels": 1}
    columns_after = [] if "" in splits else ["split"]
    columns_after += [] if table.groups is None else ["group"]
    rows = [["path", *columns, *columns_after]]
    for image, file in enumerate(table.files.tolist()):
        row = [os.fsdecode(file)]
        target = table.labels.row(image)
        for value in columns.values():
            found = compress(table.classes, target == value)
            row.append(json.dumps(list(found), ensure_ascii=False))
        if "split" in columns_after:
            row.append(splits[image])
        if table.groups is not None:
            row.append(os.fsdecode(table.groups[image]))
        rows.append(row)
    return "".join(csv_lines(rows))
