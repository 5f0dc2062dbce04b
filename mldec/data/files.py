"""Labelled image files: what the readers of all data sets on a disk share.

A reader turns annotation files into a `Table`, and `file_data` makes a `DataModule` of one table for training and one
for validation.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.tables import Table
from mldec.data.transforms import EvalTransform, load_image
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator
from mldec.inputs import open_binary

log = logging.getLogger("mldec")

ABSENT = ("stop", "skip", "unchecked")


class ImageFiles:
    """The images of a table; see `mldec.data.base.ImageDataset`."""

    def __init__(self, folder: Path, table: Table, transform: Callable[[Image.Image], Tensor]) -> None:
        self.folder, self.files, self.labels, self.transform = folder, table.files, table.labels, transform
        self.image_keys = table.files  # see `mldec.data.fingerprint.Identified`

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K]."""
        target = self.labels.row(index)
        return load_image(self.name(index), self.transform), target

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file.

        Raises:
            DataError: if it cannot be read.
        """
        try:
            with open_binary(self.name(index)) as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{self.name(index)} cannot be read ({error.strerror})") from error

    def name(self, index: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / os.fsdecode(self.files[index]))


def file_data(
    load: Callable[[str], tuple[Path, Table]],
    *,
    train: str,
    val: str,
    learn: Callable[[Image.Image], Tensor],
    check: EvalTransform,
    evaluator: Callable[[], Evaluator],
    where: str | Path,
    see: str,
    exclusive: bool = False,
    bad_images: str = "stop",
    load_train: Callable[[str], tuple[Path, Table]] | None = None,
    absent: str = "stop",
    folder_setting: str | None = None,
) -> DataModule:
    """Return a `DataModule` of two splits of one data set with the same classes.

    Args:
        load: a split's name -> its image folder and table; called when the split is first used.
        train: name of the split to learn from.
        val: name of the split to evaluate on.
        learn: what a training image goes through.
        check: what a validation image goes through.
        evaluator: makes the evaluator.
        where: the data set's folder, for messages.
        see: where help is, such as "see DATASETS.md, section MS-COCO".
        exclusive: each image has one label.
        bad_images: see `DataModule`.
        load_train: as `load`, for the split to learn from, where its labels mean something else; None is `load`.
        absent: what to do about a listed image that is not on the disk, found at the start: "stop"; "skip": leave it
            out and log how many; or "unchecked": do not list the folders, which takes a minute for millions of files.
        folder_setting: the setting with the image folder, for messages, such as "data.images"; None if there is none.

    Raises:
        ConfigError: for an unknown choice.
        DataError: when a split is used that has no image, lacks a file, or has other classes than validation.
    """
    if absent not in ABSENT:
        raise ConfigError(f"data.absent {absent!r} is not known: choose stop, skip or unchecked")

    def read(name: str, found: tuple[Path, Table], transform: Callable[[Image.Image], Tensor]) -> Split:
        folder, table = found
        if not len(table):
            raise DataError(f"{folder}: {name} has no image; {see}")
        if absent == "stop":
            check_present(folder, table.files, see, folder_setting)
        elif absent == "skip":
            table = keep_present(folder, table, see)
        nothing = torch.zeros(0, len(table.classes))
        evaluator().update(nothing, nothing)  # refuses settings that do not fit the classes now, not after an epoch
        return Split(ImageFiles(folder, table, transform), Classes(table.classes, exclusive))

    def read_train() -> Split:
        split = read(train, (load_train or load)(train), learn)
        check_same_classes(split.classes.names, data.val.classes.names, where, see)
        return split

    data = DataModule(read_train, lambda: read(val, load(val), check), evaluator, check, bad_images)
    return data


def check_folder(root: str, what: str, see: str) -> Path:
    """Return the absolute path of a data set's folder.

    Raises:
        DataError: if it is absent or empty.
    """
    folder = Path(root).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; set data.root to the folder of {what} or {see}")
    if not _list(folder, see):
        raise DataError(f"{folder} is empty; {see}")
    return folder


def check_same_classes(train: tuple[str, ...], val: tuple[str, ...], where: str | Path, see: str) -> None:
    """Raise a `DataError` unless both splits have the same classes in the same order."""
    if train != val:
        alone = sorted(set(train) ^ set(val))
        what = f"{alone[0]!r} is in one only" if alone else "their order differs"
        raise DataError(f"{where}: the classes of train ({len(train)}) and val ({len(val)}) differ: {what}; {see}")


def check_present(folder: Path, files: np.ndarray, see: str, setting: str | None = None) -> None:
    """Compare the listed files with the folder.

    Args:
        folder: that the paths start from.
        files: see `Table.files`.
        see: where help is.
        setting: the one with the folder, such as "data.images", if there is one.

    Raises:
        DataError: with the number of absent files and the first of them.
    """
    absent = ~find_present(folder, files, see)
    if absent.any():
        count = f"{absent.sum():,} of {len(files):,}"
        first = os.fsdecode(files[absent.argmax()])
        advice = f"{_folder_advice(folder, first, setting)}; " if setting else ""
        raise DataError(f"{folder}: {count} listed images are absent, the first is {first}; {advice}{see}")


def _folder_advice(folder: Path, file: str, setting: str) -> str:
    """Say which folder inside `folder` holds a listed file, if one does: a list often has bare names."""
    inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    holds = [name for name in inner if (folder / name / file).is_file()]
    if holds:
        return f"it is in {holds[0]}: pass {setting}={holds[0]}"
    return f"it was looked for at {folder / file}: set {setting} to the folder that the paths start from"


def keep_present(folder: Path, table: Table, see: str) -> Table:
    """Return the images that are on the disk, and log how many are not.

    Raises:
        DataError: if none is.
    """
    present = find_present(folder, table.files, see)
    if not present.any():
        raise DataError(f"{folder}: none of {len(table):,} listed images is there; {see}")
    if present.all():
        return table
    log.warning(
        "%s: %s of %s listed images are absent and left out", folder, f"{(~present).sum():,}", f"{len(table):,}"
    )
    return table.select(present)


def find_present(folder: Path, files: np.ndarray, see: str) -> np.ndarray:
    """Tell which files exist, bool [N]: a listing of each folder, where a question for each file takes minutes."""
    listed: dict[str, set[str]] = {}
    present = np.ones(len(files), bool)
    for start in range(0, len(files), 65536):  # millions of names at once would be gigabytes of strings
        for row, file in enumerate(map(os.fsdecode, files[start : start + 65536].tolist()), start):
            inner, _, leaf = file.rpartition("/")
            if inner not in listed:
                listed[inner] = _list(folder / inner, see)
            present[row] = leaf in listed[inner]
    return present


def _list(folder: Path, see: str) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}); {see}") from error
