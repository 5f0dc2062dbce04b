"""Custom datasets in tables: CSV, JSON lines, Excel or Parquet files, or a DataFrame."""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from os import DirEntry
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np

from mldec.data.cells import class_labels, named_labels
from mldec.data.columns import LABELS, PATHS, Roles, Rules, recognize, split_words
from mldec.data.images import READ
from mldec.data.labels import Labels, from_statements
from mldec.data.photos import PhotoFinder, user_entries
from mldec.data.readers.labeling import studio_paths
from mldec.data.sheet import MISSING, Column, Sheet, pairs_of, sheet_of
from mldec.data.source import Source
from mldec.data.splits import HELD_OUT, SPLITS, HoldOut, check_val, find_split, log_split
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.tasks import multi_label, partial_labels, single_label
from mldec.data.types import Annotations, StoredImages, check_folder
from mldec.errors import DataError, log
from mldec.files.atomic import csv_lines
from mldec.files.tables import SUFFIXES, read_table, simple_name
from mldec.files.text import expand_user, reading
from mldec.names import format_list, given_names, indices_of, unknown_class

if TYPE_CHECKING:
    from pandas import DataFrame

DEFAULT_FILE = "data.csv"
# Paths that `path_inside` does not change. The expression is much faster than the function, which
# matters for tables with millions of rows.
_PLAIN = re.compile(r"(?!\.{1,2}(/|$))[^/\\:\0]+(/(?!\.{1,2}(/|$))[^/\\:\0]+)*")
# Start of absolute paths and URLs.
_ROOT = re.compile(r"[\\/]+|[A-Za-z]:[\\/]+|[A-Za-z][A-Za-z0-9+.-]*://+")
_RULES = Rules()

# Files that identify a dataset format, and the settings that read it.
_LAYOUTS = {
    "data.y*ml": "data=yolo",
    "obj.names": "data=yolo",
    "labels/**/*.txt": "data=yolo",
    "*/labels/*.txt": "data=yolo",
    "annotations/instances_*.json": "data=coco_json",
    "*/_annotations.coco.json": "data=coco_json",
    "annotations.xml": "data=cvat",
    "train/labels.json": "data=fiftyone",
    "ImageSets/Main": "data=voc2007",
}


