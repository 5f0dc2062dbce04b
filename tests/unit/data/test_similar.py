"""Perceptual hashes of images."""

import numpy as np
import pytest
from PIL import Image

from mldec.data.similar import perceptual_hash, similar_groups


def noise(height, width, seed):
    """Return a smooth random image."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


# Computed with imagehash.phash, version 4.3.2.
@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (noise(48, 64, 0), 0xFC9848E313C4AE3B),
        (noise(300, 200, 1), 0x8CE3D8B83ACBC534),
        (noise(20, 20, 2).convert("L"), 0xFC6C8D47DB2420DA),
        (Image.linear_gradient("L"), 0x8000800080008000),
        (Image.new("RGB", (50, 30), "red"), 0x8000000000000000),
    ],
)
def test_hashes_equal_known_values(image, expected):
    assert perceptual_hash(image) == expected


def test_groups_are_connected_by_similar_images_and_pairs():
    hashes = np.array([0, 2**10 - 1, 2**20 - 1, 2**64 - 1, 2**63, 0xAAAAAAAAAAAAAAAA], np.uint64)
    files = np.array([b"c", b"b", b"a", b"d", b"e", b"f"])
    pairs = np.array([[3], [5]])
    # Neighbors differ in 10 bits, and the first one and the last but one in 1 bit.
    assert similar_groups(hashes, files, pairs).tolist() == [b"a", b"a", b"a", b"d", b"a", b"d"]
