"""A folder of images for each class: your own data, and what ImageNet is read with."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.labels import from_single
from mldec.data.names import as_name, check_names, given_names, unknown_class
from mldec.data.tables import Table, cached, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import ConfigError, DataError
from mldec.evaluators.single_label import SingleLabelEvaluator

log = logging.getLogger("mldec")

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")  # in any case
_SEE = "see DATASETS.md, section Your own data"


def folders(
    *,
    root: str,
    image_size: int = 224,
    train: str = "train",
    val: str = "val",
    classes: str | list[str] | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    augment: str = "none",
    cutout: float = 0.0,
    flip: bool = True,
    crop: float = 0.08,
    interpolation: str = "bicubic",
    erase: float = 0.0,
    test_crop: float | None = 0.875,
    top_k: int | None = None,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return images with one label each, the folder they lie in: root/train/CLASS/*.jpg and root/val/CLASS/*.jpg.

    Without these two folders root/CLASS/*.jpg is split: the same images are held out at every start.

    Args:
        root: the folder.
        image_size: side of the square input in pixels.
        train: folder in root to learn from.
        val: folder in root to evaluate on.
        classes: class names in their order, or a text file with one a line; None is the sorted folder names of `train`.
        val_fraction: of the images to hold out where root has no folder `train` and none `val`, in (0, 1).
        seed: which images are held out.
        augment: this and the next five are described at `mldec.data.transforms.TrainTransform`.
        cutout: see there.
        flip: see there.
        crop: see there.
        interpolation: see there; "random" evaluates with bicubic.
        erase: see there.
        test_crop: side of the evaluated centre as a fraction of the shorter side; None squashes the whole image.
        top_k: see `SingleLabelEvaluator`.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed lists; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(
        image_size=image_size,
        augment=augment,
        cutout=cutout,
        flip=flip,
        crop=crop,
        interpolation=interpolation,
        erase=erase,
    )
    check = EvalTransform(
        image_size=image_size, crop=test_crop, interpolation=interpolation.replace("random", "bicubic")
    )
    evaluator = partial(SingleLabelEvaluator, top_k=top_k)
    evaluator()  # refuses a wrong value now
    check_fraction(val_fraction)
    folder = check_folder(root, "a folder for each class", _SEE)
    names = given_names(classes, folder, _SEE)
    read = partial(_read_split, folder, names=names, names_from=train, cache_dir=cache_dir)
    if not (folder / train).is_dir() and not (folder / val).is_dir():
        read = partial(_read_part, folder, val=val, names=names, fraction=val_fraction, seed=seed, cache_dir=cache_dir)
    return file_data(
        read,
        train=train,
        val=val,
        learn=learn,
        check=check,
        evaluator=evaluator,
        where=folder,
        see=_SEE,
        exclusive=True,
        bad_images=bad_images,
    )


def read_folders(
    folder: Path, folders: Sequence[str], names: tuple[str, ...], *, cache_dir: str | None, see: str
) -> Table:
    """Return the images of the folders of all classes, by class and then by name.

    Args:
        folder: holds the classes' folders, and no other.
        folders: their names, in the order of the classes; a folder may be absent, another one may not be there.
        names: of the classes.
        cache_dir: see `mldec.data.tables.cached`.
        see: where help is.

    Raises:
        DataError: for a folder that is not of a class, holds only folders, or cannot be listed.
    """
    present = class_folders(folder, see)
    for found in present:
        if found not in folders:
            raise unknown_class(found, folders, str(folder), see)
    sources = [folder, *(folder / found for found in present)]

    def parse() -> Table:
        places = {found: place for place, found in enumerate(folders)}
        files: list[str] = []
        labels: list[int] = []
        for found in sorted(present, key=places.__getitem__):
            images = list_images(folder / found, see)
            files += [f"{found}/{image}" for image in images]
            labels += [places[found]] * len(images)
        return Table(paths(files), from_single(np.array(labels, np.int32), len(names)), names)

    settings = sha256(os.fsencode(repr((tuple(folders), names)))).hexdigest()  # the words of a key have no end else
    return cached(f"folders {settings}", sources, parse, cache_dir=cache_dir, see=see)


def class_folders(folder: Path, see: str) -> list[str]:
    """Return the sorted names of the folders in a folder, hidden ones left out.

    Raises:
        DataError: if it cannot be listed, or no class may be called like a folder, such as one that is not UTF-8.
    """
    found = sorted(entry.name for entry in _entries(folder, see) if entry.is_dir() and entry.name[0] != ".")
    for name in found:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"{folder}: the folder {os.fsencode(name)!r} has no UTF-8 name: rename it; {see}") from None
        as_name(name, folder, see)
    return found


def list_images(folder: Path, see: str) -> list[str]:
    """Return the sorted names of the image files in a folder; hidden files (.DS_Store, ._x.jpg) are left out.

    Raises:
        DataError: if it cannot be listed, or holds folders and no image.
    """
    entries = [entry for entry in _entries(folder, see) if entry.name[0] != "."]
    images = sorted(entry.name for entry in entries if entry.name.lower().endswith(IMAGES))
    if not images and any(entry.is_dir() for entry in entries):
        raise DataError(f"{folder} holds folders and no image: one folder a class is read, without inner ones; {see}")
    return images


def held_out(files: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    """Decide for each path, by itself, whether it is held out for validation: bool [N].

    A hash of seed and path, so that an image stays on its side when others come or go.
    """
    words = (sha256(b"%d %s" % (seed, file)).digest()[:8] for file in files)
    return np.array([int.from_bytes(word, "big") < fraction * 2**64 for word in words], bool)


def check_fraction(val_fraction: float) -> None:
    """Raise a `ConfigError` unless the share to hold out is in (0, 1)."""
    if not 0 < val_fraction < 1:
        raise ConfigError(f"data.val_fraction {val_fraction} is not in (0, 1)")


def log_split(what: str, split: str, table: Table) -> None:
    """Log the counts of a split, and the classes without a positive: their accuracy or AP says nothing."""
    log.info("%s %s: %s images, %d classes", what, split, f"{len(table):,}", len(table.classes))
    empty = np.flatnonzero(table.labels.counts() == 0)
    if len(empty) and len(table):
        some = ", ".join(repr(table.classes[column]) for column in empty[:3]) + (", ..." if len(empty) > 3 else "")
        log.warning("%s %s: %d of %d classes have no image: %s", what, split, len(empty), len(table.classes), some)


def _entries(folder: Path, see: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}); {see}") from error


def _read_split(
    root: Path, split: str, *, names: tuple[str, ...] | None, names_from: str, cache_dir: str | None
) -> tuple[Path, Table]:
    known = names or _names(root / names_from)
    table = read_folders(root / split, known, known, cache_dir=cache_dir, see=_SEE)
    log_split("folders", split, table)
    return root / split, table


def _read_part(
    root: Path,
    split: str,
    *,
    val: str,
    names: tuple[str, ...] | None,
    fraction: float,
    seed: int,
    cache_dir: str | None,
) -> tuple[Path, Table]:
    known = names or _names(root)
    table = read_folders(root, known, known, cache_dir=cache_dir, see=_SEE)
    held = held_out(table.files.tolist(), fraction, seed)
    table = table.select(held if split == val else ~held)
    log_split("folders", split, table)
    return root, table


def _names(folder: Path) -> tuple[str, ...]:
    names = class_folders(folder, _SEE)
    if not names:
        raise DataError(f"{folder} holds no folder of a class; {_SEE}")
    return check_names(names, folder, _SEE)
