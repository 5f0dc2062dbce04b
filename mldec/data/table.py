"""A table of images and labels, as annotation files give it: what a reader makes, and what the cache keeps."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mldec.data.labels import Labels, from_entries
from mldec.data.names import check_names, unknown_class
from mldec.errors import DataError


@dataclass(frozen=True)
class Table:
    """N image files with labels of K classes."""

    files: np.ndarray  # [N] bytes of a fixed width: paths inside the image folder, see `encode_paths`
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
        default: value of every class that an image has no label for: 0 (absent) or -1 (not annotated).
    """

    def __init__(self, see: str, *, classes: Sequence[str] | None = None, default: int = 0) -> None:
        self.see = see
        self.classes = None if classes is None else tuple(classes)
        self.default = default
        self._columns = None if classes is None else {name: i for i, name in enumerate(classes)}
        self._first_seen: dict[str, str] = {}
        self._labels: list[Mapping[str, int]] = []

    def add(self, path: str, labels: Mapping[str, int], where: str) -> None:
        """Add an image.

        Args:
            path: of its file inside the image folder; Windows separators are taken.
            labels: class name -> 1 (present), 0 (absent), -1 (not annotated) or a code of the data set's own.
            where: the annotation file and the row, for messages.

        Raises:
            DataError: for a path that leads out of the folder, an image that was added before, or an unknown class.
        """
        path = path_inside(path, where, self.see)
        if path in self._first_seen:
            raise DataError(
                f"{where}: the image {path} is listed twice, first in {self._first_seen[path]}; "
                f"leave one out, {self.see}"
            )
        if self._columns is not None:
            for name in labels:
                if name not in self._columns:
                    raise unknown_class(name, self._columns, where, self.see)

        self._first_seen[path] = where
        self._labels.append(labels)

    def build(self, where: str) -> Table:
        """Return the table, images in the order in which they were added.

        Raises:
            DataError: that begins with `where`, if no class was given and no image has a label.
        """
        classes = self.classes
        if classes is None:
            names = {name for labels in self._labels for name in labels}
            if not names:
                raise DataError(f"{where}: no image has a label; {self.see}")
            classes = check_names(sorted(names), where, self.see)

        columns = {name: column for column, name in enumerate(classes)}
        entries = [{columns[name]: value for name, value in labels.items()} for labels in self._labels]
        labels = from_entries(entries, num_classes=len(classes), default=self.default)
        return Table(encode_paths(list(self._first_seen)), labels, classes)


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