def csv_table(
    *,
    root: str,
    file: str = DEFAULT_FILE,
    images: str = "",
    rules: Rules = _RULES,
    encoding: str = "utf-8",
    classes: str | list[str] | None = None,
    exclusive: bool = False,
    train: str = "train",
    val: str = "val",
    division: HoldOut = HELD_OUT,
    threshold: float = 0.5,
    skip_empty: bool = True,
    top_k: int | None = None,
    in_memory: Annotations | None = None,
) -> Source:
    """Return the images of a table in the order of its rows.

    See docs/data.md, section Forms of a table, for the columns and cells, and `mldec.data.columns`
    for the rules. The metric is `mAP_partial` if labels may be not annotated (-1).

    Args:
        file: Table, relative to `root` or absolute. If data.csv does not exist, the tables of the
            splits in `root` are read, such as train.csv and val.csv, or train/_classes.csv.
        images: Folder of the relative paths in the table. It is relative to `root` or absolute.
        encoding: Encoding of a text file, such as cp1252 (Excel on Windows) or utf-16.
        classes: Class names in order, or a text file with one name per line. None takes the sorted
            labels of all rows, or the class columns in the order of the file.
        exclusive: Each image has exactly one label. The metric is top-1 instead of mAP.
        train: Value of the split column in training rows, ignoring case.
        val: Value of the split column in validation rows. Names such as valid are equivalent.
        division: Held-out images if there is no validation split.
        top_k: k of the accuracy (`exclusive`) or of precision, recall and F1 at top-k.
        in_memory: Content of the table, if it has been parsed already.

    Raises:
        ValueError: If an argument is out of range or does not fit the file.
    """
    evaluator = multi_label(threshold, top_k=top_k, skip_empty=skip_empty)
    where = expand_user(file)
    annotations = in_memory
    if annotations is None:
        folder = check_folder(root, "the table")
        where = folder / where
        # Tables of splits, as exported by labeling tools, have paths relative to their own folder.
        beside = file == DEFAULT_FILE and not where.is_file()
        tables = _find_tables(folder, train) if beside else {"": where}
        annotations = parse(
            _read(tables, rules, encoding, (train, val)),
            rules,
            given_names(classes, folder),
            exclusive=exclusive,
            folder=folder / expand_user(images),
            beside_tables=beside and not images,
        )
    if exclusive:
        evaluator = single_label(top_k)
    elif annotations.table.labels.default == -1:
        evaluator = partial_labels(threshold, top_k=top_k)

    splits = annotations.splits
    counts = Counter(splits.tolist()) + Counter(annotations.others)
    train_name = find_split(train, counts)
    val_name = find_split(val, counts)
    # Without a validation split, a part of the training images is held out. If the table has
    # another split, such as test, the user must choose, because a test split must not become the
    # validation split.
    holds_out = val_name not in counts and not set(counts) - {train_name, ""}
    for name, value in (("train", train), ("val", val)):
        # A split that the user has named must exist, so that no images are held out by mistake.
        if holds_out and value not in (name, *counts):
            raise ValueError(f"{name} is {value}; {where} has no such split: add a column split")

    groups = annotations.table.groups
    if groups is not None and not holds_out:
        both = np.intersect1d(groups[splits == train_name], groups[splits == val_name])
        if len(both):
            log.warning(f"data: {len(both):,} groups are in training and in validation")

    def load(part: str, _: str | None) -> StoredImages:
        if part == val and not holds_out:
            check_val(val_name, counts, where)
        split = train_name if holds_out else find_split(part, counts)
        is_used = splits == split
        if split == train_name and split not in counts:
            if holds_out:
                # A table without splits is divided as a whole.
                is_used[:] = True
            elif rules.split_column:
                # With data.split_column=fold and data.val=0, all other folds are for training.
                is_used = splits != val_name
        images = annotations.images(np.flatnonzero(is_used))
        if holds_out:
            whole = images
            images = division.select(whole, val=part == val)
            if part == val and division.fraction > 0:
                log.info(
                    f"data: no validation split, so {len(images):,} of {len(whole):,} images are "
                    f"held out ({division.split}); see data.val_fraction and data.split"
                )

        if part == train:
            unused = Counter(splits[~is_used & (splits != val_name)].tolist())
            for name, count in (unused + Counter(annotations.others)).items():
                what = f"of the split {name!r}" if name else "without a split"
                log.info(f"data: {count:,} images {what} are not used")
        return log_split("data", part, images)

    result = Source(load=load, train=train, val=val, where=where, evaluator=evaluator)
    return replace(result, exclusive=exclusive, folder_setting="data.images")


def _read(
    tables: Mapping[str, Path], rules: Rules, encoding: str, used_splits: Sequence[str]
) -> dict[str, "DataFrame"]:
    """Read one table, or a table per split, and return them by path.

    Several tables get a column with their split. Those of unused splits are left out if they have
    no labels.
    """
    known = [*PATHS, simple_name(rules.path_column or "")]
    frames = {}
    for split, path in tables.items():
        try:
            frames[split] = read_table(path, known, encoding)
        except LookupError as error:
            raise ValueError(f"encoding is {encoding!r}; pass a codec of Python") from error
        except DataError as error:
            if not isinstance(error.__cause__, UnicodeError):
                raise
            raise DataError(
                f"{path}: it is not {encoding} text; save it as UTF-8, or set data.encoding, such "
                f"as cp1252 (Excel on Windows) or utf-16"
            ) from error
    if len(tables) == 1:
        return {str(tables[split]): frame for split, frame in frames.items()}

    # A test table often has the columns of the others except for the labels.
    most = max(len(frame.columns) for frame in frames.values())
    names = [find_split(name, tables) for name in used_splits]
    used = {}
    for split, frame in frames.items():
        if len(frame.columns) < most and split not in names:
            log.info(f"data: {tables[split]} is not used, because it has fewer columns")
        else:
            used[str(tables[split])] = frame.assign(split=split)
    log.info(f"data: the splits are {' and '.join(used)}")
    return used


