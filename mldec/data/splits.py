"""Validation splits and cross-validation folds."""

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.labels import Labels, from_statements
from mldec.data.types import StoredImages
from mldec.errors import ConfigError, DataError, log
from mldec.names import format_list

# Common names of splits, and their meaning.
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}
SPLITS |= {"dev": "val", "test": "test", "testing": "test"}


def find_split(wanted: str, present: Collection[str]) -> str:
    """Return the name of a split as it is written in the data, or `wanted` if it is absent.

    Case is ignored. Names such as val and valid are equivalent, unless the data has both.
    """
    if wanted in present:
        return wanted
    lower = wanted.strip().lower()
    same = [name for name in present if name.lower() == lower]
    if not same and lower in SPLITS:
        same = [name for name in present if SPLITS.get(name.lower()) == SPLITS[lower]]
    return same[0] if len(same) == 1 else wanted


def check_val(val: str, present: Collection[str], where: Path) -> None:
    """Raise DataError if the validation split is absent. The hint is another common name of it."""
    for meaning in ("val", "test"):
        others = sorted(name for name in present if SPLITS.get(name.lower()) == meaning)
        if val not in present and others:
            raise DataError(f"{where}: there is no split {val!r}; pass data.val={others[0]}")
    if val not in present:
        names = format_list(sorted(filter(None, present)))
        raise DataError(f"{where}: there is no split {val!r} among {names}; pass data.val=NAME")


def log_split(what: str, split: str, images: StoredImages) -> StoredImages:
    """Log the size of a split, warn about classes without a positive image, and return it."""
    log.info(f"{what} {split}: {len(images):,} images, {len(images.classes)} classes")
    empty = np.flatnonzero(images.labels.counts() == 0)
    if len(empty) and len(images):
        names = format_list([repr(images.classes[column]) for column in empty])
        counts = f"{len(empty)} of {len(images.classes)} classes have no image"
        log.warning(f"{what} {split}: {counts}: {names}")
    return images


def path_hash(file: bytes, seed: int) -> int:
    """Return a uniform 64-bit hash of seed and path, or another key."""
    # Python's own hash of bytes differs between processes.
    digest = sha256(b"%d %s" % (seed, file)).digest()
    return int.from_bytes(digest[:8], "big")


HELD_OUT_FRACTION = 0.1  # default of `HoldOut.val_fraction` for heads that are trained by gradients


