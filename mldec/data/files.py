"""Labelled image files: what the readers of all data sets on a disk share.

A reader turns annotation files into a `Table`; the table is cached, because annotation files take seconds to minutes to
parse; and `file_data` makes a `DataModule` of one table for training and one for validation.
"""

import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.labels import Labels
from mldec.data.transforms import EvalTransform, read_image
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator

log = logging.getLogger("mldec")

FORMAT = 4  # of a cached table; raise it when the meaning of a stored array changes
ABSENT = ("stop", "skip", "unchecked")


@dataclass(frozen=True)
class Table:
    """N image files with labels of K classes."""

    files: np.ndarray  # [N] bytes of a fixed width: paths inside the image folder, see `paths`
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


def paths(names: Sequence[str]) -> np.ndarray:
    """Return file names as `Table.files` holds them."""
    return np.array([os.fsencode(name) for name in names], np.bytes_)


def inside(path: str, where: str, see: str) -> str:
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


class ImageFiles:
    """The images of a table; see `mldec.data.base.ImageDataset`."""

    def __init__(self, folder: Path, table: Table, transform: Callable[[Image.Image], Tensor]) -> None:
        self.folder, self.files, self.labels, self.transform = folder, table.files, table.labels, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K]."""
        target = self.labels.row(index)
        return self.transform(read_image(self.name(index))), target

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file.

        Raises:
            DataError: if it cannot be read.
        """
        try:
            return Path(self.name(index)).read_bytes()
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


def cached(name: str, sources: Sequence[Path], parse: Callable[[], Table], *, cache_dir: str | None, see: str) -> Table:
    """Return what `parse` makes of annotation files, from the cache if that was made from these very files.

    Args:
        name: of the kind of table, with every setting that `parse` depends on, such as "coco".
        sources: the files it reads; size and time of each decide whether the cache is still right.
        parse: reads them.
        cache_dir: folder of the cache; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.
        see: where help is.

    Raises:
        DataError: if a source cannot be read, or from `parse`.
    """
    key = f"{FORMAT} {name}"
    for source in sources:
        try:
            stat = source.stat()
        except OSError as error:
            raise DataError(f"{source} cannot be read ({error.strerror}); {see}") from error
        key += f" {stat.st_size} {stat.st_mtime_ns} {source}"
    cache = _cache_file(f"{name} {' '.join(map(str, sources))}", cache_dir)
    table = _load(cache, key)
    if table is None:
        table = parse()
        _store(cache, key, table)
    return table


def _cache_file(name: str, cache_dir: str | None) -> Path:
    """Return one file for each set of sources, so that a changed annotation file replaces its old table."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mldec")
    try:
        folder = Path(cache_dir or default).expanduser()
    except RuntimeError:  # an account without a home, as in some containers
        folder = Path(tempfile.gettempdir(), "mldec")
    return folder / f"{name.split()[0]}-{sha256(os.fsencode(name)).hexdigest()[:16]}.npz"


def _load(cache: Path, key: str) -> Table | None:
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return None
            labels = Labels(
                stored["starts"],
                stored["label_classes"],
                stored["values"],
                num_classes=len(stored["classes"]),
                rest=int(stored["rest"]),
            )
            table = Table(stored["files"], labels, tuple(stored["classes"].tolist()))
            fits = len(table.files) == len(labels) and len(labels.classes) == len(labels.values) == labels.starts[-1]
    except (OSError, ValueError, KeyError, TypeError, EOFError, IndexError, zipfile.BadZipFile, zlib.error):
        return None  # absent, cut short, or not ours: parse again
    return table if fits else None


def _store(cache: Path, key: str, table: Table) -> None:
    """Write to the side, then rename: ranks that start together each see a whole file or none."""
    arrays = {
        "key": key,
        "files": table.files,
        "starts": table.labels.starts,
        "label_classes": table.labels.classes,
        "values": table.labels.values,
        "rest": table.labels.rest,
        "classes": np.array(table.classes, np.str_),
    }
    temporary = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache.parent, suffix=".tmp", delete=False) as temporary:
            np.savez(temporary, **arrays)  # type: ignore[arg-type]
        Path(temporary.name).replace(cache)
    except OSError as error:
        log.warning("%s cannot be written (%s): the annotations are parsed at every start", cache, error.strerror)
        if temporary is not None:
            Path(temporary.name).unlink(missing_ok=True)


def _list(folder: Path, see: str) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}); {see}") from error