def find_tables(folder: Path, suffixes: Collection[str] = SUFFIXES) -> dict[str, list[Path]]:
    """Return the tables in a folder by split, such as train.csv or train/_classes.csv.

    The key "" has the tables whose names contain no split. Only files with `suffixes` are used.
    """
    found: dict[str, list[Path]] = {}
    for path in map(Path, user_entries(folder)):
        tables = [path]
        if path.is_dir():
            tables = list(map(Path, user_entries(path))) if path.name.lower() in SPLITS else []
        # A name with several splits, such as train_val, has none.
        words = [word for word in re.split(r"[\W_]+", path.stem.lower()) if word in SPLITS]
        for table in tables:
            if table.suffix.lower() in suffixes and table.is_file():
                found.setdefault(words[0] if len(words) == 1 else "", []).append(table)
    return found


def _find_tables(folder: Path, train: str) -> dict[str, Path]:
    """Return one table per split, or a single table with the key "".

    Raises:
        DataError: If there is no table, or several for a split.
    """
    found = find_tables(folder)
    # Other tables, such as a list of the classes, do not count if there is a training table.
    if find_split(train, found) in found:
        found.pop("", None)
    else:
        found = {"": found.get("", [])}
    for tables in found.values():
        if not tables:
            layouts = [
                f"{name} (add {settings})" for name, settings in find_layouts(folder).items()
            ]
            remedy = "add it, or set data.file to a table"
            if (folder / "Annotations").is_dir():
                remedy = "convert Annotations to a table or COCO-style JSON"
            if layouts:
                remedy = f"found {', '.join(layouts)}"
            raise DataError(f"{folder}: there is no {DEFAULT_FILE}; {remedy}")
        if len(tables) > 1:
            names = format_list([path.name for path in tables])
            raise DataError(f"{folder}: several tables, {names}; add data.file=NAME")
    return {name: tables[0] for name, tables in found.items()}


def find_layouts(folder: Path) -> dict[str, str]:
    """Return the files of known dataset formats in a folder, and the settings that read them."""
    layouts: dict[str, str] = {}
    for pattern, settings in _LAYOUTS.items():
        for path in islice(folder.glob(pattern), 1):
            if settings not in layouts.values():
                layouts[path.relative_to(folder).as_posix()] = settings
    # At least two folders with images are class folders. They may be in folders of splits.
    # A test folder often has images without classes.
    inner = [Path(entry.path) for entry in user_entries(folder) if entry.is_dir()]
    meanings = {path: SPLITS.get(path.name.lower()) for path in inner}
    parts = [folder]
    if "train" in meanings.values():
        parts = [path for path, meaning in meanings.items() if meaning in ("train", "val")]
    if not layouts and all(sum(map(_has_image, user_entries(part))) > 1 for part in parts):
        layouts["class folders"] = "data=folders"

    # JSON files with any name are recognized by their first keys.
    for path in map(Path, user_entries(folder)):
        start = b""
        if path.suffix.lower() == ".json" and path.is_file():
            with reading(path), path.open("rb") as file:
                start = file.read(4096)
        if b'"annotations"' in start and start.lstrip().startswith(b"["):
            layouts[path.name] = f"data=label_studio data.file={path.name}"
        elif b'"images"' in start or b'"categories"' in start:
            if "data=coco_json" not in layouts.values():
                layouts[path.name] = "data=coco_json"
        elif b'"classes"' in start and b'"labels"' in start:
            layouts[path.name] = "data=fiftyone"
    return layouts


def _has_image(entry: DirEntry[str]) -> bool:
    if not entry.is_dir():
        return False
    return any(PurePath(file.name).suffix.lower() in READ for file in user_entries(entry.path))


