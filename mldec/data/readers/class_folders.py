"""Datasets with one folder of images per class."""

import logging
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.images import READ
from mldec.data.labels import from_single
from mldec.data.photos import SkippedFiles, user_entries
from mldec.data.source import Source
from mldec.data.splits import HELD_OUT_BY_HASH, HoldOut, check_val, log_split
from mldec.data.table import Table, encode_paths
from mldec.data.tasks import single_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError
from mldec.names import as_name, check_names, given_names, indices_of, unknown_class

log = logging.getLogger("mldec")


def read_class_folders(
    folder: Path,
    class_names: Sequence[str],
    display_names: tuple[str, ...],
    cache_dir: str | None,
) -> Table:
    """Return the images of the class folders in `folder`, sorted by class and file name.

    `class_names` are the folder names in the order of the classes. Folders may be absent.
    `display_names` are the class names of the table, one per folder.
    """
    present = list_class_folders(folder)
    for name in present:
        if name not in class_names:
            raise unknown_class(name, class_names, str(folder))

    def parse() -> Table:
        columns = indices_of(class_names)
        files: list[str] = []
        classes: list[int] = []
        for name in sorted(present, key=columns.__getitem__):
            images = list_images(folder / name)
            files += [f"{name}/{image}" for image in images]
            classes += [columns[name]] * len(images)

        labels = from_single(np.array(classes, np.int32), len(display_names))
        return Table(encode_paths(files), labels, display_names)

    # The key has a hash of the names, because a plain list of names would be ambiguous.
    chosen = (tuple(class_names), display_names, sorted(READ))
    settings = sha256(os.fsencode(repr(chosen))).hexdigest()
    sources = [folder]
    sources += [folder / name for name in present]
    return cached_table(f"folders 2 {settings}", sources, parse, cache_dir)


def list_class_folders(folder: Path, skipped: SkippedFiles | None = None) -> list[str]:
    """Return the sorted names of the user's folders in a folder."""
    entries = user_entries(folder, skipped)
    return [as_name(entry.name, folder) for entry in entries if entry.is_dir()]


def list_images(folder: Path) -> list[str]:
    """Return the sorted names of the user's image files in a folder."""
    entries = user_entries(folder)
    files = [entry.name for entry in entries if not entry.is_dir()]
    images = [name for name in files if Path(name).suffix.lower() in READ]

    # Do not silently ignore images in inner folders.
    if not images and len(files) < len(entries):
        fault = "it has folders and no image"
        raise DataError(f"{folder}: {fault}; move the images out of the inner folders")
    return images


def folders(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    classes: str | list[str] | None = None,
    exclusive: Literal[True] = True,
    division: HoldOut = HELD_OUT_BY_HASH,
    top_k: int | None = None,
) -> Source:
    """Return single-label images. The label is the name of the folder.

    The layout is root/train/CLASS/*.jpg and root/val/CLASS/*.jpg. If `root` has neither of these
    folders, root/CLASS/*.jpg is split in a reproducible way.

    Args:
        classes: Class names in order, or a text file with one name per line. None takes the sorted
            folder names of `train`.
        exclusive: Always True: each image has exactly one label, see `csv_table`.
        division: Held-out images if `root` has no folders `train` and `val`.
    """
    evaluator = single_label(top_k)
    folder = check_folder(root, "a folder per class")
    names = given_names(classes, folder)

    # If only one split has a folder, this folder must not be used as a class folder.
    divided = (folder / train).is_dir() or (folder / val).is_dir()

    def load(split: str, cache_dir: str | None) -> StoredImages:
        if divided and split == val:
            check_val(val, list_class_folders(folder), folder)

        # Both splits use the class folders of the training split.
        parent = folder / train if divided else folder
        class_names = names or list_class_folders(parent)
        class_names = check_names(class_names, folder)

        images = folder / split if divided else folder
        table = read_class_folders(images, class_names, class_names, cache_dir)
        skipped = SkippedFiles()
        for name in list_class_folders(images, skipped):
            for entry in user_entries(images / name, skipped):
                skipped.add(f"{name}/{entry.name}")
        if skipped and not len(table):
            raise DataError(f"{images}: no supported image; {skipped}")
        # An undivided folder has the same files for both splits. Warn only once.
        if divided or split == train:
            skipped.log(f"folders {split}")
        if not divided:
            table = division.select(table, val=split == val)

        log_split("folders", split, table)
        return in_folder(table, images)

    return Source(
        load=load, train=train, val=val, where=folder, evaluator=evaluator, exclusive=True
    )
