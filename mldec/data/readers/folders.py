"""Your own images in a folder per class."""

from functools import partial
from pathlib import Path

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.class_folders import list_class_folders, read_class_folders
from mldec.data.names import check_names, given_names
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import check_fraction, hold_out, log_split
from mldec.data.task import SingleLabel
from mldec.errors import DataError

_SEE = "see DATASETS.md, section Your own data"


def folders(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    classes: str | list[str] | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    top_k: int | None = None,
) -> Source:
    """Return images with one label each: the name of the folder that they lie in.

    The layout is root/train/CLASS/*.jpg and root/val/CLASS/*.jpg. If `root` has neither of these
    two folders, root/CLASS/*.jpg is split: the same images are held out at every start.

    Args:
        root: the folder.
        train: folder in `root` to learn from.
        val: folder in `root` to evaluate on.
        classes: class names in their order, or a text file with one per line; None takes the sorted
            folder names of `train`.
        val_fraction: share of the images to hold out if `root` has no folders `train` and `val`, in
            (0, 1).
        seed: decides which images are held out.
        top_k: see `SingleLabelEvaluator`.

    Raises:
        DataError: A folder is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    task = SingleLabel(top_k)
    check_fraction(val_fraction)
    folder = check_folder(root, "a folder per class", _SEE)
    names = given_names(classes, folder, _SEE)

    # If only one of the two folders is absent, it was forgotten: splitting `root` would take the
    # other one for a class.
    load = partial(_load_split, folder, names=names, names_from=train)
    if not (folder / train).is_dir() and not (folder / val).is_dir():
        load = partial(_load_part, folder, val=val, names=names, fraction=val_fraction, seed=seed)

    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _load_split(
    root: Path, split: str, cache: TableCache, *, names: tuple[str, ...] | None, names_from: str
) -> LabelledImages:
    """Return the images of a split that has its own folder.

    Args:
        root: folder of the data set.
        split: name of the folder of the split.
        cache: keeps the list of images.
        names: the class names in their order; None takes the folders of `names_from`.
        names_from: the split whose folders are the classes of both splits.
    """
    names = names or _names(root / names_from)
    table = read_class_folders(root / split, names, names, cache)

    log_split("folders", split, table)
    return in_folder(table, root / split, _SEE)


def _load_part(
    root: Path,
    split: str,
    cache: TableCache,
    *,
    val: str,
    names: tuple[str, ...] | None,
    fraction: float,
    seed: int,
) -> LabelledImages:
    """Return the images of a split where both splits share the folders in `root`."""
    names = names or _names(root)
    table = read_class_folders(root, names, names, cache)
    table = hold_out(table, fraction, seed, val=split == val)

    log_split("folders", split, table)
    return in_folder(table, root, _SEE)


def _names(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders as class names.

    Raises:
        DataError: There is no folder, or its name is not a valid class name.
    """
    names = list_class_folders(folder, _SEE)
    if not names:
        raise DataError(f"{folder} holds no folder of a class; {_SEE}")
    return check_names(names, folder, _SEE)
