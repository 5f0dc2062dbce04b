"""Near-duplicates: similar perceptual hashes, such as edited copies, and bursts of a camera."""

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mldec.data.cache import cached_per_file, compute_in_threads, stamp
from mldec.data.images import read_image
from mldec.data.splits import path_hash
from mldec.data.types import ImageFiles, StoredImages
from mldec.errors import ConfigError, DataError

# Maximum Hamming distance between the 64-bit hashes of similar images. Of 3,576 VOC photos, 4 of
# 6.4 million pairs are that similar. The limit finds at least 96 % of the copies that were resized,
# compressed, brightened, shifted by 2 %, rotated by 2 degrees or cropped by 3 %, and 62 % of the
# copies that were cropped by 10 %.
MAX_BITS = 10

SIDE = 64  # JPEG files are decoded at a lower resolution, as long as both sides have 64 pixels

BLOCK = 64  # images that are compared with all others at a time


def check_installed(setting: str) -> None:
    """Raise ConfigError if imagehash is missing. `setting` starts the message."""
    if importlib.util.find_spec("imagehash") is None:
        raise ConfigError(f"{setting}: imagehash is missing; run pip install -e '.[photos]'")


def perceptual_hashes(images: StoredImages, cache_dir: str | None) -> np.ndarray:
    """Return the perceptual hashes (pHash) of N images, uint64 [N].

    Hashes of image files are cached. Unreadable images have a hash of their path.
    """
    names = [images.name(index) for index in range(len(images))]
    indices = {name: index for index, name in enumerate(names)}

    def compute(name: str) -> int:
        import imagehash

        try:
            image = read_image(name, images.storage.content(indices[name]), draft=SIDE)
        except DataError:
            return path_hash(name.encode(errors="surrogateescape"), 0)
        return int(str(imagehash.phash(image)), 16)

    if isinstance(images.storage, ImageFiles):
        stamps = {name: stamp(Path(name)) for name in names}
        folder = images.storage.folder
        values = cached_per_file("hashes 1", folder, stamps, compute, cache_dir)
    else:
        values = dict(compute_in_threads(names, compute, "read hashes"))
    return np.array([values[name] for name in names], np.uint64)


def similar_pairs(hashes: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the similar pairs of hashes [N] and other hashes [M], int64 [P] each.

    All pairs are compared: 100,000 by 100,000 take 15 seconds.
    """
    rows = []
    columns = []
    for start in range(0, len(hashes), BLOCK):
        block = hashes[start : start + BLOCK, None]
        row, column = np.nonzero(np.bitwise_count(block ^ others) <= MAX_BITS)
        rows.append(row + start)
        columns.append(column)
    return np.concatenate(rows), np.concatenate(columns)


def burst_pairs(taken: Sequence[Any], seconds: float) -> np.ndarray:
    """Return the index pairs of consecutive images of a camera, int64 [2, P].

    Args:
        taken: Camera model and capture time in seconds of each image, or None.
        seconds: Maximum time between two images of a pair. There are no pairs for 0.
    """
    known = sorted((*place, index) for index, place in enumerate(taken) if place is not None)
    pairs = []
    for (camera, time, index), (next_camera, next_time, next_index) in pairwise(known):
        if camera == next_camera and next_time - time <= seconds and seconds > 0:
            pairs.append((index, next_index))
    return np.array(pairs, np.int64).reshape(-1, 2).T


def similar_groups(
    images: StoredImages, taken: Sequence[Any], seconds: float, cache_dir: str | None
) -> np.ndarray:
    """Return the group of each image, int32 [N]. Similar images and bursts are in the same group.

    See `perceptual_hashes` and `burst_pairs` for the arguments.
    """
    hashes = perceptual_hashes(images, cache_dir)
    bursts = burst_pairs(taken, seconds)
    pairs = np.concatenate([similar_pairs(hashes, hashes), bursts], axis=1)
    count = len(hashes)
    links = coo_array((np.ones(pairs.shape[1], bool), tuple(pairs)), shape=(count, count))
    _, groups = connected_components(links, directed=False)
    return groups
