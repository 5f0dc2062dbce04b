"""What an annotation file says: paths, labels and classes, with names that are safe to show."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mldec.errors import DataError, suggest
from mldec.files.text import read_lines

MAX_NAME = 1_000  # characters
MAX_NAMES = 300_000  # a checkpoint holds a million values, and may hold each name twice

# These characters would control the terminal that prints a name, break its line or not be valid
# UTF-8: control characters (C0, DEL, C1), line and paragraph separators, surrogates.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def name_fault(name: object) -> str | None:
    """Return why a value cannot be a class name, such as "is empty"; None if it can be one."""
    if name is None:
        return "is null, not text"
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not text"

    if not name.strip():
        return "is empty"
    if control := _CONTROL.search(name):
        return f"has the control character U+{ord(control[0]):04X}"
    if len(name) > MAX_NAME:
        return f"has {len(name):,} characters, more than {MAX_NAME:,}"
    return None


def names_fault(names: Sequence[object]) -> str | None:
    """Return why values cannot be the class names of a dataset; None if they can.

    `Classes` and the reader of checkpoints share this check, so that every model that can be
    trained can also be read again.
    """
    if len(names) > MAX_NAMES:
        return f"{len(names):,} classes are more than {MAX_NAMES:,}"

    numbers: dict[object, int] = {}
    for number, name in enumerate(names):
        if fault := name_fault(name):
            return f"the name {shown(name)} of class {number} {fault}"
        if name in numbers:
            return f"the classes {numbers[name]} and {number} are both called {shown(name)}"
        numbers[name] = number

    return None


def as_name(value: object, where: str | Path, see: str) -> str:
    """Return a class name from a file; a number becomes text.

    Args:
        value: the value in the file.
        where: the file and the row, for the message.
        see: pointer to the documentation, for the message.

    Raises:
        DataError: if the name is not allowed, see `name_fault`.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)

    if fault := name_fault(value):
        raise DataError(f"{where}: the class name {shown(value)} {fault}: rename it; {see}")
    return str(value)


def split_names(text: str, separator: str, where: str | Path, see: str) -> list[str]:
    """Return the class names in a text, stripped; blank ones are left out.

    Args:
        text: the names with `separator` between them.
        separator: any text.
        where: see `as_name`.
        see: see `as_name`.

    Raises:
        DataError: see `as_name`.
    """
    names = map(str.strip, text.split(separator))
    return [as_name(name, where, see) for name in names if name]


