"""Hold out images so that each class has the same share of its positives in both splits.

The iterative stratification of Sechidis, Tsoumakas and Vlahavas, On the Stratification of
Multi-Label Data (ECML PKDD 2011), Algorithm 1, with two subsets.
"""

import numpy as np

from mldec.data.labels import Labels
from mldec.data.table import Table, path_hash


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
