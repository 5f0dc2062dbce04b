"""The settings that all readers share, and how a reader's source becomes a data module."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mldec.data.cache import TableCache
from mldec.data.images import check_decoder
from mldec.data.tasks import Task
from mldec.data.transforms import EvalTransform, TrainTransform, Transform
from mldec.data.types import (
    SHUFFLED,
    Classes,
    DataModule,
    ImageFiles,
    Sampling,
    Split,
    StoredImages,
)
from mldec.errors import ConfigError, DataError

log = logging.getLogger("mldec")

# With these values a training image is the same in every epoch.
NO_AUGMENTATION = {"augment": "none", "cutout": 0.0, "flip": False, "crop": 1.0, "erase": 0.0}


@dataclass(frozen=True, kw_only=True)
class View:
    """The image settings of a `data` node, which are the same for every reader of image files.

    The defaults are those of the official COCO recipe. The option files under `configs/data` set
    other values where these are usual for a data set.

    Attributes:
        image_size: see `TrainTransform`, also for the next six settings.
        test_crop: side of the evaluated centre as a fraction of the image's shorter side, from 0.1
            to 1; None resizes the whole image, as the official code does.
        test_size: side of the evaluated square in pixels; None is `image_size`.
        test_interpolation: "bilinear" or "bicubic"; None is `interpolation`, and bicubic where that
            is "random".
        decoder: see `EvalTransform`, also for the next; both are those of training, too.
        resize: likewise.

    Raises:
        ConfigError: for a value out of its range, or a decoder that is not installed.
    """

    image_size: int = 448
    augment: str = "official"
    cutout: float = 0.5
    flip: bool = False
    crop: float = 1.0
    interpolation: str = "bilinear"
    erase: float = 0.0
    test_crop: float | None = None
    test_size: int | None = None
    test_interpolation: str | None = None
    decoder: str = "pillow"
    resize: str = "pillow"

    def __post_init__(self) -> None:
        # The transforms check the values: a wrong one must fail now, not at the first image.
        self.train()
        self.eval()
        check_decoder(self.decoder)

    def train(self) -> TrainTransform:
        """Return the transform of training images: RGB image -> uint8 [3, S, S]."""
        return TrainTransform(
            image_size=self.image_size,
            augment=self.augment,
            cutout=self.cutout,
            flip=self.flip,
            crop=self.crop,
            interpolation=self.interpolation,
            erase=self.erase,
            decoder=self.decoder,
            resize=self.resize,
        )

    def eval(self) -> EvalTransform:
        """Return the transform of evaluated images: RGB image -> uint8 [3, S, S]."""
        # Evaluation must not draw its interpolation at random.
        interpolation = self.test_interpolation
        if interpolation is None:
            interpolation = "bicubic" if self.interpolation == "random" else self.interpolation

        return EvalTransform(
            image_size=self.image_size if self.test_size is None else self.test_size,
            crop=self.test_crop,
            interpolation=interpolation,
            decoder=self.decoder,
            resize=self.resize,
        )


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
        ConfigError: for an unknown choice; `DataModule` checks `bad_images`.
    """

    bad_images: str = "stop"
    absent: str = "stop"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.absent not in ("stop", "skip", "unchecked"):
            raise ConfigError(
                f"data.absent {self.absent!r} is not known: choose stop, skip or unchecked"
            )


# Maps the name of a split and the cache to images and labels.
LoadSplit = Callable[[str, TableCache], StoredImages]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a reader knows about its data set: where the images are and what their labels mean.

    Attributes:
        load: returns the images of a split, without a transform; called when the split is first
            used, which is when the files of that split are checked.
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

    load: LoadSplit
    train: str
    val: str
    task: Task
    where: Path
    see: str
    load_train: LoadSplit | None = None
    folder_setting: str | None = None


def assemble(
    source: Source, view: View, files: FileSettings, sampling: Sampling = SHUFFLED
) -> DataModule:
    """Return the data module of a source.

    A split is checked when it is first used: it has images, they exist, and its classes are those
    of the other split.
    """
    tables = TableCache(files.cache_dir, source.see)
    eval_transform = view.eval()

    # A fold is a part of the training images, whose labels then mean what those of `val` mean.
    val = source.val if sampling.fold is None else source.train

    @cache
    def load_val() -> Split:
        images = source.load(val, tables)
        if sampling.fold is not None:
            images = _part(source, images, sampling, held_out=True)
        images, classes = source.task.validation(images)

        # Only for its checks: a setting that does not fit the classes must fail at the start, not
        # after an epoch.
        source.task.evaluator(classes)
        return _split(source, val, images, classes, files, eval_transform)

    def load_train() -> Split:
        images = (source.load_train or source.load)(source.train, tables)
        if sampling.fold is not None:
            images = _part(source, images, sampling, held_out=False)

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
    source: Source, images: StoredImages, sampling: Sampling, *, held_out: bool
) -> StoredImages:
    """Return the training images that a fold holds out, or the others."""
    is_held_out = sampling.held_out(images.storage.keys)
    part = images.select(is_held_out if held_out else ~is_held_out)
    if not len(part):
        split = "validate" if held_out else "train"
        raise DataError(
            f"{source.where}: data.fold={sampling.fold} leaves no image to {split}, of "
            f"{len(images):,}: choose fewer folds; {source.see}"
        )

    _, train = source.task.training(part)
    _, val = source.task.validation(part)
    if train.names != val.names:
        raise ConfigError(
            f"data.fold {sampling.fold}: this data is trained on {len(train)} classes and "
            f"evaluated on {len(val)}, as zero-shot data is, so that a part of its training images "
            f"cannot be the validation images; leave it out"
        )
    return part


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
    images: StoredImages,
    classes: Classes,
    files: FileSettings,
    transform: Transform,
) -> Split:
    """Return a split after checking that its images exist."""
    if not len(images):
        raise DataError(f"{source.where}: {name} has no image; {source.see}")
    if files.absent != "unchecked":
        images = _present(source, images, skip=files.absent == "skip")
    return Split(replace(images, transform=transform), classes)


def _present(source: Source, images: StoredImages, *, skip: bool) -> StoredImages:
    """Return the images that exist; raise a `DataError` for the others unless `skip`."""
    absent = images.storage.absent()
    count = int(absent.sum())
    if not count:
        return images

    summary = f"{count:,} of {len(images):,} listed images are absent"
    # A split without any image is of no use, even if images may be skipped.
    if skip and count < len(images):
        log.warning("%s: %s and left out", source.where, summary)
        return images.select(~absent)

    # Lists often hold bare file names.
    first, advice = int(absent.argmax()), ""
    if source.folder_setting is not None and isinstance(images.storage, ImageFiles):
        advice = f"set {source.folder_setting} to the folder that the paths start from; "
        if inner_folder := images.storage.find_inside(first):
            advice = f"it is in {inner_folder}: pass {source.folder_setting}={inner_folder}; "
    raise DataError(
        f"{source.where}: {summary}, the first is {images.name(first)}; {advice}{source.see}"
    )
