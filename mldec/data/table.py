"""A table of image files and their labels: readers build it, and the cache stores it."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.labels import Labels, from_entries
from mldec.data.names import check_names, unknown_class
from mldec.errors import DataError

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