def parse(
    frames: Mapping[str, "DataFrame"],
    rules: Rules,
    classes: tuple[str, ...] | None = None,
    *,
    exclusive: bool = False,
    folder: Path | None = None,
    beside_tables: bool = False,
    has_files: bool = True,
    label_columns: Sequence[str] = LABELS,
) -> Annotations:
    """Parse tables with one row per image, or one row per label of an image.

    Args:
        frames: Tables by name, for messages. All have the same columns.
        rules: Settings of the columns and cells.
        classes: Class names in order. None uses the names in the tables.
        exclusive: Whether each image has exactly one label.
        folder: Folder of relative paths. None for paths relative to the working directory. The
            folder of the result is then the common parent of all images.
        beside_tables: Whether paths are relative to the folder of their table instead.
        has_files: Whether the images are files. Otherwise, paths are names for messages.
        label_columns: See `recognize`.

    Raises:
        DataError: If a column or a cell cannot be read, or has several meanings.
    """
    sheet = sheet_of(frames)
    if not sheet.columns or not len(sheet.columns[0].codes):
        raise DataError(f"{sheet.source}: there are no rows; add one per image")
    roles = recognize(sheet, rules, classes, label_columns)
    if roles.labels is not None:
        labels, names = named_labels(sheet, roles, rules, classes, exclusive=exclusive)
    else:
        labels = class_labels(sheet, roles.classes, rules)
        names = tuple(column.name for column in roles.classes)
        # Sort the columns like the given classes. Classes without a column have no labels.
        if classes is not None:
            columns = indices_of(classes)
            for name in names:
                if name not in columns:
                    raise unknown_class(name, classes, sheet.source)
            moved = np.array([columns[name] for name in names], np.int32)[labels.classes]
            labels = replace(labels, classes=moved, num_classes=len(classes))
            names = classes

    if has_files:
        paths, rows, folder = _image_paths(sheet, roles, folder, beside_tables=beside_tables)
    else:
        paths, rows, folder = list(map(str, roles.path.cells)), roles.path.codes, Path()
    splits = np.full(len(rows), "")
    if roles.split is not None:
        splits = np.array(split_words(roles.split), str)[roles.split.codes]

    # Several rows of an image are one image. In a table with class columns or with negatives, each
    # row has all labels of its image, so that the rows must be equal.
    first = np.unique(rows, return_index=True)[1]
    if len(first) < len(rows):
        by_label = roles.labels is not None and roles.negatives is None
        labels = _merged(sheet, labels, splits, rows, first, by_label=by_label)
    # A table with a value for each pair of image and class has no unknown labels.
    if roles.value is not None and (labels.counts() + labels.counts(0)).min() == len(first):
        labels = replace(labels, default=0)
    counts = labels.counts_per_image()
    if exclusive and (counts != 1).any():
        image = int((counts != 1).argmax())
        fault = f"{counts[image]} labels instead of one (data.exclusive)"
        raise DataError(f"{sheet.where(first[image])}: {fault}; correct it")

    files = encode_paths(paths)
    groups = None
    if roles.group is not None:
        groups = _groups(sheet, roles.group, files, rows, first)
    table = Table(files, labels, names, groups)
    return Annotations(table, splits[first], folder, by_column=roles.labels is None)


