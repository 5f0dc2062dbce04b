"""A table of images and labels, as annotation files give it: what a reader makes, and what the cache keeps."""

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

    files: (
        np.ndarray
    )  # [N] bytes of a fixed width: paths inside the image folder, see `encode_paths`
    labels: Labels
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def select(self, images: np.ndarray) -> "Table":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return Table(self.files[images], self.labels.select(images), self.classes)

    def select_classes(self, columns: Sequence[int]) -> "Table":
        """Return some of the classes: their indices in the wanted order."""
        names = tuple(self.classes[column] for column in columns)
        return Table(self.files, self.labels.select_classes(columns), names)


class TableBuilder:
    """Collect images and their labels one by one, and refuse what no table may hold.

    Args:
        see: where help is, such as "see DATASETS.md, section MS-COCO".
        classes: the class names in their order; None takes the sorted names of all labels.
        default: value of every class that an image has no entry for: 0 (absent) or -1 (not annotated).
    """

    def __init__(self, see: str, *, classes: Sequence[str] | None = None, default: int = 0) -> None:
        self.see = see
        self.classes = None if classes is None else tuple(classes)
        self.default = default
        self._columns = {name: column for column, name in enumerate(classes or ())}
        self._first_seen: dict[str, str] = {}
        self._entries: list[dict[int, int]] = []

    def __len__(self) -> int:
        return len(self._first_seen)

    def add(self, path: str, labels: Mapping[str, int] | Mapping[int, int], where: str) -> None:
        """Add an image.

        Args:
            path: of its file inside the image folder; Windows separators are taken.
            labels: class (its name, or its index if the classes were given) -> 1 (present), 0 (absent), -1 (not
                annotated) or a code of the data set's own.
            where: the annotation file and the row, for messages.

        Raises:
            DataError: for a path that leads out of the folder, an image that was added before, or an unknown class.
        """
        path = path_inside(path, where, self.see)
        if path in self._first_seen:
            first = self._first_seen[path].rpartition(", ")[
                2
            ]  # the row, without the file, which is the same
            raise DataError(
                f"{where}: the image {path} is listed twice, first in {first}: leave one of them out; {self.see}"
            )
        self._first_seen[path] = where

        self._entries.append({self._column(label, where): value for label, value in labels.items()})

    def build(self, where: str | Path) -> Table:
        """Return the table, images in the order in which they were added.

        Raises:
            DataError: that begins with `where`, if no class was given and no image has a label, or for names that no
                class may have.
        """
        num_classes = len(self._columns if self.classes is None else self.classes)
        labels = from_entries(self._entries, num_classes=num_classes, default=self.default)
        files = encode_paths(list(self._first_seen))
        if self.classes is not None:
            return Table(files, labels, self.classes)

        # So far the classes are in the order in which they came up.
        if not self._columns:
            raise DataError(f"{where}: no image has a label; {self.see}")
        classes = check_names(sorted(self._columns), where, self.see)
        return Table(
            files, labels.select_classes([self._columns[name] for name in classes]), classes
        )

    def _column(self, label: str | int, where: str) -> int:
        """Return the index of a class that was given by name or by index."""
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
    """Return paths as `Table.files` holds them."""
    return np.array([os.fsencode(path) for path in paths], np.bytes_)


def path_inside(path: str, where: str, see: str) -> str:
    """Return a path from a list, with '/' between its folders, after refusing one that leads elsewhere.

    Args:
        path: as the list has it; Windows separators are taken.
        where: the list and the row, for the message.
        see: where help is.

    Raises:
        DataError: if it is empty, absolute, or climbs with '..'.
    """
    parts = path.replace("\\", "/").split("/")
    if not path or parts[0] == "" or parts[0].endswith(":") or ".." in parts or "\0" in path:
        raise DataError(f"{where}: {path!r} is not a path inside the image folder; {see}")
    return "/".join(part for part in parts if part not in ("", "."))


def held_out(files: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """Decide for each path, by itself, whether it is held out for validation: bool [N].

    By a hash of seed and path, so that an image stays on its side when others come or go.
    """
    hashes = (sha256(b"%d %s" % (seed, file)).digest()[:8] for file in files)
    return np.array([int.from_bytes(hash, "big") < fraction * 2**64 for hash in hashes], bool)


def check_fraction(val_fraction: float) -> None:
    """Raise a `ValueError` unless the share of images to hold out is in (0, 1)."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}: it must be above 0 and below 1")


def log_split(what: str, split: str, table: Table) -> None:
    """Log the counts of a split, and the classes without a positive: their accuracy or AP says nothing."""
    log.info("%s %s: %s images, %d classes", what, split, f"{len(table):,}", len(table.classes))

    empty = np.flatnonzero(table.labels.counts() == 0)
    if len(empty) and len(table):
        names = ", ".join(repr(table.classes[column]) for column in empty[:3]) + (
            ", ..." if len(empty) > 3 else ""
        )
        log.warning(
            "%s %s: %d of %d classes have no image: %s",
            what,
            split,
            len(empty),
            len(table.classes),
            names,
        )
