"""Assemble a `DataModule` from a source, the image settings and the file settings."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mldec.data.base import Classes, DataModule, LabelledImages, Split, StoredImages
from mldec.data.cache import TableCache
from mldec.data.folds import UNDIVIDED, Folds
from mldec.data.sampling import SHUFFLED, Sampling
from mldec.data.storage.image_files import ImageFiles
from mldec.data.task import Task
from mldec.data.transforms import Transform
from mldec.data.view import View
from mldec.errors import ConfigError, DataError

log = logging.getLogger("mldec")

ABSENT = ("stop", "skip", "unchecked")


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """The file settings of a `data` node, which are the same for every reader of image files.

    Attributes:
        bad_images: what to do with an image that cannot be read: "stop", or "skip": leave it out,
            name it and count it.
        absent: what to do with listed images that do not exist, which is checked at the start:
            "stop"; "skip": leave them out and log their number; or "unchecked": do not check, which
            saves a minute for millions of files.
        cache_dir: folder for parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        ConfigError: for an unknown choice.
    """

    bad_images: str = "stop"
    absent: str = "stop"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        # `DataModule` checks `bad_images`.
        if self.absent not in ABSENT:
            raise ConfigError(
                f"data.absent {self.absent!r} is not known: choose stop, skip or unchecked"
            )


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a reader knows about its data set: where the images are and what their labels mean.

    Attributes:
        load: maps the name of a split and the cache to images and labels; called when the split is
            first used, which is when the files of that split are checked.
        train: name of the split to train on.
        val: name of the split to evaluate on.
        task: what the labels mean.
        where: folder or file of the data set, for messages.
        see: pointer to the documentation, such as "see DATASETS.md, section MS-COCO".
        load_train: like `load`, for a training split whose labels mean something else; None is
            `load`.
        folder_setting: key of the image folder, such as "data.images", for messages; None if there
            is none.
    """

    load: Callable[[str, TableCache], LabelledImages]
    train: str
    val: str
    task: Task
    where: Path
    see: str
    load_train: Callable[[str, TableCache], LabelledImages] | None = None
    folder_setting: str | None = None


def assemble(
    source: Source,
    view: View,
    files: FileSettings,
    sampling: Sampling = SHUFFLED,
    folds: Folds = UNDIVIDED,
) -> DataModule:
    """Return the data module of a source.

    Raises:
        DataError: when a split is first used, if it has no image, an image does not exist, or its
            classes differ from those of the other split.
    """
    tables = TableCache(files.cache_dir, source.see)
    eval_transform = view.eval()

    # A fold is a part of the training images, whose labels then mean what those of `val` mean.
    val = source.val if folds.fold is None else source.train

    @cache
    def load_val() -> Split:
        images = source.load(val, tables)
        if folds.fold is not None:
            images = _part(source, images, folds, held_out=True)
            _check_divisible(source, images, folds)
        images, classes = source.task.validation(images)

        # Only for its checks: a setting that does not fit the classes must fail at the start, not
        # after an epoch.
        source.task.evaluator(classes)
        return _split(source, val, images, classes, files, eval_transform)

    def load_train() -> Split:
        images = (source.load_train or source.load)(source.train, tables)
        if folds.fold is not None:
            images = _part(source, images, folds, held_out=False)

        # Column c of the targets must mean the same class in training and evaluation.
        _check_same_classes(source, train=images.classes, val=load_val().classes.names)
        images, classes = source.task.training(images)
        return _split(source, source.train, images, classes, files, view.train())

    return DataModule(
        load_train,
        load_val,
        source.task.evaluator,
        eval_transform,
        bad_images=files.bad_images,
        sampling=sampling,
    )


def _part(
    source: Source, images: LabelledImages, folds: Folds, *, held_out: bool
) -> LabelledImages:
    """Return the training images that a fold holds out, or the others."""
    is_held_out = folds.held_out(images.storage.keys)
    part = images.select(is_held_out if held_out else ~is_held_out)
    if len(part):
        return part

    split = "validate" if held_out else "train"
    raise DataError(
        f"{source.where}: data.fold={folds.fold} leaves no image to {split}, of {len(images):,}: "
        f"choose fewer folds; {source.see}"
    )


def _check_divisible(source: Source, images: LabelledImages, folds: Folds) -> None:
    """Raise a `ConfigError` if training images cannot stand in for validation images."""
    _, train = source.task.training(images)
    _, val = source.task.validation(images)
    if train.names != val.names:
        raise ConfigError(
            f"data.fold {folds.fold}: this data is trained on {len(train)} classes and evaluated "
            f"on {len(val)}, as zero-shot data is, so that a part of its training images cannot "
            f"be the validation images; leave it out"
        )


def _check_same_classes(source: Source, *, train: tuple[str, ...], val: tuple[str, ...]) -> None:
    """Raise a `DataError` unless both splits have the same classes in the same order."""
    if train == val:
        return

    in_one_only = sorted(set(train) ^ set(val))
    difference = "their order differs"
    if in_one_only:
        difference = f"{in_one_only[0]!r} is in one only"

    raise DataError(
        f"{source.where}: the classes of train ({len(train)}) and val ({len(val)}) differ: "
        f"{difference}; {source.see}"
    )


def _split(
    source: Source,
    name: str,
    images: LabelledImages,
    classes: Classes,
    files: FileSettings,
    transform: Transform,
) -> Split:
    """Return a split after checking that its images exist."""
    if not len(images):
        raise DataError(f"{source.where}: {name} has no image; {source.see}")
    if files.absent != "unchecked":
        images = _present(source, images, skip=files.absent == "skip")
    return Split(StoredImages(images, transform), classes)


def _present(source: Source, images: LabelledImages, *, skip: bool) -> LabelledImages:
    """Return the images that exist; raise a `DataError` for the others unless `skip`."""
    absent = images.storage.absent()
    count = int(absent.sum())
    if not count:
        return images

    summary = f"{count:,} of {len(images):,} listed images are absent"
    # A split without any image is of no use, even if images may be skipped.
    if not skip or count == len(images):
        first = int(absent.argmax())
        advice = _folder_advice(source, images, first)
        raise DataError(
            f"{source.where}: {summary}, the first is {images.storage.name(first)}; "
            f"{advice}{source.see}"
        )

    log.warning("%s: %s and left out", source.where, summary)
    return images.select(~absent)


def _folder_advice(source: Source, images: LabelledImages, index: int) -> str:
    """Return advice on the setting of the image folder: lists often hold bare file names."""
    if source.folder_setting is None or not isinstance(images.storage, ImageFiles):
        return ""

    inner_folder = images.storage.find_inside(index)
    if inner_folder is not None:
        return f"it is in {inner_folder}: pass {source.folder_setting}={inner_folder}; "
    return f"set {source.folder_setting} to the folder that the paths start from; "