def connect(names: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the groups of N images that pairs connect directly or indirectly, int64 [2, P].

    The name of a group is the first of the `names` [N] of its images, in alphabetical order.
    """
    # Import it here, because most data has no groups.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(names)
    # The pairs are the edges of a graph whose connected parts are the groups.
    links = coo_array((np.ones(pairs.shape[1], bool), tuple(pairs)), shape=(count, count))
    _, component = connected_components(links, directed=False)
    order = np.argsort(names, kind="stable")
    _, first = np.unique(component[order], return_index=True)
    return names[order][first][component]


def group_pairs(groups: np.ndarray) -> np.ndarray:
    """Return pairs of images that connect the images of each group, int64 [2, N]."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    # A pair of each image and the first one of its group suffices. All pairs of a group of 10,000
    # frames would take a gigabyte.
    return np.stack([np.arange(len(groups)), first[inverse]])


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Settings of all `data` nodes about images that are never divided between splits and folds."""

    # Regular expression with one group, which is searched in the path of each image inside its
    # folder, such as "(.*)_[0-9]+[.]jpg". Images with the same text belong together, such as the
    # frames of a video. Images that do not match are single.
    group_pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            if re.compile(self.group_pattern or "()").groups != 1:
                raise re.error("it needs one group in parentheses")
        except re.error as error:
            fault = f"group_pattern is {self.group_pattern!r}: {error}"
            raise ValueError(f"{fault}; correct it, and write other groups as (?:...)") from error

    def find_groups(self, files: np.ndarray, groups: np.ndarray | None) -> np.ndarray | None:
        """Return the groups of some images by the pattern, joined with known groups.

        `files` are their paths, bytes [N]. For the groups see `Table`.
        """
        if self.group_pattern is None:
            return groups
        if files.dtype.kind != "S":
            raise ConfigError("data.group_pattern: the images have no paths; remove it")
        names = []
        for file in files.tolist():
            found = re.search(self.group_pattern, os.fsdecode(file))
            # A group of the pattern may be optional.
            text = found[1] if found else None
            names.append(file if text is None else os.fsencode(text))
        if names == files.tolist():
            fault = f"{self.group_pattern!r} matches none of {len(files):,} paths, such as "
            raise DataError(f"data.group_pattern: {fault}{os.fsdecode(files[0])!r}; correct it")
        by_pattern = np.array(names, np.bytes_)
        if groups is None:
            return by_pattern
        pairs = [group_pairs(groups), group_pairs(by_pattern)]
        return connect(groups, np.concatenate(pairs, axis=1))


@dataclass(frozen=True, kw_only=True)
class HoldOut(Grouping):
    """Settings of a `data` node without a validation split: some images are held out.

    The result does not depend on the order of the images. Groups of images are not divided.
    """

    # Fraction of held-out images, in [0, 1). With 0, all images are used for training, and the same
    # images are the validation split, for leave-one-out metrics of a head that is fitted in closed
    # form. null: 0 for such a head, and 0.1 for other heads.
    val_fraction: float | None = None

    # "stratified" holds out about the same share of positives of each class, see `stratified`, and
    # one of each class with two positives. "hash" uses a hash of the path. An image then keeps its
    # split if other images are added.
    split: Literal["stratified", "hash"] = "stratified"
    seed: int = 0  # seed of the split

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}; it must be in [0, 1)")

    @property
    def fraction(self) -> float:
        """Fraction of held-out images, with its default."""
        return HELD_OUT_FRACTION if self.val_fraction is None else self.val_fraction

    def select(self, images: StoredImages, *, val: bool) -> StoredImages:
        """Return the held-out validation images (`val`) or the training images.

        Each group is assigned as one image with its name as the path and the classes of all.
        """
        images = replace(images, is_divided=True)
        if self.fraction == 0:
            return images
        keys = images.storage.keys
        labels = images.labels
        groups = self.find_groups(keys, images.groups)
        if groups is None:
            return images.select(self._is_held_out(keys, labels) == val)

        names, group = np.unique(groups, return_inverse=True)
        positive = labels.values == 1
        labels_of_groups, _ = from_statements(
            group[labels.images()[positive]],
            labels.classes[positive],
            labels.values[positive],
            num_images=len(names),
            num_classes=labels.num_classes,
            default=0,
        )
        is_held_out = self._is_held_out(names, labels_of_groups)[group]
        if is_held_out.all() or not is_held_out.any():
            fault = f"{len(keys):,} images are in {len(names):,} groups, too few to be divided"
            raise DataError(f"data.val_fraction: {fault}; use smaller groups, or change it")
        return images.select(is_held_out == val)

    def _is_held_out(self, keys: np.ndarray, labels: Labels) -> np.ndarray:
        hashes = np.array([path_hash(key, self.seed) for key in _as_bytes(keys)], np.uint64)
        if self.split == "hash":
            # Compare exactly: a comparison with a float would round the hashes.
            return hashes < np.uint64(math.ceil(self.fraction * 2**64))

        order = np.argsort(hashes, kind="stable")
        is_held_out = stratified(labels, order, self.fraction)
        _hold_out_each_class(labels, order, is_held_out)
        return is_held_out


HELD_OUT = HoldOut()
HELD_OUT_BY_HASH = HoldOut(split="hash")


def _hold_out_each_class(labels: Labels, order: np.ndarray, is_held_out: np.ndarray) -> None:
    # Choose the image that removes the last training positive of as few classes as possible. Ties
    # go to the first image in the order.
    positives = labels.select_entries(labels.values == 1)
    num_held_out = positives.select(is_held_out).counts()
    num_left = positives.counts() - num_held_out
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels))

    def classes_of(image: int) -> np.ndarray:
        return positives.classes[positives.starts[image] : positives.starts[image + 1]]

    def cost(image: int) -> tuple[int, int]:
        return int((num_left[classes_of(image)] == 1).sum()), int(place[image])

    missing = np.flatnonzero((num_held_out == 0) & (num_left >= 2))
    image_of_entry = positives.images()
    for column in missing[np.argsort(num_left[missing], kind="stable")]:
        # An image moved for a rarer class may also show this class.
        if num_held_out[column]:
            continue
        image = min(image_of_entry[positives.classes == column].tolist(), key=cost)
        is_held_out[image] = True
        num_held_out[classes_of(image)] += 1
        num_left[classes_of(image)] -= 1


def stratified(labels: Labels, order: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of held-out images, bool [N], with about the same share of each class.

    Source: Sechidis et al., On the Stratification of Multi-Label Data (ECML 2011), Algorithm 1.
    Ties are broken at random there. Here the first of equally rare classes is assigned first, and
    an image with a tie between the splits is used for training. `order` is the order in which the
    images are assigned, int [N]. `fraction` of the images is held out, in (0, 1).
    """
    ends = np.cumsum(labels.counts_per_image())[:-1]
    classes_of_image = np.split(labels.classes[labels.values == 1], ends)

    # Positive images of each class, in the given order.
    ordered = labels.select(order)
    images = np.repeat(order, ordered.counts_per_image())
    by_class = np.argsort(ordered.classes[ordered.values == 1], kind="stable")
    images_of_class = np.split(images[by_class], np.cumsum(labels.counts())[:-1])

    # Number of images [2] and of positives per class [2, K] that each split still needs.
    shares = np.array([1 - fraction, fraction])
    wanted_images = len(labels) * shares
    wanted = shares[:, None] * labels.counts()

    split_of_images = np.full(len(labels), -1, np.int8)
    num_left = labels.counts()

    def assign(image: int, needs: np.ndarray) -> None:
        """Assign an image to the split with the larger need, or else the larger total need."""
        if needs[0] == needs[1]:
            needs = wanted_images
        split = int(needs[1] > needs[0])
        split_of_images[image] = split
        wanted_images[split] -= 1
        wanted[split, classes_of_image[image]] -= 1
        num_left[classes_of_image[image]] -= 1

    # Start with the rarest class. Images of common classes balance the splits later.
    while num_left.any():
        rarest = int(np.where(num_left > 0, num_left, len(labels) + 1).argmin())
        for image in images_of_class[rarest]:
            if split_of_images[image] < 0:
                assign(image, wanted[:, rarest])

    # Images without a positive fill the splits.
    for image in order[split_of_images[order] < 0]:
        assign(image, wanted_images)

    return split_of_images == 1


def fold_numbers(keys: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Return the fold of each image, int64 [M], from 1 to `count`, by a hash of its key.

    An image keeps its fold if other images are added or removed. Folds of different seeds are
    independent. `keys` are M keys of `Storage.keys`, or groups, which are not divided.
    """
    # Use the remainder, not the size of the hash: `HoldOut` may have removed all images with
    # small hashes of the same seed.
    remainders = (path_hash(key, seed) % count for key in _as_bytes(keys))
    return 1 + np.fromiter(remainders, np.int64, len(keys))


def _as_bytes(keys: np.ndarray) -> list[bytes]:
    is_text = keys.dtype.kind == "S"
    return keys.tolist() if is_text else [key.tobytes() for key in keys]
