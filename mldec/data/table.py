"""What an annotation file says: class names, sparse labels, and tables of images with both."""

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mldec.errors import DataError, refusing
from mldec.runtime.text import read_lines

log = logging.getLogger("mldec")

# These characters would control the terminal that prints a name, break its line or not be valid
# UTF-8: control characters (C0, DEL, C1), line and paragraph separators, surrogates.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def name_fault(name: object) -> str | None:
    """Return why a value cannot be a class name, such as "is empty"; None if it can be one."""
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not text"
    if not name.strip():
        return "is empty"
    if control := _CONTROL.search(name):
        return f"has the control character U+{ord(control[0]):04X}"
    return None


def names_fault(names: Sequence[object]) -> str | None:
    """Return why values cannot be the class names of a dataset; None if they can."""
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

    A `DataError` for a name that is not allowed begins with `where`, the file and the row, and ends
    with `see`, a pointer to the documentation.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if fault := name_fault(value):
        raise DataError(f"{where}: the class name {shown(value)} {fault}: rename it; {see}")
    return str(value)


def split_names(text: str, separator: str, where: str | Path, see: str) -> list[str]:
    """Return the class names in a text, stripped; blank ones are left out. See `as_name`."""
    names = map(str.strip, text.split(separator))
    return [as_name(name, where, see) for name in names if name]


def shown(value: object) -> str:
    """Return the repr of a value for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return up to `most` names and the number of the others, for a message."""
    text = ", ".join(names[:most])
    num_others = len(names) - most
    return f"{text} and {num_others:,} more" if num_others > 0 else text


def given_names(classes: str | list[str] | None, root: Path, see: str) -> tuple[str, ...] | None:
    """Return the class names of the setting `data.classes`; None if it is not set.

    It is a list, or the path, relative to `root`, of a text file with one name per line.
    """
    if isinstance(classes, str):
        path = root / Path(classes).expanduser()
        return check_names(read_lines(path, see), path, see)
    return None if classes is None else check_names(map(str.strip, classes), "data.classes", see)


def without_quotes(name: str) -> str:
    """Return a display name of Open Images without its stray quotes and blanks."""
    return re.sub(r"\s+", " ", name.strip(" \t\r\n'\""))


def told_apart(names: Sequence[str], marks: Iterable[object] | None = None) -> tuple[str, ...]:
    """Return the names, with a mark in brackets appended to those that several classes share.

    The marks of the K names are different ones, by default their indices.
    """
    if marks is None:
        marks = range(len(names))

    count = Counter(names)
    unique_names = []
    for name, mark in zip(names, marks, strict=True):
        is_shared = count[name] > 1
        unique_names.append(f"{name} ({mark})" if is_shared else name)
    return tuple(unique_names)


def check_names(names: Iterable[str], where: str | Path, see: str) -> tuple[str, ...]:
    """Return the names; a `DataError` refuses those that are equal or differ in case only."""
    seen: dict[str, str] = {}
    for name in names:
        as_name(name, where, see)
        if other := seen.get(name.casefold()):
            problem = "is there twice" if other == name else f"and {other!r} differ in case only"
            raise DataError(f"{where}: the class {name!r} {problem}: rename one; {see}")
        seen[name.casefold()] = name
    return tuple(seen.values())


