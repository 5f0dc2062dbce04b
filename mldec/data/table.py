"""What an annotation file says: class names, sparse labels, and tables of images with both."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mldec.data.labels import Labels, from_entries
from mldec.errors import DataError
from mldec.names import check_names, unknown_class

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


# How the images of a table are divided into splits and folds.
