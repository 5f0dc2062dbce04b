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
from mldec.data.types import DataModule, ImageFiles, Split, StoredImages, same_images
from mldec.errors import ConfigError, DataError, say
from mldec.files.atomic import write_texts
from mldec.tools.check_data.examine import ImageCheck


def splits_of(data: DataModule) -> list[Split]:
    """Return train and val, or only train if no images are held out."""
    if same_images(data.train, data.val):
        return [data.train]
    return [data.train, data.val]


def united(data: DataModule) -> StoredImages:
    """Concatenate the images of the splits, with paths relative to their common folder.

    Raises ConfigError if the data has no image files, or if the labels of the splits cannot be
    combined.
    """
    parts = []
    for split in splits_of(data):
        images = split.dataset
        if not isinstance(images, StoredImages) or not isinstance(images.storage, ImageFiles):
            raise ConfigError("--write: the data has no image files; omit it")
        parts.append(images)
    train, last = parts[0], parts[-1]
    if train.classes != last.classes or train.labels.default != last.labels.default:
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

    counts = np.concatenate([np.diff(images.labels.starts) for images in parts])
    joined = Labels(
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate([images.labels.classes for images in parts]),
        np.concatenate([images.labels.values for images in parts]),
        train.labels.num_classes,
        train.labels.default,
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
    stays complete. The table has no splits if no images are held out, or if `HoldOut` or
    `data.fold` did it, so that a training with the table holds out whole groups.

    `checked` has the results for all images of each split, by its name. `hashes` are the perceptual
    hashes of the images of train and then of val, uint64 [N]. Raises DataError if a split has
    invalid labels.
    """
    # Splits with invalid labels have no results.
    names = ["train", "val"][: len(splits_of(data))]
    if not checked.keys() >= set(names):
        raise DataError("--write: there are invalid labels, see the lines above; correct them")
    parts = [checked[name] for name in names]
    num_train = len(parts[0].hashes)
    bad = []
    for start, part in zip((0, num_train), parts, strict=False):
        bad += [start + index for index in part.errors]

    # `np.unique` returns the first image with each hash of the file, in the order val, train.
    val_first = np.roll(np.arange(len(hashes)), -num_train)
    file_hashes = np.concatenate([part.hashes for part in reversed(parts)])
    originals = val_first[np.unique(file_hashes, return_index=True)[1]]
    kept = np.setdiff1d(originals, bad)

    images = united(data).select(kept)
    assert images.groups is not None
    files = images.storage.keys
    groups = similar_groups(hashes[kept], files, group_pairs(images.groups))
    table = Table(files, images.labels, images.classes, groups)
    splits = np.where(kept < num_train, "train", "val")
    if len(parts) == 1 or images.is_divided or data.sampling.fold is not None:
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
