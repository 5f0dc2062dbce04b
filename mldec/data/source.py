"""Result of a reader, and its conversion to a data module."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from mldec.data.observed import ALL_OBSERVED, Observed
from mldec.data.sampling import SHUFFLED, Sampling, parse_fold
from mldec.data.splits import Grouping, fold_numbers
from mldec.data.tasks import MakeEvaluator, ZeroShot
from mldec.data.transforms import TrainTransform, View
from mldec.data.types import Classes, DataModule, ImageFiles, Split, StoredImages
from mldec.errors import ConfigError, DataError, documented, log
from mldec.files.text import expand_user, read_lines
from mldec.names import indices_of
from mldec.words.types import VectorOrigin


@dataclass(frozen=True, kw_only=True)
class FileSettings(Grouping):
    """File settings of a `data` node, shared by all readers of image files."""

    # Handling of unreadable images. "skip" omits, logs and counts them.
    bad_images: Literal["stop", "skip"] = "stop"

    # Handling of missing files. "unchecked" saves a minute for millions of files.
    absent: Literal["stop", "skip", "unchecked"] = "stop"

    cache_dir: str | None = None  # cache folder; None: $XDG_CACHE_HOME/mldec or ~/.cache/mldec


@dataclass(frozen=True, kw_only=True)
class Source:
    """Result of a reader: the location of the images and the meaning of their labels."""

    # Maps the name of a split and the cache folder, see `cache_folder`, to images and labels. It is
    # called when the split is first used.
    load: Callable[[str, str | None], StoredImages]
    load_train: Callable[[str, str | None], StoredImages] | None = None  # overrides it in training

    train: str = "train"  # name of the training split
    val: str = "val"  # name of the validation split
    where: Path  # folder or file of the dataset, for messages

    evaluator: MakeEvaluator  # such as `multi_label(threshold)`
    exclusive: bool = False  # whether each image has exactly one label
    zero_shot: ZeroShot | None = None  # if set, both splits have different classes

    # Maps the names of the K classes to word vectors [K, D] and their origin.
    vectors: Callable[[tuple[str, ...]], tuple[Tensor, VectorOrigin | None]] | None = None

    folder_setting: str | None = None  # key of the image folder, such as "data.images"


def assemble(
    source: Source,
    view: View,
    files: FileSettings,
    sampling: Sampling = SHUFFLED,
    observed: Observed = ALL_OBSERVED,
    docs: str = "",
) -> DataModule:
    """Return the data module of a source. Raises ConfigError if a setting does not fit the task.

    A split is validated on first use: it has images, the files exist, and both splits have the same
    classes. `docs` is the documentation of the dataset for messages, see `documented`.
    """
    zero_shot = source.zero_shot
    if observed.given and (source.exclusive or zero_shot):
        raise ConfigError(f"data.{observed.given[0]} is for multi-label data; leave it out")
    if sampling.fold is not None and zero_shot:
        raise ConfigError("data.fold: zero-shot data has no folds; leave it out")
    eval_transform = view.eval()

    # A fold is taken from the training images, with the label rules of validation.
    val = source.val if sampling.fold is None else source.train

    # Every split needs its groups: a fold must not divide them, and heads in closed form leave them
    # out as a whole.
    def with_groups(images: StoredImages) -> StoredImages:
        return replace(images, groups=files.find_groups(images.storage.keys, images.groups))

    @cache
    @documented(docs)
    def load_val() -> Split:
        images = with_groups(source.load(val, files.cache_dir))
        if sampling.fold is not None:
            images = _select_listed(images, sampling.train_list)
            images = _select_fold(source, images, sampling.fold, held_out=True)
        if zero_shot is None:
            vectors = source.vectors(images.classes) if source.vectors else ()
            classes = Classes(images.classes, source.exclusive, *vectors)
        else:
            images, classes = zero_shot.validation(images)
        # With a single exclusive class, every metric would be 100 percent.
        if len(classes) < 1 + classes.exclusive:
            names = ", ".join(classes.names) or "none"
            raise DataError(f"{source.where}: too few classes ({names}); add images of others")

        # Validate the evaluator settings at the start, not after an epoch.
        source.evaluator(classes)
        images = _without_absent(source, val, images, files.absent)
        _log_groups(source.val, images)
        return Split(replace(images, transform=eval_transform), classes, images.groups)

    @documented(docs)
    def load_train() -> Split:
        load = source.load_train or source.load
        images = with_groups(load(source.train, files.cache_dir))
        images = _select_listed(images, sampling.train_list)
        images = observed.apply(images, source.train)
        if sampling.fold is not None:
            images = _select_fold(source, images, sampling.fold, held_out=False)

        # Column c of the targets must be the same class in training and evaluation.
        classes = load_val().classes
        if images.classes != classes.names:
            only = sorted(set(images.classes) ^ set(classes.names))
            if only:
                counts = f"train ({len(images.classes)}) and val ({len(classes.names)})"
                fault = f"the classes of {counts} differ: {only[0]!r} is in one only"
                raise DataError(f"{source.where}: {fault}; correct one")
            # The files of both splits may list the same classes in different orders.
            columns = indices_of(images.classes)
            images = images.select_classes([columns[name] for name in classes.names])
        if zero_shot is not None:
            images, classes = zero_shot.training(images)
        images = _without_absent(source, source.train, images, files.absent)
        _log_groups(source.train, images)
        return Split(replace(images, transform=TrainTransform(view)), classes, images.groups)

    return DataModule(
        load_train,
        load_val,
        source.evaluator,
        eval_transform,
        bad_images=files.bad_images,
        sampling=sampling,
    )


def _select_listed(images: StoredImages, train_list: str | None) -> StoredImages:
    """Return the training images of a list, see `Sampling.train_list`, or all without a list."""
    if train_list is None:
        return images

    path = expand_user(train_list)
    # Lists of COCO-MLT have numbers without the leading zeros of the file names.
    ids = [Path(images.name(index)).stem.lstrip("0") for index in range(len(images))]
    listed = {Path(line).stem.lstrip("0") for line in read_lines(path)}
    unknown = listed.difference(ids)
    if unknown:
        fault = f"{len(unknown):,} listed images are not in the training split"
        raise DataError(f"{path}: {fault}, such as {min(unknown)}; set data.train or correct it")

    log.info(f"{path}: {len(listed):,} of {len(images):,} training images are listed")
    return images.select(np.isin(ids, list(listed)))


def _select_fold(
    source: Source, images: StoredImages, fold: str, *, held_out: bool
) -> StoredImages:
    number, count = parse_fold(fold)
    # A group has one key, so that it is in one fold as a whole.
    keys = images.storage.keys if images.groups is None else images.groups
    is_held_out = fold_numbers(keys, count) == number
    part = images.select(is_held_out == held_out)
    if not len(part):
        split = "validation" if held_out else "training"
        fault = f"data.fold={fold} leaves no {split} image of {len(images):,}"
        raise DataError(f"{source.where}: {fault}; choose fewer folds")
    return part


def _log_groups(split: str, images: StoredImages) -> None:
    if images.groups is not None:
        _, sizes = np.unique(images.groups, return_counts=True)
        counts = f"{len(images):,} images are in {len(sizes):,} groups"
        log.info(f"{split}: {counts}; the largest has {sizes.max():,}")


def _without_absent(source: Source, split: str, images: StoredImages, absent: str) -> StoredImages:
    """Return the existing images of a split. `absent` is the setting of `FileSettings`."""
    if not len(images):
        fix = "change data.val_fraction" if images.is_divided else "check the name of the split"
        raise DataError(f"{source.where}: {split} has no image; {fix}")
    storage = images.storage
    if absent == "unchecked" or not isinstance(storage, ImageFiles):
        return images

    is_absent = storage.absent()
    if is_absent.any():
        storage = storage.located(is_absent)
        images = replace(images, storage=storage)
        is_absent = storage.absent()
    count = int(is_absent.sum())
    if not count:
        return images

    summary = f"{source.where}: {count:,} of {len(images):,} listed images are absent"
    # A split without any image is an error, even if missing images may be skipped.
    if absent == "skip" and count < len(images):
        log.warning(f"{summary} and left out")
        return images.select(~is_absent)

    # Lists often contain file names without their folder. All files are absent then.
    advice = "restore them, or pass data.absent=skip"
    if 2 * count > len(images) and source.folder_setting is not None:
        advice = f"set {source.folder_setting} to the folder that the paths are relative to"
    raise DataError(f"{summary}, the first is {images.name(int(is_absent.argmax()))}; {advice}")
