"""Tables of image files with class names and sparse labels, as read from annotations."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np

from mldec.data.labels import Labels, from_entries
from mldec.errors import DataError
from mldec.names import abbreviate, check_names, indices_of, unknown_class


@dataclass(frozen=True)
class Table:
    """N image files with labels of K classes."""

    # Paths relative to the image folder, fixed-width bytes [N], see `encode_paths`.
    files: np.ndarray
    labels: Labels
    classes: tuple[str, ...]

    # Name of the group of each image, bytes [N], or None without groups. A group, such as the
    # frames of a video, is never divided. An image without a group has its path as the name.
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.files)

    def select(self, images: np.ndarray) -> "Table":
        """Return a subset of the images, given as a bool mask [N] or ordered indices."""
        groups = None if self.groups is None else self.groups[images]
        labels = self.labels.select(images)
        return replace(self, files=self.files[images], labels=labels, groups=groups)


@dataclass(eq=False)
class TableBuilder:
    """Build a table image by image, and validate paths and classes."""

    classes: Sequence[str] | None = None  # in order; None takes the sorted names of the labels
    _: KW_ONLY
    default: int = 0  # value of classes without a label in an image, 0 or -1
    folder: Path | None = None  # image folder, if absolute paths inside it are allowed

    def __post_init__(self) -> None:
        self._columns = indices_of(self.classes or ())
        self._first_seen: dict[str, str] = {}  # path -> `where` of its first occurrence
        self._entries: list[dict[int, int]] = []  # one mapping of column to value per image

    def add(self, path: str, labels: Mapping[str, int] | Mapping[int, int], where: str) -> None:
        """Add an image with its labels.

        `labels` maps classes to values, see `Labels`. A class is a name, or an index if the classes
        were given. `where` is the annotation file and row, for messages.
        """
        path = path_inside(path, where, folder=self.folder)
        if path in self._first_seen:
            # Give only the row. The message starts with the file.
            first_row = self._first_seen[path].rpartition(", ")[2]
            raise DataError(f"{where}: {path} is listed twice, first in {first_row}; remove one")
        self._first_seen[path] = where

        entries = {self._column(label, where): value for label, value in labels.items()}
        self._entries.append(entries)

    def build(self, where: str | Path) -> Table:
        """Return the table with the images in the order of insertion."""
        num_classes = len(self._columns if self.classes is None else self.classes)
        labels = from_entries(self._entries, num_classes=num_classes, default=self.default)
        classes = self.classes
        if classes is None:
            # Sort the classes. They are in the order of first occurrence.
            if not self._columns:
                raise DataError(f"{where}: no image has a label; add labels")
            classes = check_names(sorted(self._columns), where)
            labels = labels.select_classes([self._columns[name] for name in classes])

        return Table(encode_paths(list(self._first_seen)), labels, tuple(classes))

    def _column(self, label: str | int, where: str) -> int:
        # Every new name gets the next column if no classes were given.
        if self.classes is None:
            return self._columns.setdefault(str(label), len(self._columns))
        if label in self._columns:
            return self._columns[str(label)]
        if isinstance(label, str):
            raise unknown_class(label, self.classes, where)
        if not 0 <= label < len(self.classes):
            number = len(self.classes)
            raise DataError(f"{where}: the class {label} is not below {number}; correct it")
        return label


def encode_paths(paths: Sequence[str]) -> np.ndarray:
    """Return paths as fixed-width bytes [N], see `Table.files`."""
    return np.array(list(map(os.fsencode, paths)), np.bytes_)


def path_inside(
    path: str, where: str, *, folder: Path | None = None, without_root: bool = False
) -> str:
    """Normalize a path from an annotation file, with '/' as the separator.

    The path is relative to the image folder. With `folder`, absolute paths inside it become
    relative. `without_root` removes the root of a path of another computer or a URL, which
    `find_list` then finds. Raises DataError if the path leaves the image folder, or if no file can
    have its name.
    """
    given = abbreviate(path)
    # Systems limit names to 255 bytes and paths to 4,096. Embedded images are longer.
    if len(path) > 255 or not path.isascii():
        try:
            encoded = os.fsencode(path.replace("\\", "/"))
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: the path {given} is not valid Unicode; correct it"
            ) from error
        if len(encoded) > 4096 or max(map(len, encoded.split(b"/"))) > 255:
            raise DataError(
                f"{where}: the path {given} is too long; pass an embedded image as a file"
            )
    if folder is not None and path.startswith("/"):
        for base in (folder, folder.resolve()):
            if Path(path).is_relative_to(base):
                path = str(Path(path).relative_to(base))
                break
    parts = path.replace("\\", "/").split("/")

    # "C:" at the start is a Windows drive, and "https:" the scheme of a URL.
    while without_root and len(parts) > 1 and (parts[0] in ("", "..") or parts[0].endswith(":")):
        del parts[0]
    is_absolute = parts[0] == "" or parts[0].endswith(":")
    if is_absolute or ".." in parts or "\0" in path:
        inside = f"the image folder {folder}" if folder else "the image folder"
        raise DataError(f"{where}: {given} is not a path inside {inside}; make it relative")

    return "/".join(part for part in parts if part not in ("", "."))
