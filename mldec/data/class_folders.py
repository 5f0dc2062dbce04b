"""A folder of images per class, as ImageNet and many users keep them."""

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.cache import TableCache
from mldec.data.labels import from_single
from mldec.data.names import as_name, unknown_class
from mldec.data.table import Table, encode_paths
from mldec.errors import DataError

IMAGES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".gif",
    ".ppm",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)  # in any case


def read_class_folders(
    folder: Path, class_names: Sequence[str], display_names: tuple[str, ...], cache: TableCache
) -> Table:
    """Return the images of the folders of all classes, by class and then by name.

    Args:
        folder: holds the classes' folders, and no other.
        class_names: of the folders, in the order of the classes; one may be absent, another one may not be there.
        display_names: of the classes, as the table has them.
        cache: keeps the list.

    Raises:
        DataError: for a folder that is not of a class, holds only folders, or cannot be listed.
    """
    present = list_class_folders(folder, cache.see)
    for name in present:
        if name not in class_names:
            raise unknown_class(name, class_names, str(folder), cache.see)

    def parse() -> Table:
        columns = {name: column for column, name in enumerate(class_names)}
        files: list[str] = []
        classes: list[int] = []
        for name in sorted(present, key=columns.__getitem__):
            images = list_images(folder / name, cache.see)
            files += [f"{name}/{image}" for image in images]
            classes += [columns[name]] * len(images)
        labels = from_single(np.array(classes, np.int32), len(display_names))
        return Table(encode_paths(files), labels, display_names)

    # A hash, because nothing would mark the end of a list of names in the cache's key.
    settings = sha256(os.fsencode(repr((tuple(class_names), display_names)))).hexdigest()
    return cache.table(f"folders {settings}", [folder, *(folder / name for name in present)], parse)


def list_class_folders(folder: Path, see: str) -> list[str]:
    """Return the sorted names of the folders in a folder, hidden ones left out.

    Raises:
        DataError: if it cannot be listed, or no class may be called like a folder, such as one that is not UTF-8.
    """
    names = sorted(
        entry.name for entry in _entries(folder, see) if entry.is_dir() and entry.name[0] != "."
    )
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{folder}: the folder {os.fsencode(name)!r} has no UTF-8 name: rename it; {see}"
            ) from None
        as_name(name, folder, see)
    return names


def list_images(folder: Path, see: str) -> list[str]:
    """Return the sorted names of the image files in a folder; hidden files (.DS_Store, ._x.jpg) are left out.

    Raises:
        DataError: if it cannot be listed, or holds folders and no image.
    """
    entries = [entry for entry in _entries(folder, see) if entry.name[0] != "."]
    images = sorted(entry.name for entry in entries if entry.name.lower().endswith(IMAGES))
    if not images and any(entry.is_dir() for entry in entries):
        raise DataError(
            f"{folder} holds folders and no image: one folder per class is read, without inner ones; {see}"
        )
    return images


def _entries(folder: Path, see: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}); {see}") from error
