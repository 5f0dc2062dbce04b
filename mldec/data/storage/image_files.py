"""Images that are stored as files in a folder."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.images import read_content
from mldec.data.table import Table
from mldec.errors import DataError


class ImageFiles:
    """Image files inside a folder; see `mldec.data.base.Storage`.

    Args:
        folder: that the paths are relative to.
        files: bytes [N] of a fixed width: paths inside the folder, as in `Table.files`.
        see: pointer to the documentation, for messages.
    """

    def __init__(self, folder: Path, files: np.ndarray, see: str) -> None:
        self.folder = folder
        self.files = files
        self.see = see

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / os.fsdecode(self.files[index]))

    @property
    def keys(self) -> np.ndarray:
        """The paths inside the folder, bytes [N]."""
        return self.files

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file.

        Raises:
            DataError: if it cannot be read.
        """
        return read_content(self.name(index))

    def select(self, images: np.ndarray) -> "ImageFiles":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return ImageFiles(self.folder, self.files[images], self.see)

    def absent(self) -> np.ndarray:
        """Return which files do not exist, bool [N].

        Each folder is listed once, because a query per file would take minutes for millions.

        Raises:
            DataError: if a folder cannot be listed.
        """
        listings: dict[str, set[str]] = {}
        absent = np.zeros(len(self.files), bool)

        # In chunks: millions of names, decoded at once, would be gigabytes of strings.
        for start in range(0, len(self.files), 65536):
            paths = map(os.fsdecode, self.files[start : start + 65536].tolist())
            for index, path in enumerate(paths, start):
                inner_folder, _, name = path.rpartition("/")
                if inner_folder not in listings:
                    entries = list_folder(self.folder / inner_folder, self.see)
                    listings[inner_folder] = {entry.name for entry in entries}

                absent[index] = name not in listings[inner_folder]
        return absent

    def find_inside(self, index: int) -> str | None:
        """Return the name of a folder inside this one under which the path of an image exists.

        None if there is no such folder.
        """
        inner_folders = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        path = os.fsdecode(self.files[index])
        for name in inner_folders:
            if (self.folder / name / path).is_file():
                return name
        return None

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Do nothing: there are no checksums to compare the files with."""


def in_folder(table: Table, folder: Path, see: str) -> LabelledImages:
    """Return the images of a table whose paths are relative to a folder."""
    return LabelledImages(ImageFiles(folder, table.files, see), table.labels, table.classes)


def list_folder(folder: Path, see: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders in a folder, in any order.

    Raises:
        DataError: if it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}); {see}") from error


def check_folder(root: str, what: str, see: str) -> Path:
    """Return the absolute path of the folder of a data set.

    Args:
        root: the setting `data.root`.
        what: name of the data set, for messages.
        see: pointer to the documentation, for messages.

    Raises:
        DataError: if the folder does not exist or is empty.
    """
    folder = Path(root).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; set data.root to the folder of {what} or {see}")

    # An empty folder is often a disk that is not mounted.
    if not any(list_folder(folder, see)):
        raise DataError(f"{folder} is empty; {see}")
    return folder
