"""Table of the valid images of a dataset, without copies and with groups of near-duplicates."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mldec.data.labels import Labels
from mldec.data.readers.tables import to_csv
from mldec.data.similar import similar_groups
from mldec.data.splits import group_pairs
from mldec.data.table import Table
from mldec.data.types import DataModule, ImageFiles, StoredImages, same_images
from mldec.errors import ConfigError, DataError, say
from mldec.files.atomic import write_texts
from mldec.tools.check_data.examine import ImageCheck


def united(data: DataModule) -> StoredImages:
    """Concatenate the images of train and val, with paths relative to their common folder.

    Raises ConfigError if both splits have the same images, if the data has no image files, or if
    the labels of the splits cannot be combined.
    """
    if same_images(data.train, data.val):
        fault = "the validation images are the training images"
        raise ConfigError(f"--write: {fault}; pass data.val_fraction=0.1")
    parts = []
    for split in (data.train, data.val):
        images = split.dataset
        if not isinstance(images, StoredImages) or not isinstance(images.storage, ImageFiles):
            raise ConfigError("--write: the data has no image files; omit it")
        parts.append(images)
    train, val = parts
    labels = train.labels
    if train.classes != val.classes or labels.default != val.labels.default:
        fault = "train and val have different classes, or different labels of unlisted classes"
        raise ConfigError(f"--write: {fault}; omit it, or omit data.missing and data.unobserved")

    folders = [images.storage.folder for images in parts]  # type: ignore[attr-defined]
    common = Path(os.path.commonpath(folders))
    files = []
    groups = []
    for images, folder in zip(parts, folders, strict=True):
        prefix = os.fsencode(folder.relative_to(common).as_posix() + "/").removeprefix(b"./")
        paths = np.char.add(prefix, images.storage.keys)
        files.append(paths)
        # Images without a group have their path as the name of the group, which changes with it.
        if images.groups is not None:
            is_single = images.groups == images.storage.keys
            paths = np.where(is_single, paths, images.groups)
        groups.append(paths)

    joined = Labels(
        np.concatenate([labels.starts[:-1], labels.starts[-1] + val.labels.starts]),
        np.concatenate([labels.classes, val.labels.classes]),
        np.concatenate([labels.values, val.labels.values]),
        labels.num_classes,
        labels.default,
    )
    storage = ImageFiles(common, np.concatenate(files))
    stored = StoredImages(storage, joined, train.classes, groups=np.concatenate(groups))
    return replace(stored, is_divided=train.is_divided)


def write_table(
    target: str, data: DataModule, checked: Mapping[str, ImageCheck], hashes: np.ndarray
) -> None:
    """Write a table for `csv_table` without unreadable images and copies, with a column `group`.

    Near-duplicates are in the same group, and existing groups are kept. Of several identical files,
    the first file in val is kept, or else the first file in train, so that the validation split
    stays complete. The table has no splits if `HoldOut` or `data.fold` made them, so that a
    training with the table holds out whole groups.

    `checked` has the results for all images of each split, by its name. `hashes` are the perceptual
    hashes of the images of train and then of val, uint64 [N]. Raises DataError if a split has
    invalid labels.
    """
    # Splits with invalid labels have no results.
    if len(checked) < 2:
        raise DataError("--write: there are invalid labels, see the lines above; correct them")
    train = checked["train"]
    val = checked["val"]
    num_train = len(train.hashes)

    # `np.unique` returns the first image with each hash of the file, in the order val, train.
    val_first = np.roll(np.arange(len(hashes)), -num_train)
    file_hashes = np.concatenate([val.hashes, train.hashes])
    originals = val_first[np.unique(file_hashes, return_index=True)[1]]
    bad = [*train.errors, *(num_train + index for index in val.errors)]
    kept = np.setdiff1d(originals, bad)

    images = united(data).select(kept)
    assert images.groups is not None
    files = images.storage.keys
    groups = similar_groups(hashes[kept], files, group_pairs(images.groups))
    table = Table(files, images.labels, images.classes, groups)
    splits = np.where(kept < num_train, "train", "val")
    if images.is_divided or data.sampling.fold is not None:
        splits = np.full(len(kept), "")
    write_texts(target, [to_csv(table, splits)])

    sizes = np.unique(groups, return_counts=True)[1]
    settings = [f"data.root={images.storage.folder}", f"data.file={Path(target).absolute()}"]  # type: ignore[attr-defined]
    settings += ["data.exclusive=true"] if data.train.classes.exclusive else []
    say(
        f"{target}: {len(kept):,} images without {len(bad):,} unreadable images and "
        f"{len(hashes) - len(originals):,} copies; {sizes[sizes > 1].sum():,} images are in "
        f"{(sizes > 1).sum():,} groups, the largest has {sizes.max():,}; train with "
        f"data=csv {shlex.join(settings)}"
    )