def shown(value: object) -> str:
    """Return the repr of a value for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def given_names(classes: str | list[str] | None, root: Path, see: str) -> tuple[str, ...] | None:
    """Return the class names of the setting `data.classes`; None if it is not set.

    Args:
        classes: the names, or the path of a text file with one name per line, relative to `root`.
        root: folder of the data.
        see: pointer to the documentation, for messages.

    Raises:
        DataError: if the file cannot be read, or there is no name, a name twice or one that is not
            allowed.
    """
    if classes is None:
        return None

    if isinstance(classes, str):
        path = root / Path(classes).expanduser()
        where = str(path)
        names = read_lines(path, see)
    else:
        where = "data.classes"
        names = [name.strip() for name in classes]

    if not names or "" in names:
        raise DataError(f"{where}: it has {'an empty' if names else 'no'} name; {see}")
    return check_names(names, where, see)


def without_quotes(name: str) -> str:
    """Return a display name of Open Images without its stray quotes and blanks."""
    return re.sub(r"\s+", " ", name.strip(" \t\r\n'\""))


def told_apart(names: Sequence[str], marks: Iterable[object] | None = None) -> tuple[str, ...]:
    """Return the names, with a mark in brackets appended to those that several classes share.

    Data and released checkpoints thus get the same names for the same classes in the same order.

    Args:
        names: of K classes.
        marks: K different ones; None for the indices.
    """
    count = Counter(names)
    marked = zip(names, range(len(names)) if marks is None else marks, strict=True)
    return tuple(f"{name} ({mark})" if count[name] > 1 else name for name, mark in marked)


def check_names(names: Iterable[str], where: str | Path, see: str) -> tuple[str, ...]:
    """Return the names unchanged, after checking that no two are equal or differ in case only.

    Raises:
        DataError: for such a pair, or for a name that is not allowed.
    """
    seen: dict[str, str] = {}
    for name in names:
        as_name(name, where, see)

        other = seen.get(name.casefold())
        if other is not None:
            problem = "is there twice" if other == name else f"and {other!r} differ in case only"
            raise DataError(f"{where}: the class {name!r} {problem}: rename one; {see}")
        seen[name.casefold()] = name
    return tuple(seen.values())


def unknown_class(name: str, names: Iterable[str], where: str, see: str) -> DataError:
    """Return the error for a label that is not among the classes, with the nearest class name."""
    known = list(names)
    same_letters = [other for other in known if other.casefold() == name.casefold()]
    near = same_letters or get_close_matches(name, known, n=1)

    # A suggestion may list all known names, which is useful for a few classes only.
    hint = ""
    if near:
        hint = f"; did you mean {near[0]!r}?"
    elif len(known) <= 20:
        hint = suggest(name, known)

    return DataError(
        f"{where}: the class {name!r} is not in the list of {len(known)} classes{hint}; {see}"
    )


_COCO = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,"
    "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,"
    "backpack,umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,"
    "baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,fork,"
    "knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,"
    "chair,couch,potted plant,bed,dining table,toilet,tv,laptop,mouse,remote,keyboard,"
    "cell phone,microwave,oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,"
    "hair drier,toothbrush"
)
_VOC = (
    "aeroplane,bicycle,bird,boat,bottle,bus,car,cat,chair,cow,diningtable,dog,horse,motorbike,"
    "person,pottedplant,sheep,sofa,train,tvmonitor"
)

# In the order of the category ids; the ids themselves have gaps.
COCO_NAMES = tuple(_COCO.split(","))

# In the order of the devkit.
VOC = tuple(_VOC.split(","))


@dataclass(frozen=True)
class Labels:
    """Sparse labels of N images and K classes in CSR form; unlisted entries equal `default`.

    These are numpy arrays, so that loader workers share their memory. Lists would be copied little
    by little, because every access changes the reference counts in their pages.
    """

    # [N + 1] int64: where the entries of each image start.
    starts: np.ndarray

    # [M] int32: the class of each entry.
    classes: np.ndarray

    # [M] int8: 1 present, 0 absent, -1 not annotated, or a code that only this dataset uses.
    values: np.ndarray

    # K.
    num_classes: int

    # The value of unlisted entries: 0 (absent) or -1 (not annotated).
    default: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Tensor:
        """Return the target of one image, int8 [K], as a new tensor.

        Raises:
            IndexError: for an index that is not from 0 to N - 1.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")

        entries = slice(self.starts[index], self.starts[index + 1])
        target = np.full(self.num_classes, self.default, np.int8)
        target[self.classes[entries]] = self.values[entries]
        return torch.from_numpy(target)

    def dense(self) -> np.ndarray:
        """Return all targets as a matrix, int8 [N, K]."""
        matrix = np.full((len(self), self.num_classes), self.default, np.int8)
        matrix[self.images(), self.classes] = self.values
        return matrix

    def counts(self, value: int = 1) -> np.ndarray:
        """Count the listed entries of this value per class: int64 [K]."""
        return np.bincount(self.classes[self.values == value], minlength=self.num_classes)

    def all_counts(self, value: int) -> np.ndarray:
        """Count the images of this value per class, listed or not: int64 [K]."""
        counts = self.counts(value)
        if value != self.default:
            return counts

        listed = np.bincount(self.classes, minlength=self.num_classes)
        return counts + len(self) - listed

    def counts_per_image(self, value: int = 1) -> np.ndarray:
        """Count the listed entries of this value per image: int64 [N]."""
        return np.bincount(self.images()[self.values == value], minlength=len(self))

    def select(self, images: np.ndarray) -> "Labels":
        """Return the labels of some images: bool [N], or their indices in the wanted order."""
        indices = np.flatnonzero(images) if images.dtype == bool else images
        lengths = np.diff(self.starts)[indices]
        starts = _starts(lengths)

        # The entries of an image stay together, so that all of them move by the same distance.
        shifts = np.repeat(self.starts[:-1][indices] - starts[:-1], lengths)
        old_positions = np.arange(starts[-1]) + shifts

        return replace(
            self,
            starts=starts,
            classes=self.classes[old_positions],
            values=self.values[old_positions],
        )

    def select_classes(self, columns: Sequence[int]) -> "Labels":
        """Return the labels of some classes only: their indices, in the wanted order."""
        new_column = np.full(self.num_classes, -1, np.int32)
        new_column[list(columns)] = np.arange(len(columns))

        classes = new_column[self.classes]
        kept = classes >= 0  # the classes that were not asked for have no new column

        # The number of kept entries before each old start is the new start.
        starts = _starts(kept)[self.starts]
        return replace(
            self,
            starts=starts,
            classes=classes[kept],
            values=self.values[kept],
            num_classes=len(columns),
        )

    def recode(self, values: Mapping[int, int]) -> "Labels":
        """Return the labels with some values replaced, such as {2: -1}."""
        changed = self.values.copy()
        for old, new in values.items():
            changed[self.values == old] = new
        return replace(self, values=changed)

    def fault(self, allowed: range) -> str | None:
        """Return what is wrong with labels from a file, or None, so that later code may trust them.

        Args:
            allowed: the values that a label may have.
        """
        columns = ((self.starts, np.int64), (self.classes, np.int32), (self.values, np.int8))
        for array, dtype in columns:
            if array.dtype != dtype or array.ndim != 1:
                return "its labels are of another type"

        # The starts must rise from 0 to M: an index out of range would read the labels of another
        # image, or beyond the arrays.
        total = len(self.classes)
        if not len(self.starts) or len(self.values) != total:
            return "its labels do not fit its images"
        if self.starts[0] != 0 or self.starts[-1] != total:
            return "its labels do not fit its images"
        if (self.starts[1:] < self.starts[:-1]).any():
            return "its labels do not fit its images"

        if total and not (self.classes.min() >= 0 and self.classes.max() < self.num_classes):
            return "a label is out of range"
        if total and not (self.values.min() in allowed and self.values.max() in allowed):
            return "a label has an unknown value"

        if self.default not in (-1, 0):
            return "the default of its labels is unknown"
        return None

    def images(self) -> np.ndarray:
        """Return the image of each entry, int64 [M]."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))


def are_indices(value: object, num_classes: int) -> bool:
    """Return whether a value from a file is a list of class indices, each from 0 to K - 1."""
    # `type` and not `isinstance`, for which true and false are integers.
    return isinstance(value, list) and all(
        type(column) is int and 0 <= column < num_classes for column in value
    )


def from_dense(matrix: np.ndarray, *, default: int = 0) -> Labels:
    """Return the labels in a matrix, int8 [N, K]; entries equal to `default` are not listed."""
    images, classes = np.nonzero(matrix != default)

    # `np.nonzero` returns the entries row by row, so that the images ascend.
    starts = np.searchsorted(images, np.arange(len(matrix) + 1)).astype(np.int64)
    values = matrix[images, classes].astype(np.int8)
    return Labels(starts, classes.astype(np.int32), values, matrix.shape[1], default)


def from_single(classes: np.ndarray, num_classes: int) -> Labels:
    """Return the labels of images with one class each, given as integers [N] from 0 to K - 1."""
    ones = np.ones(len(classes), np.int8)
    return Labels(np.arange(len(classes) + 1), np.asarray(classes, np.int32), ones, num_classes)


def from_entries(
    entries: Sequence[Mapping[int, int]], *, num_classes: int, default: int = 0
) -> Labels:
    """Return the labels of N images from one mapping per image: class index -> value."""
    starts = _starts([len(image_entries) for image_entries in entries])
    total = int(starts[-1])

    # Streamed into arrays: lists of all entries would need many times their memory.
    columns = chain.from_iterable(entries)
    codes = chain.from_iterable(image_entries.values() for image_entries in entries)
    classes = np.fromiter(columns, np.int32, total)
    values = np.fromiter(codes, np.int8, total)
    return Labels(starts, classes, values, num_classes, default)


def from_flags(
    images: np.ndarray, classes: np.ndarray, flags: np.ndarray, *, num_images: int, num_classes: int
) -> Labels:
    """Return the labels of M flags in any order, such as the sizes of annotated objects.

    Flags of the same image and class are combined by a bitwise or; an unlisted pair has the value
    0.

    Args:
        images: the image of each flag, integers [M] from 0 to N - 1.
        classes: the class of each flag, integers [M] from 0 to K - 1.
        flags: int8 [M], not 0.
        num_images: N.
        num_classes: K.
    """
    pairs = images.astype(np.int64) * num_classes + classes
    pairs, positions = np.unique(pairs, return_inverse=True)

    values = np.zeros(len(pairs), np.int8)
    np.bitwise_or.at(values, positions, flags)
    return _from_pairs(pairs, values, num_images, num_classes, 0)


def from_statements(
    images: np.ndarray,
    classes: np.ndarray,
    values: np.ndarray,
    *,
    num_images: int,
    num_classes: int,
    default: int = -1,
) -> tuple[Labels, int]:
    """Return the labels of M statements in any order, and the number of contradictory pairs.

    A statement says of an image and a class whether the class is present.

    A pair of image and class that is stated to be both present and absent counts as present; a
    repeated statement counts once.

    Args:
        images: the image of each statement, integers [M] from 0 to N - 1.
        classes: the class of each statement, integers [M] from 0 to K - 1.
        values: the value of each statement, [M] of 1 (present) and 0 (absent).
        num_images: N.
        num_classes: K.
        default: see `Labels`.

    Returns:
        The labels, and the number of pairs that are stated to be both present and absent.
    """
    # Encode each statement as the number 2 * (image * K + class) + value. This is done in place,
    # because 57 million statements are half a gigabyte.
    statements = images.astype(np.int64)
    statements *= num_classes
    statements += classes
    statements *= 2
    statements += values == 1

    # Sorting groups the statements by pair and puts "present" after "absent". Of each group the
    # last statement therefore decides.
    statements.sort()
    pairs = statements >> 1
    is_last = np.ones(len(pairs), bool)
    is_last[:-1] = pairs[:-1] != pairs[1:]

    # A contradictory pair has exactly one place where a different statement follows within the
    # group: from "absent" to "present".
    same_pair_follows = ~is_last[:-1]
    other_statement_follows = statements[:-1] != statements[1:]
    contradictions = int(np.count_nonzero(same_pair_follows & other_statement_follows))

    present = (statements[is_last] & 1).astype(np.int8)
    labels = _from_pairs(pairs[is_last], present, num_images, num_classes, default)
    return labels, contradictions


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return where the entries of each of N images start, and their total: int64 [N + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _from_pairs(
    pairs: np.ndarray, values: np.ndarray, num_images: int, num_classes: int, default: int
) -> Labels:
    """Return the labels of ascending pairs, each encoded as `image * num_classes + class`."""
    images, classes = np.divmod(pairs, num_classes)
    starts = _starts(np.bincount(images, minlength=num_images))
    return Labels(starts, classes.astype(np.int32), values, num_classes, default)


log = logging.getLogger("mldec")


@dataclass(frozen=True)
class Table:
    """N image files with labels of K classes."""

    # [N] bytes of a fixed width: paths inside the image folder, see `encode_paths`.
    files: np.ndarray
    labels: Labels
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def select(self, images: np.ndarray) -> "Table":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return Table(self.files[images], self.labels.select(images), self.classes)


class TableBuilder:
    """Collect images and their labels one by one, with the checks that every table needs.

    Args:
        see: pointer to the documentation, for messages, such as "see DATASETS.md, section MS-COCO".
        classes: the class names in their order; None: the names in the labels, sorted.
        default: value of the classes that an image has no label for: 0 (absent) or -1 (not
            annotated).
    """

    def __init__(self, see: str, *, classes: Sequence[str] | None = None, default: int = 0) -> None:
        self.see = see
        self.classes = None if classes is None else tuple(classes)
        self.default = default

        # Indices of the classes so far; source of each path so far; entries of each image so far.
        self._columns = {name: column for column, name in enumerate(classes or ())}
        self._first_seen: dict[str, str] = {}
        self._entries: list[dict[int, int]] = []

    def __len__(self) -> int:
        return len(self._first_seen)

    def add(self, path: str, labels: Mapping[str, int] | Mapping[int, int], where: str) -> None:
        """Add an image.

        Args:
            path: of its file inside the image folder; may have Windows separators.
            labels: maps a class (its name, or its index if the classes were given) to 1 (present),
                0 (absent), -1 (not annotated) or a code that only this data set uses.
            where: the annotation file and the row, for messages.

        Raises:
            DataError: for a path that leads out of the folder, an image that was added before, or
                an unknown class.
        """
        path = path_inside(path, where, self.see)
        if path in self._first_seen:
            # The row only: the file is the same and begins the message.
            first_row = self._first_seen[path].rpartition(", ")[2]
            raise DataError(
                f"{where}: the image {path} is listed twice, first in {first_row}: "
                f"leave one of them out; {self.see}"
            )
        self._first_seen[path] = where

        entries = {self._column(label, where): value for label, value in labels.items()}
        self._entries.append(entries)

    def build(self, where: str | Path) -> Table:
        """Return the table, images in the order in which they were added.

        Raises:
            DataError: if no class was given and no image has a label, or a class name is not
                allowed; the message begins with `where`.
        """
        num_classes = len(self._columns if self.classes is None else self.classes)
        labels = from_entries(self._entries, num_classes=num_classes, default=self.default)
        files = encode_paths(list(self._first_seen))
        if self.classes is not None:
            return Table(files, labels, self.classes)

        # The classes are still in the order of their first occurrence.
        if not self._columns:
            raise DataError(f"{where}: no image has a label; {self.see}")
        classes = check_names(sorted(self._columns), where, self.see)
        order = [self._columns[name] for name in classes]
        return Table(files, labels.select_classes(order), classes)

    def _column(self, label: str | int, where: str) -> int:
        """Return the index of a class that was given by name or by index."""
        # Without a list of classes every name is one, and gets the next index.
        if self.classes is None:
            return self._columns.setdefault(str(label), len(self._columns))

        if isinstance(label, str):
            if label not in self._columns:
                raise unknown_class(label, self.classes, where, self.see)
            return self._columns[label]

        if not 0 <= label < len(self.classes):
            raise DataError(
                f"{where}: the class {label} is not an index below {len(self.classes)}; {self.see}"
            )
        return label


def encode_paths(paths: Sequence[str]) -> np.ndarray:
    """Return paths as an array of bytes [N] of a fixed width, as in `Table.files`."""
    return np.array([os.fsencode(path) for path in paths], np.bytes_)


def path_inside(path: str, where: str, see: str) -> str:
    """Return a path from an annotation file, normalised and checked to stay inside the folder.

    Args:
        path: as in the file; may have Windows separators.
        where: the file and the row, for the message.
        see: pointer to the documentation, for the message.

    Returns:
        The path with '/' between its folders.

    Raises:
        DataError: if it is empty, absolute, or contains '..'.
    """
    parts = path.replace("\\", "/").split("/")

    # "C:" at the start is a drive of Windows.
    if not path or parts[0] == "" or parts[0].endswith(":") or ".." in parts or "\0" in path:
        raise DataError(f"{where}: {path!r} is not a path inside the image folder; {see}")

    return "/".join(part for part in parts if part not in ("", "."))


def path_hash(file: bytes, seed: int) -> int:
    """Return a uniform 64-bit number that depends on seed and path only."""
    digest = sha256(b"%d %s" % (seed, file)).digest()
    return int.from_bytes(digest[:8], "big")


def held_out(files: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """Return which images are held out for validation, bool [N].

    A hash of seed and path decides, so that an image stays in its split when others are added or
    removed.
    """
    limit = fraction * 2**64
    return np.array([path_hash(file, seed) < limit for file in files], bool)


def hold_out(table: Table, fraction: float, seed: int, *, val: bool) -> Table:
    """Return the images that are held out for validation, or the others; see `held_out`."""
    is_held_out = held_out(table.files.tolist(), fraction, seed)
    return table.select(is_held_out if val else ~is_held_out)


def check_fraction(val_fraction: float) -> None:
    """Raise a `ValueError` unless the fraction of images to hold out is in (0, 1)."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}: it must be above 0 and below 1")


def log_split(what: str, split: str, table: Table, *, max_names: int = 3) -> None:
    """Log the size of a split, and warn of classes without a positive image, by name."""
    log.info("%s %s: %s images, %d classes", what, split, f"{len(table):,}", len(table.classes))

    empty = np.flatnonzero(table.labels.counts() == 0)
    if len(empty) and len(table):
        names = ", ".join(repr(table.classes[column]) for column in empty[:max_names])
        if len(empty) > max_names:
            names += ", ..."

        message = "%s %s: %d of %d classes have no image: %s"
        log.warning(message, what, split, len(empty), len(table.classes), names)
