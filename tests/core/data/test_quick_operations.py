"""The quick operations have the pixels of Pillow's, whatever the image."""

from collections.abc import Callable

import numpy as np
import pytest
from pictures import picture, pixels
from PIL import Image, ImageFilter

from mldec.data.official_augment import shear_x, shear_y, smoothed

# Of every row of the official augmentation's table, and others.
SLOPES = [sign * row / 30 for row in range(1, 10) for sign in (-1, 1)] + [0.0, 0.77, -0.999]


def pillows(image: Image.Image, slope: float, *, along_rows: bool) -> Image.Image:
    matrix = (1, slope, 0, 0, 1, 0) if along_rows else (1, 0, 0, slope, 1, 0)
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        Image.Resampling.BICUBIC,
        fillcolor=(128, 128, 128),
    )


IMAGES = {
    "picture": picture(97, 65),
    "noise": Image.fromarray(pixels(50, 70, 3)),
    # An interpolated value can be as far beyond 255 as possible.
    "black and white": Image.fromarray(255 * (pixels(40, 130, 3) // 128)),
    "one pixel": Image.fromarray(pixels(1, 1, 3)),
    "narrow": Image.fromarray(pixels(70, 2, 3)),
}
every_image = pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)


@pytest.mark.parametrize(("shear", "along_rows"), [(shear_x, True), (shear_y, False)])
@every_image
def test_a_shear_is_pillows(
    shear: Callable[..., Image.Image], along_rows: bool, image: Image.Image
) -> None:
    before = np.array(image)
    for slope in SLOPES:
        ours = np.asarray(shear(image, slope, 128))
        assert np.array_equal(ours, pillows(image, slope, along_rows=along_rows)), slope
    assert np.array_equal(before, image)


def test_a_shear_of_the_size_of_training_images_is_pillows() -> None:
    image = picture(448, 448)
    for slope in (-0.3, 1 / 30):
        assert np.array_equal(shear_x(image, slope, 128), pillows(image, slope, along_rows=True))
        assert np.array_equal(shear_y(image, slope, 128), pillows(image, slope, along_rows=False))


@every_image
def test_a_smoothed_image_is_pillows(image: Image.Image) -> None:
    before = np.array(image)
    assert np.array_equal(smoothed(image), image.filter(ImageFilter.SMOOTH))
    assert np.array_equal(before, image)


def test_every_sum_of_a_smoothed_image_is_rounded_like_pillows() -> None:
    """Each block of 3 x 3 pixels has another weighted sum: 0 to 13 x 255."""
    blocks = []
    for total in range(13 * 255 + 1):
        mean, rest = divmod(total, 13)
        block = np.full(9, mean, np.uint8)
        if rest >= 5:
            block[4] += 1
            rest -= 5
        block[[0, 1, 2, 3, 5, 6, 7, 8][:rest]] += 1
        blocks.append(block.reshape(3, 3))

    image = Image.fromarray(np.stack([np.hstack(blocks)] * 3, 2))
    assert np.array_equal(smoothed(image), image.filter(ImageFilter.SMOOTH))
