"""The settings that all readers share: images, files, sampling and folds."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mldec.data.cache import TableCache
from mldec.data.images import check_decoder
from mldec.data.table import Labels, Table, path_hash
from mldec.data.tasks import Task
from mldec.data.transforms import EvalTransform, TrainTransform, Transform
from mldec.data.types import (
    SHUFFLED,
    Classes,
    DataModule,
    ImageFiles,
    LabelledImages,
    Sampling,
    Split,
    StoredImages,
)
from mldec.errors import ConfigError, DataError

# With these values a training image is the same in every epoch.
NO_AUGMENTATION = {"augment": "none", "cutout": 0.0, "flip": False, "crop": 1.0, "erase": 0.0}


@dataclass(frozen=True, kw_only=True)
class View:
    """The image settings of a `data` node, which are the same for every reader of image files.

    The defaults are those of the official COCO recipe. The option files under `configs/data` set
    other values where these are usual for a data set.

    Attributes:
        image_size: side of the square input in pixels.
        augment: "official", "randaugment", "none", or a RandAugment of timm such as
            "rand-m7-mstd0.5-inc1"; see `TrainTransform`, also for the next five settings.
        cutout: side of the covered rectangle as a fraction of the image side, in [0, 1]; 0 turns it
            off.
        flip: mirror half of the training images left to right.
        crop: smallest area of a random crop as a fraction of the image, in (0, 1]; 1 turns it off.
        interpolation: of the training images: "bilinear", "bicubic", or "random": one of the two
            for each image.
        erase: probability in [0, 1] that a rectangle of a training image is erased.
        test_crop: side of the evaluated centre as a fraction of the image's shorter side, from 0.1
            to 1; None resizes the whole image, as the official code does.
        test_size: side of the evaluated square in pixels; None is `image_size`.
        test_interpolation: "bilinear" or "bicubic"; None is `interpolation`, and bicubic where that
            is "random".
        decoder: of image files, "pillow" or "torchcodec"; see `EvalTransform`, also for the next.
        resize: "pillow" or "tensor", in training and evaluation.

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


def hold_out_stratified(table: Table, fraction: float, seed: int, *, val: bool) -> Table:
    """Return the images that are held out for validation, or the others; see `stratified`.

    The same images with the same labels are divided in the same way, in whatever order they are
    listed. Other than with `held_out`, an image may change its split when others are added.
    """
    hashes = np.array([path_hash(file, seed) for file in table.files.tolist()], np.uint64)
    is_held_out = stratified(table.labels, np.argsort(hashes, kind="stable"), fraction)
    return table.select(is_held_out if val else ~is_held_out)


def stratified(labels: Labels, order: np.ndarray, fraction: float) -> np.ndarray:
    """Return which images are held out, bool [N].

    The paper breaks ties at random. Here the first of several equally rare classes is dealt out
    first, its images in a given order, and an image for which the splits are equal is not held out.

    Args:
        labels: of N images; only the value 1 (present) counts.
        order: a permutation of the N images, int [N].
        fraction: share of the images to hold out, in (0, 1).
    """
    positives = _positives(labels)
    images_of_class = _images_of_classes(labels, order)
    shares = np.array([1 - fraction, fraction])

    # How many images, and how many positives of each class, each split still wants: [2] and [2, K].
    wanted_images = len(labels) * shares
    wanted = shares[:, None] * labels.counts()

    split_of_images = np.full(len(labels), -1, np.int8)
    num_left = labels.counts()

    def assign(image: int, split: int) -> None:
        split_of_images[image] = split
        wanted_images[split] -= 1
        wanted[split, positives[image]] -= 1
        num_left[positives[image]] -= 1

    # The rarest class first: the images of common classes can balance the splits later.
    while num_left.any():
        rarest = int(np.where(num_left > 0, num_left, len(labels) + 1).argmin())
        for image in images_of_class[rarest]:
            if split_of_images[image] < 0:
                train, val = wanted[:, rarest]
                if train == val:
                    train, val = wanted_images
                assign(image, int(val > train))

    # Images without a positive fill the splits up.
    for image in order[split_of_images[order] < 0]:
        train, val = wanted_images
        assign(image, int(val > train))

    return split_of_images == 1


def _positives(labels: Labels) -> list[np.ndarray]:
    """Return the classes that are present in each image: N arrays."""
    ends = np.cumsum(labels.counts_per_image())[:-1]
    return np.split(labels.classes[labels.values == 1], ends)


def _images_of_classes(labels: Labels, order: np.ndarray) -> list[np.ndarray]:
    """Return the images in which each class is present, in the given order: K arrays."""
    ordered = labels.select(order)
    images = np.repeat(order, ordered.counts_per_image())
    classes = ordered.classes[ordered.values == 1]

    by_class = np.argsort(classes, kind="stable")
    ends = np.cumsum(labels.counts())[:-1]
    return np.split(images[by_class], ends)


@dataclass(frozen=True, kw_only=True)
class Folds:
    """The fold of a `data` node, which every reader of image files has.

    Attributes:
        fold: "i/N": the training images are divided into N folds, of which fold i, from 1 to N, is
            the validation split of the run, and the others are trained on. The validation split of
            the data set is not read. None uses both splits as they are.

    Raises:
        ValueError: for another form, or a number out of its range.
    """

    fold: str | None = None

    def __post_init__(self) -> None:
        if self.fold is not None:
            parse_fold(self.fold)

    def held_out(self, keys: np.ndarray) -> np.ndarray:
        """Return which training images the fold holds out, bool [M]; none without a fold.

        Args:
            keys: what identifies each image, [M, ...], see `Storage.keys`.
        """
        if self.fold is None:
            return np.zeros(len(keys), bool)

        number, count = parse_fold(self.fold)
        return fold_numbers(keys, count) == number


# Both splits as they are.
UNDIVIDED = Folds()


def parse_fold(fold: str) -> tuple[int, int]:
    """Return i and N of "i/N".

    Raises:
        ValueError: unless 1 <= i <= N and N is at least 2.
    """
    form = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", fold)
    number, count = map(int, form.groups()) if form else (0, 0)
    if not 1 <= number <= count or count < 2:
        raise ValueError(
            f"fold is {fold!r}: it must be i/N, fold i of N from 1 to N, N at least 2, such as 1/5"
        )
    return number, count


def fold_numbers(keys: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Return the fold of each image, int64 [M] from 1 to `count`.

    A hash of its key decides on an image, so that it stays in its fold whatever the order is and
    whichever images are added or removed.

    Args:
        keys: what identifies each image, [M, ...], see `Storage.keys`.
        count: the number of folds.
        seed: of the hash; the images of one fold are spread evenly by another seed.
    """
    is_text = keys.dtype.kind == "S"
    texts = keys.tolist() if is_text else [key.tobytes() for key in keys]

    # The remainder, as the images may be those that `hold_out` left: their hashes have the same
    # seed, and only the highest of them remain.
    remainders = (path_hash(text, seed) % count for text in texts)
    return 1 + np.fromiter(remainders, np.int64, len(texts))


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