def _image_paths(
    sheet: Sheet, roles: Roles, folder: Path | None, *, beside_tables: bool
) -> tuple[list[str], np.ndarray, Path]:
    """Return the paths of M images in a folder, the image of each row, int [N], and the folder."""
    # Cells of other types, such as numbers and lists, are not paths.
    codes = roles.path.codes
    cells = [cell if isinstance(cell, str) else "" for cell in roles.path.cells]
    if "" in cells:
        row = int((codes == cells.index("")).argmax())
        value = roles.path.cells[cells.index("")]
        raise DataError(
            f"{sheet.where(row)}: {str(value)!r} is not the path of an image; correct it"
        )

    # The same cell in tables of two folders is a path of two images, so each row has its own cell.
    if beside_tables:
        bases = {name: os.path.relpath(Path(name).parent, folder) for name in set(sheet.tables)}
        distinct = cells
        cells = []
        for name, code in zip(sheet.tables, codes.tolist(), strict=True):
            cell = distinct[code]
            if not _ROOT.match(cell):
                cell = (PurePath(bases[name]) / cell).as_posix()
            cells.append(cell)
        codes = np.arange(len(cells))

    # The same cell in two splits may be a photo in the folder of each split.
    splits = [""] * len(cells)
    if roles.split is not None:
        words = split_words(roles.split)
        codes, pairs = pairs_of(codes, roles.split.codes)
        splits = [words[split] for _, split in pairs]
        cells = [cells[cell] for cell, _ in pairs]
    rows = np.unique(codes, return_index=True)[1]
    if folder is not None and folder.is_dir():
        cells = _found_photos(sheet, cells, splits, rows, folder)

    # If a path is outside `folder`, all paths become absolute, and their common parent is the
    # folder of the images.
    is_inside = False
    if folder is not None:
        inside = (f"{folder}/", f"{folder.resolve()}/")
        is_inside = all(cell[0] != "/" or cell.startswith(inside) for cell in cells)
    if folder is None or not is_inside:
        start = folder or Path.cwd()
        cells = [os.path.normpath(start / expand_user(cell)) for cell in cells]
        parent = Path(os.path.commonpath({cell.rpartition("/")[0] or "/" for cell in cells}))
        if folder is None and not parent.is_dir():
            raise DataError(f"{sheet.source}: {cells[0]} does not exist; correct the paths")
        folder = parent

    # Normalize the paths. Different cells, such as a.jpg and ./a.jpg, may be the same image.
    images: dict[str, int] = {}
    numbers = []
    for cell, row in zip(cells, rows, strict=True):
        is_plain = _PLAIN.fullmatch(cell)
        path = cell if is_plain else path_inside(cell, sheet.where(row), folder=folder)
        numbers.append(images.setdefault(path, len(images)))
    return list(images), np.array(numbers)[codes], folder


def _found_photos(
    sheet: Sheet, cells: list[str], splits: Sequence[str], rows: np.ndarray, folder: Path
) -> list[str]:
    """Replace paths without a file by the only photos in `folder` that they may name.

    Paths of another computer and URLs name a photo with the same last parts. Other paths may lack
    the suffix or inner folders. They are not searched if the first one in alphabetical order
    exists, because that takes long. Folders of the split of a path have precedence.
    """
    finder = PhotoFinder(folder)
    inside = [cell for cell in cells if not _ROOT.match(cell)]
    first = os.path.join(folder, min(inside, default="").replace("\\", "/"))  # noqa: PTH118
    are_complete = os.path.isfile(first)  # noqa: PTH113
    if are_complete and len(inside) == len(cells):
        return cells
    path_of: dict[str, str] = {}  # path elsewhere of each photo
    found = []
    for cell, split, row in zip(cells, splits, rows, strict=True):
        root = _ROOT.match(cell)
        is_complete = are_complete
        if root:
            is_complete = cell.startswith(f"{folder}/") or os.path.exists(cell)  # noqa: PTH110
        if is_complete:
            found.append(cell)
            continue

        where = sheet.where(row)
        folders = {name for name in SPLITS if SPLITS[name] == SPLITS.get(split)} | {split}
        # A URL may have quoted characters, and a query after the path. Other paths may begin with
        # the name of the folder.
        posix = cell.replace("\\", "/")
        paths = [posix, posix.removeprefix(f"{folder.name}/")]
        if root:
            paths = [posix[root.end() :], *studio_paths(cell)]
        photo = None
        for path in paths:
            rest = path.replace("\\", "/").lstrip("/")
            photo = photo or finder.find(rest, where)
            while rest and not photo:
                photo = finder.find_below(rest, where, folders)
                if root is None:
                    break
                rest = rest.partition("/")[2]
        if root and photo and path_of.setdefault(photo, cell) != cell:
            fault = f"{path_of[photo]} and {cell} may both be {photo}"
            raise DataError(f"{where}: {fault}; write paths inside {folder}")
        found.append(photo or cell)

    if path_of:
        log.info(f"data: {len(path_of):,} paths elsewhere are found in {folder} by their names")
    if inside and not are_complete:
        count = sum(photo != cell for photo, cell in zip(found, cells, strict=True)) - len(path_of)
        log.info(f"data: {count:,} of {len(inside):,} images were found in {folder} by their names")
    return found


