"""Perceptual hashes equal those of imagehash."""

import numpy as np
import pytest
from PIL import Image

from mldec.data.similar import perceptual_hash

imagehash = pytest.importorskip("imagehash", reason="not a requirement")


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "RGBA", "CMYK"])
def test_hashes_equal_imagehash(mode):
    rng = np.random.default_rng(0)
    for _ in range(20):
        height, width = rng.integers(1, 120, 2)
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)
        smooth = image.resize((200, 100), Image.Resampling.BILINEAR)
        for each in (image, smooth):
            assert perceptual_hash(each) == int(str(imagehash.phash(each)), 16)
