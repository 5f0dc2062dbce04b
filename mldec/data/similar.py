"""Near-duplicates: similar perceptual hashes, such as edited copies, and bursts of a camera."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mldec.data.cache import cached_per_file, compute_in_threads, stamp
from mldec.data.images import read_image
from mldec.data.splits import connect, path_hash
from mldec.data.types import ImageFiles, StoredImages
from mldec.errors import DataError

# Maximum Hamming distance between the 64-bit hashes of similar images. Of 3,576 VOC photos, 4 of
# 6.4 million pairs are that similar. The limit finds at least 96 % of the copies that were resized,
# compressed, brightened, shifted by 2 %, rotated by 2 degrees or cropped by 3 %, and 62 % of the
# copies that were cropped by 10 %.
MAX_BITS = 10

SIDE = 64  # JPEG files are decoded at a lower resolution, as long as both sides have 64 pixels

BLOCK = 64  # images that are compared with all others at a time


def perceptual_hash(image: Image.Image) -> int:
    """Return the 64-bit pHash of an image: the signs of its 8 x 8 lowest frequencies.

    The signs are relative to the median of a DCT of the gray image at 32 x 32 pixels. The first
    frequency is the highest bit. The hash equals that of `imagehash.phash`.

    Source: https://www.hackerfactor.com/blog/index.php?/archives/432-Looks-Like-It.html
    """
    from scipy.fft import dct  # slow import, only needed for near-duplicates

    # The size and the filter are those of `imagehash`, because other ones give other hashes.
    gray = image.convert("L").resize((32, 32), Image.Resampling.LANCZOS)
    frequencies = dct(dct(np.asarray(gray, np.float64), axis=0), axis=1)[:8, :8]
    bits = np.packbits(frequencies > np.median(frequencies))
    return int.from_bytes(bits.tobytes(), "big")


def perceptual_hashes(images: StoredImages, cache_dir: str | None) -> np.ndarray:
    """Return the perceptual hashes (pHash) of N images, uint64 [N].

    Hashes of image files are cached. Unreadable images have a hash of their path.
    """
    names = [images.name(index) for index in range(len(images))]
    indices = {name: index for index, name in enumerate(names)}

    def compute(name: str) -> int:
        try:
            image = read_image(name, images.storage.content(indices[name]), draft=SIDE)
        except DataError:
            return path_hash(name.encode(errors="surrogateescape"), 0)
        return perceptual_hash(image)

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
        # A matrix of all pairs would take gigabytes for 100,000 images.
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
    # Sorting by camera and time puts the images of a burst next to each other.
    known = sorted((*place, index) for index, place in enumerate(taken) if place is not None)
    pairs = []
    for (camera, time, index), (next_camera, next_time, next_index) in pairwise(known):
        if camera == next_camera and next_time - time <= seconds and seconds > 0:
            pairs.append((index, next_index))
    return np.array(pairs, np.int64).reshape(-1, 2).T


def similar_groups(hashes: np.ndarray, files: np.ndarray, more_pairs: np.ndarray) -> np.ndarray:
    """Return the groups of N images, bytes [N]; see `Table`. Similar images are in a group.

    Args:
        hashes: Hashes of the images, see `perceptual_hashes`.
        files: Paths of the images, bytes [N]. The name of a group is its first path.
        more_pairs: Other pairs of images in the same group, int64 [2, P].
    """
    return connect(files, np.concatenate([similar_pairs(hashes, hashes), more_pairs], axis=1))