def _merged(
    sheet: Sheet,
    labels: Labels,
    splits: np.ndarray,
    images: np.ndarray,
    first: np.ndarray,
    *,
    by_label: bool,
) -> Labels:
    """Join the rows of each image, which are equal, or have one label each (`by_label`).

    `images` has the index of the image of each of the N rows, and `first` the first row of each
    image. Raises DataError if the rows of an image have contradictory labels or splits.
    """
    # Rows with several names have all labels of an image, so different rows are contradictory.
    by_label = by_label and labels.counts_per_image().max(initial=0) <= 1
    for row in np.flatnonzero(first[images] != np.arange(len(images))).tolist():
        other = int(first[images[row]])
        is_same = by_label or labels.row(row).equal(labels.row(other))
        if not is_same or splits[row] != splits[other]:
            fault = f"the image is listed twice, first in {sheet.where(other)}, with other labels"
            raise DataError(f"{sheet.where(row)}: {fault} or another split; remove one")

    log.info(f"data: {len(images) - len(first):,} rows of images with several rows are joined")
    if not by_label:
        return labels.select(first)
    labels = labels.select_entries(labels.values >= 0)
    joined, num_faults = from_statements(
        images[labels.images()],
        labels.classes,
        labels.values,
        num_images=len(first),
        num_classes=labels.num_classes,
        default=labels.default,
    )
    if num_faults:
        fault = f"{num_faults:,} labels of images are present in one row and absent in another"
        raise DataError(f"{sheet.source}: {fault}; remove one of the rows")
    return joined


def _groups(
    sheet: Sheet, column: Column, files: np.ndarray, images: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Return the groups of M images, bytes [M], see `Table`.

    `images` and `first` are the arguments of `_merged`.
    """
    differs = column.codes != column.codes[first[images]]
    if differs.any():
        fault = "the image is listed twice, with other groups"
        raise DataError(f"{sheet.where(int(differs.argmax()))}: {fault}; correct one")

    # An image without a group is its own group. The path is its name, because the groups of two
    # images must differ.
    cells = [str(cell) for cell in column.cells]
    names = encode_paths(["" if name.casefold() in MISSING else name for name in cells])
    names = names[column.codes[first]]
    return np.where(names == b"", files, names)


def to_csv(table: Table, splits: np.ndarray) -> str:
    """Return a table as CSV. `csv_table` reads the same images and labels from it.

    Classes without a label are not in the CSV, so `data.classes` is needed to keep their order.
    `splits` has the name of the split of each image, text [N], or "" if it has none.
    """
    default = table.labels.default
    is_partial = default == -1 or -1 in table.labels.values
    has_splits = any(splits)
    header = ["path", "labels"]
    if is_partial:
        header.append("negatives")
    if has_splits:
        header.append("split")
    if table.groups is not None:
        header.append("group")

    rows = [header]
    for image, file in enumerate(table.files.tolist()):
        # The names of the classes by their value, as far as they are stored.
        entries = slice(table.labels.starts[image], table.labels.starts[image + 1])
        names: dict[int, list[str]] = {1: [], 0: [], -1: []}
        pairs = zip(table.labels.classes[entries], table.labels.values[entries], strict=True)
        for column, value in pairs:
            names[int(value)].append(table.classes[column])
        # A class that is in neither column is unknown, so list all absent classes.
        if is_partial and default == 0:
            names[0] = [name for name in table.classes if name not in names[1] + names[-1]]

        # JSON lists need no separator, which could be a part of a name.
        row = [os.fsdecode(file), json.dumps(names[1], ensure_ascii=False)]
        if is_partial:
            row.append(json.dumps(names[0], ensure_ascii=False))
        if has_splits:
            row.append(splits[image])
        if table.groups is not None:
            row.append(os.fsdecode(table.groups[image]))
        rows.append(row)
    return "".join(csv_lines(rows))