def unknown_class(name: str, names: Iterable[str], where: str, see: str) -> DataError:
    """Return the error for a label that is not among the classes, with the nearest class name."""
    known = list(names)
    same_letters = [other for other in known if other.casefold() == name.casefold()]
    near = same_letters or get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
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

    starts: np.ndarray  # [N + 1] int64: where the entries of each image start
    classes: np.ndarray  # [M] int32: the class of each entry

    # [M] int8: 1 present, 0 absent, -1 not annotated, or a code that only this dataset uses.
    values: np.ndarray

    num_classes: int  # K
    default: int = 0  # value of unlisted entries: 0 (absent) or -1 (not annotated)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Tensor:
        """Return the target of one image, int8 [K], as a new tensor."""
        entries = slice(self.starts[index], self.starts[index + 1])
        target = np.full(self.num_classes, self.default, np.int8)
        target[self.classes[entries]] = self.values[entries]
        return torch.from_numpy(target)

    def dense(self) -> np.ndarray:
        """Return all targets as a matrix, int8 [N, K]."""
        matrix = np.full((len(self), self.num_classes), self.default, np.int8)
        matrix[self.images(), self.classes] = self.values
        return matrix

    def images(self) -> np.ndarray:
        """Return the image of each entry, int64 [M]."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def counts(self, value: int = 1) -> np.ndarray:
        """Count the listed entries of this value per class: int64 [K]."""
        return np.bincount(self.classes[self.values == value], minlength=self.num_classes)

    def all_counts(self, value: int) -> np.ndarray:
        """Count the images of this value per class, listed or not: int64 [K]."""
        counts = self.counts(value)
        if value == self.default:
            counts = counts + len(self) - np.bincount(self.classes, minlength=self.num_classes)
        return counts

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
        old = np.arange(starts[-1]) + shifts
        return replace(self, starts=starts, classes=self.classes[old], values=self.values[old])

    def select_classes(self, columns: Sequence[int]) -> "Labels":
        """Return the labels of some classes only: their indices, in the wanted order."""
        new_column = np.full(self.num_classes, -1, np.int32)
        new_column[list(columns)] = np.arange(len(columns))

        # The classes that were not asked for have no new column.
        classes = new_column[self.classes]
        renumbered = replace(self, classes=classes, num_classes=len(columns))
        return renumbered.only(classes >= 0)

    def only(self, entries: np.ndarray) -> "Labels":
        """Return the labels with some of the listed entries, bool [M]."""
        # The number of kept entries before each old start is the new start.
        starts = _starts(entries)[self.starts]
        return replace(
            self, starts=starts, classes=self.classes[entries], values=self.values[entries]
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
    starts = np.arange(len(classes) + 1)
    ones = np.ones(len(classes), np.int8)
    return Labels(starts, np.asarray(classes, np.int32), ones, num_classes)


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

    A statement says of an image [M] and a class [M] whether it is present: value [M] 1 or 0. A pair
    that is stated to be both counts as present.
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
    other_statement_follows = statements[:-1] != statements[1:]
    contradictions = int(np.count_nonzero(~is_last[:-1] & other_statement_follows))

    rows, columns = np.divmod(pairs[is_last], num_classes)
    starts = _starts(np.bincount(rows, minlength=num_images))
    present = (statements[is_last] & 1).astype(np.int8)
    labels = Labels(starts, columns.astype(np.int32), present, num_classes, default)
    return labels, contradictions


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return where the entries of each of N images start, and their total: int64 [N + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def random_drop(labels: Labels, p: float, seed: int) -> Labels:
    """Return labels with each entry independently set to -1 (not annotated) with probability p.

    Source: Alibaba-MIIL/PartialLabelingCSL, coco_simulation.py ("rps"), arXiv 2110.10955.
    """
    matrix = labels.dense()
    rng = np.random.default_rng(seed)
    matrix[rng.random(matrix.shape, np.float32) < p] = -1
    return from_dense(matrix, default=labels.default)


def fixed_per_class(labels: Labels, n: int, seed: int) -> Labels:
    """Return labels that keep n random positives and n random negatives per class, or all of fewer.

    All other entries become -1 (not annotated). Source: as of `random_drop` ("fpc").
    """
    matrix = labels.dense()
    kept = np.full_like(matrix, -1)
    rng = np.random.default_rng(seed)

    for column in range(labels.num_classes):
        for value in (1, 0):
            images = np.flatnonzero(matrix[:, column] == value)
            chosen = rng.choice(images, min(n, len(images)), replace=False)
            kept[chosen, column] = value

    return from_dense(kept, default=-1)


def random_positives(labels: Labels, seed: int, share: float | None = None) -> np.ndarray:
    """Choose one random positive of each image, and with `share` more of them: bool [M] of entries.

    With `share` this fraction of all positives is chosen, or more, where each image needs one.
    Source of one per image: Cole et al. (CVPR 2021, arXiv 2106.09708); a share of all, at least one
    per image: as the lists of Zhang et al. (arXiv 2112.07368), which are not drawn at random alone.
    """
    shuffled = np.random.default_rng(seed).permutation(np.flatnonzero(labels.values == 1))
    _, first = np.unique(labels.images()[shuffled], return_index=True)
    chosen = np.zeros(len(labels.values), bool)
    chosen[shuffled[first]] = True

    if share is not None:
        others = np.delete(shuffled, first)
        more = max(round(share * len(shuffled)) - len(first), 0)
        chosen[others[:more]] = True
    return chosen


def listed_positives(labels: Labels, files: Sequence[str], path: Path, see: str) -> np.ndarray:
    """Choose the positives that a file lists for each image: bool [M] of entries.

    Its lines are those of xinyu1205/robust-loss-mlml, `name.jpg,3 41`: the name of an image file,
    without its folder, and the indices of classes; those of images that are not here do not count.
    `files` are the paths of the N images, each of which must be listed.
    """
    rows: dict[str, int] = {}
    for row, file in enumerate(files):
        name = Path(file).name
        if name in rows:
            other = files[rows[name]]
            raise DataError(
                f"{path}: it names images without their folders, and {name} is the name of both "
                f"{other} and {file}: rename one; {see}"
            )
        rows[name] = row
    entries = zip(labels.images(), labels.classes, labels.values, strict=True)
    positions = {(row, c): entry for entry, (row, c, value) in enumerate(entries) if value == 1}
    chosen = np.zeros(len(labels.values), bool)

    with refusing(path, DataError, remedy=f"its lines are FILE,INDEX INDEX ...; {see}"):
        for line in read_lines(path, see):
            name, _, columns = line.partition(",")
            if name not in rows:
                continue
            row = rows.pop(name)
            for column in columns.split():
                if (row, int(column)) not in positions:
                    raise ValueError(f"{shown(name)} does not show class {column}")
                chosen[positions[row, int(column)]] = True
        if rows:
            raise ValueError(f"{len(rows):,} training images are not in it, as {next(iter(rows))}")
    return chosen


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
        default: value of the classes that an image has no label for, 0 or -1.
        folder: the image folder, if absolute paths inside it are allowed.
    """

    def __init__(
        self,
        see: str,
        *,
        classes: Sequence[str] | None = None,
        default: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.see = see
        self.folder = folder
        self.classes = None if classes is None else tuple(classes)
        self.default = default

        # Indices of the classes so far; source of each path so far; entries of each image so far.
        self._columns = {name: column for column, name in enumerate(classes or ())}
        self._first_seen: dict[str, str] = {}
        self._entries: list[dict[int, int]] = []

    def add(self, path: str, labels: Mapping[str, int] | Mapping[int, int], where: str) -> None:
        """Add an image by the path of its file, see `path_inside`.

        The labels map a class (its name, or its index if the classes were given) to its value, see
        `Labels`. `where` is the annotation file and the row, for messages. A `DataError` says that
        the path leads out of the folder, the image was added before, or a class is unknown.
        """
        path = path_inside(path, where, self.see, folder=self.folder)
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
        """Return the table, images in the order in which they were added."""
        known = self._columns if self.classes is None else self.classes
        labels = from_entries(self._entries, num_classes=len(known), default=self.default)
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
        if label in self._columns:
            return self._columns[str(label)]
        if isinstance(label, str):
            raise unknown_class(label, self.classes, where, self.see)
        if not 0 <= label < len(self.classes):
            raise DataError(
                f"{where}: the class {label} is not an index below {len(self.classes)}; {self.see}"
            )
        return label


def encode_paths(paths: Sequence[str]) -> np.ndarray:
    """Return paths as an array of bytes [N] of a fixed width, as in `Table.files`."""
    return np.array([os.fsencode(path) for path in paths], np.bytes_)


def path_inside(path: str, where: str, see: str, *, folder: Path | None = None) -> str:
    """Return a path from an annotation file with '/' between its folders.

    With `folder`, an absolute path inside this folder becomes relative to it. Raises a `DataError`
    unless the path stays inside the folder of the images.
    """
    given = path
    if folder is not None and path.startswith("/"):
        for base in (folder, folder.resolve()):
            if Path(path).is_relative_to(base):
                path = str(Path(path).relative_to(base))
                break
    parts = path.replace("\\", "/").split("/")

    # "C:" at the start is a drive of Windows.
    is_absolute = parts[0] == "" or parts[0].endswith(":")
    if is_absolute or ".." in parts or "\0" in path:
        where_inside = "the image folder" if folder is None else f"the image folder {folder}"
        raise DataError(f"{where}: {given!r} is not a path inside {where_inside}; {see}")

    return "/".join(part for part in parts if part not in ("", "."))


def check_val(val: str, present: Collection[str], where: Path, see: str) -> None:
    """Raise a `DataError` if the validation split is absent, and there by another usual name."""
    others = [name for name in ("val", "valid", "validation", "dev") if name in present]
    if val not in present and others:
        raise DataError(f"{where}: it has no split {val!r}: pass data.val={others[0]}; {see}")


def log_split(what: str, split: str, table: Table) -> None:
    """Log the size of a split, and warn of classes without a positive image, by name."""
    log.info("%s %s: %s images, %d classes", what, split, f"{len(table):,}", len(table.classes))
    warn_empty_classes(what, split, table)


def warn_empty_classes(what: str, split: str, table: Table) -> None:
    """Warn of classes without a positive image, by name."""
    empty = np.flatnonzero(table.labels.counts() == 0)
    if len(empty) and len(table):
        names = listed([repr(table.classes[column]) for column in empty])
        message = "%s %s: %d of %d classes have no image: %s"
        log.warning(message, what, split, len(empty), len(table.classes), names)


# How the images of a table are divided into splits and folds.


def path_hash(file: bytes, seed: int) -> int:
    """Return a uniform 64-bit number that depends on seed and path only."""
    digest = sha256(b"%d %s" % (seed, file)).digest()
    return int.from_bytes(digest[:8], "big")


def hold_out(table: Table, fraction: float, seed: int, *, val: bool) -> Table:
    """Return the images that are held out for validation, by a hash of the path, or the others.

    An image stays in its split when others are added or removed.
    """
    limit = fraction * 2**64
    is_held_out = np.array([path_hash(file, seed) < limit for file in table.files.tolist()], bool)
    return table.select(is_held_out if val else ~is_held_out)


def check_fraction(val_fraction: float) -> None:
    """Raise a `ValueError` unless the fraction of images to hold out is in (0, 1)."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}: it must be above 0 and below 1")


def hold_out_stratified(table: Table, fraction: float, seed: int, *, val: bool) -> Table:
    """Return the images that are held out for validation, or the others; see `stratified`.

    Each class with two or more positives has one in validation. The order of the images does not
    count, but one may change its split when others are added.
    """
    hashes = np.array([path_hash(file, seed) for file in table.files.tolist()], np.uint64)
    order = np.argsort(hashes, kind="stable")
    is_held_out = stratified(table.labels, order, fraction)
    hold_out_each_class(table.labels, order, is_held_out)
    return table.select(is_held_out if val else ~is_held_out)


def hold_out_each_class(labels: Labels, order: np.ndarray, is_held_out: np.ndarray) -> None:
    """Hold out one more image for each class with two or more positives, none of them held out.

    It is the first image, in the given order, that takes the last training positive from the fewest
    classes. `is_held_out`, bool [N], is changed in place.
    """
    positives = labels.only(labels.values == 1)
    num_held_out = positives.select(is_held_out).counts()
    num_left = positives.counts() - num_held_out
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels))

    def classes_of(image: int) -> np.ndarray:
        return positives.classes[positives.starts[image] : positives.starts[image + 1]]

    def cost(image: int) -> tuple[int, int]:
        return int((num_left[classes_of(image)] == 1).sum()), int(place[image])

    missing = np.flatnonzero((num_held_out == 0) & (num_left >= 2))
    image_of_entry = positives.images()
    for column in missing[np.argsort(num_left[missing], kind="stable")]:
        # An image that was moved for a rarer class may show this one too.
        if num_held_out[column]:
            continue
        image = min(image_of_entry[positives.classes == column].tolist(), key=cost)
        is_held_out[image] = True
        num_held_out[classes_of(image)] += 1
        num_left[classes_of(image)] -= 1


def stratified(labels: Labels, order: np.ndarray, fraction: float) -> np.ndarray:
    """Return which images are held out, bool [N], so that each class has its share of positives.

    Source: Sechidis et al., On the Stratification of Multi-Label Data (ECML 2011), Algorithm 1. It
    breaks ties at random. Here the first of several equally rare classes is dealt out first, its
    images in the given order, int [N], and an image for which the splits are equal is not held out.
    """
    ends = np.cumsum(labels.counts_per_image())[:-1]
    classes_of_image = np.split(labels.classes[labels.values == 1], ends)

    # The images in which each class is present, in the given order.
    ordered = labels.select(order)
    images = np.repeat(order, ordered.counts_per_image())
    by_class = np.argsort(ordered.classes[ordered.values == 1], kind="stable")
    images_of_class = np.split(images[by_class], np.cumsum(labels.counts())[:-1])

    # How many images, and how many positives of each class, each split still wants: [2] and [2, K].
    shares = np.array([1 - fraction, fraction])
    wanted_images = len(labels) * shares
    wanted = shares[:, None] * labels.counts()

    split_of_images = np.full(len(labels), -1, np.int8)
    num_left = labels.counts()

    def deal(image: int, wanted_by: np.ndarray) -> None:
        train, val = wanted_by
        if train == val:
            train, val = wanted_images
        split = int(val > train)
        split_of_images[image] = split
        wanted_images[split] -= 1
        wanted[split, classes_of_image[image]] -= 1
        num_left[classes_of_image[image]] -= 1

    # The rarest class first: the images of common classes can balance the splits later.
    while num_left.any():
        rarest = int(np.where(num_left > 0, num_left, len(labels) + 1).argmin())
        for image in images_of_class[rarest]:
            if split_of_images[image] < 0:
                deal(image, wanted[:, rarest])

    # Images without a positive fill the splits up.
    for image in order[split_of_images[order] < 0]:
        deal(image, wanted_images)

    return split_of_images == 1


def parse_fold(fold: str) -> tuple[int, int]:
    """Return i and N of "i/N"; raise a `ValueError` unless 1 <= i <= N and N is at least 2."""
    form = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", fold)
    number, count = map(int, form.groups()) if form else (0, 0)
    if not 1 <= number <= count or count < 2:
        raise ValueError(
            f"fold is {fold!r}: it must be i/N, fold i of N from 1 to N, N at least 2, such as 1/5"
        )
    return number, count


def fold_numbers(keys: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Return the fold of each image, int64 [M] from 1 to `count`, by a hash of its `Storage.keys`.

    An image stays in its fold when others are added or removed. Another seed spreads the images of
    one fold evenly.
    """
    is_text = keys.dtype.kind == "S"
    texts = keys.tolist() if is_text else [key.tobytes() for key in keys]

    # The remainder, as the images may be those that `hold_out` left: their hashes have the same
    # seed, and only the highest of them remain.
    remainders = (path_hash(text, seed) % count for text in texts)
    return 1 + np.fromiter(remainders, np.int64, len(texts))
