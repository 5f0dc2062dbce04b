"""Data sets with one folder of images per class, such as ImageNet."""

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.cache import TableCache
from mldec.data.labels import from_single
from mldec.data.names import as_name, unknown_class
from mldec.data.storage.image_files import list_folder
from mldec.data.table import Table, encode_paths
from mldec.errors import DataError

# Suffixes of image files, in lower case; those of files may be in upper case.
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
)


def read_class_folders(
    folder: Path, class_names: Sequence[str], display_names: tuple[str, ...], cache: TableCache
) -> Table:
    """Return the images of all class folders, by class and then by file name.

    Args:
        folder: holds the class folders, and no other folders.
        class_names: folder names of the K classes, in the order of the classes. A class may have no
            folder, but each folder must be of a class.
        display_names: names of the K classes in the table.
        cache: keeps the list of images.

    Raises:
        DataError: A folder is of no class, holds only folders, or cannot be listed.
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

    # The key holds a hash of the names, because a plain list of names has no unambiguous end.
    settings = sha256(os.fsencode(repr((tuple(class_names), display_names)))).hexdigest()
    sources = [folder, *(folder / name for name in present)]
    return cache.table(f"folders {settings}", sources, parse)


def list_class_folders(folder: Path, see: str) -> list[str]:
    """Return the sorted names of the folders in a folder; hidden folders are left out.

    Args:
        folder: the folder.
        see: where to find help, for messages.

    Raises:
        DataError: It cannot be listed, or a folder name is not a valid class name, for example not
            UTF-8.
    """
    names = sorted(
        entry.name for entry in list_folder(folder, see) if entry.is_dir() and entry.name[0] != "."
    )
    for name in names:
        # Python keeps the bytes of such a name as surrogates, which no file of names can hold.
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{folder}: the folder {os.fsencode(name)!r} has no UTF-8 name: rename it; {see}"
            ) from None
        as_name(name, folder, see)

    return names


def list_images(folder: Path, see: str) -> list[str]:
    """Return the sorted names of the image files in a folder.

    Hidden files such as .DS_Store and ._x.jpg are left out.

    Args:
        folder: the folder.
        see: where to find help, for messages.

    Raises:
        DataError: It cannot be listed, or holds folders and no image.
    """
    entries = [entry for entry in list_folder(folder, see) if entry.name[0] != "."]
    images = sorted(entry.name for entry in entries if entry.name.lower().endswith(IMAGES))

    # Images in folders below would silently be missed.
    if not images and any(entry.is_dir() for entry in entries):
        raise DataError(
            f"{folder} holds folders and no image: one folder per class is read, "
            f"without inner ones; {see}"
        )
    return images
