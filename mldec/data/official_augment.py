"""The official augmentation: two random operations with probability 0.5 each, and cutout.

Source: official train.py, which uses the package `randaugment` 1.0.2. In spite of its name that
package is not RandAugment(N=2, M=9): it draws uniformly from all ordered pairs of 15 operations x 9
magnitudes and applies each of the two with p = 0.5, so that a quarter of the images stay as they
are. This module is written from that description.

Every random choice comes from Python's `random` module, which the loader seeds for every sample.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

PROBABILITY = 0.5  # of each of the two operations
NUM_LEVELS = 10  # rows of the magnitude table; row 0 is never drawn
GREY = (128, 128, 128)  # fills the area that a geometric operation uncovers
PATCH = (125, 122, 113)  # fills the small cutout; about the mean colour of ImageNet

Operation = Callable[[Image.Image, float], Image.Image]


def cutout(image: Image.Image, fraction: float) -> Image.Image:
    """Cover one rectangle with a random colour and return a new image.

    The rectangle measures `fraction` of the width by `fraction` of the height. Its centre
    is uniform over the image, and the part beyond the border is cut off. Source: official
    helper_functions.py, CutoutPIL, whose rectangle is one pixel wider and higher, because Pillow
    includes the last corner.

    Args:
        image: RGB image; it is not changed.
        fraction: side of the rectangle as a fraction of the side of the image, in (0, 1].
    """
    width, height = image.size
    box = _random_box(image.size, int(fraction * width + 0.5), int(fraction * height + 0.5))
    colour = (random.randrange(256), random.randrange(256), random.randrange(256))

    covered = image.copy()
    covered.paste(colour, box)
    return covered


def _random_box(size: tuple[int, int], width: int, height: int) -> tuple[int, int, int, int]:
    """Return a random box, cut off at the border of the image.

    Args:
        size: width and height of the image in pixels.
        width: of the box in pixels.
        height: of the box in pixels.

    Returns:
        left, top, right and bottom in pixels; right and bottom are exclusive.
    """
    left = random.randrange(size[0]) - width // 2
    top = random.randrange(size[1]) - height // 2

    return max(left, 0), max(top, 0), min(left + width, size[0]), min(top + height, size[1])


def _sign() -> int:
    """Return a random sign: the magnitudes of most operations have none."""
    return random.choice((-1, 1))


def _affine(
    image: Image.Image, matrix: tuple[float, ...], resample: Image.Resampling
) -> Image.Image:
    """Map output pixel (x, y) to input pixel (ax + by + c, dx + ey + f).

    The matrix is (a, b, c, d, e, f). Output pixels whose input lies outside the image become grey.
    """
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=GREY)


def _shear_x(image: Image.Image, slope: float) -> Image.Image:
    return _affine(image, (1, slope * _sign(), 0, 0, 1, 0), Image.Resampling.BICUBIC)


def _shear_y(image: Image.Image, slope: float) -> Image.Image:
    return _affine(image, (1, 0, 0, slope * _sign(), 1, 0), Image.Resampling.BICUBIC)


def _translate_x(image: Image.Image, fraction: float) -> Image.Image:
    shift = fraction * image.width * _sign()
    return _affine(image, (1, 0, shift, 0, 1, 0), Image.Resampling.NEAREST)


def _translate_y(image: Image.Image, fraction: float) -> Image.Image:
    shift = fraction * image.height * _sign()
    return _affine(image, (1, 0, 0, 0, 1, shift), Image.Resampling.NEAREST)


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    # No random sign: the package, with which the published results were made, rotates
    # anticlockwise only.
    return image.rotate(degrees, fillcolor=GREY)


def _small_cutout(image: Image.Image, pixels: float) -> Image.Image:
    # The side is in pixels whatever the size of the image, as in the package: at 448 pixels such a
    # cutout hides almost nothing.
    covered = image.copy()
    covered.paste(PATCH, _random_box(image.size, int(pixels), int(pixels)))
    return covered


def _enhance(image: Image.Image, strength: float, kind: type[Any]) -> Image.Image:
    # `kind` is one of Pillow's enhancements.
    return kind(image).enhance(1 + strength * _sign())


def _posterize(image: Image.Image, bits: float) -> Image.Image:
    return ImageOps.posterize(image, int(bits))


def _solarize(image: Image.Image, threshold: float) -> Image.Image:
    # Pillow only compares with the threshold, so that a fraction is fine.
    return ImageOps.solarize(image, threshold)  # type: ignore[arg-type]


def _autocontrast(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.equalize(image)


def _invert(image: Image.Image, _: float) -> Image.Image:
    return ImageOps.invert(image)


def _levels(weakest: float, strongest: float, *, whole: bool = False) -> tuple[float, ...]:
    """Return ten evenly spaced magnitudes, rounded to integers if `whole`."""
    steps = [weakest + (strongest - weakest) * row / (NUM_LEVELS - 1) for row in range(NUM_LEVELS)]
    return tuple(round(step) if whole else step for step in steps)


_NO_MAGNITUDE = (0.0,) * NUM_LEVELS

# Name -> operation, magnitudes of rows 0 to 9.
OPERATIONS: dict[str, tuple[Operation, tuple[float, ...]]] = {
    "shear_x": (_shear_x, _levels(0, 0.3)),  # slope
    "shear_y": (_shear_y, _levels(0, 0.3)),
    "translate_x": (_translate_x, _levels(0, 150 / 331)),  # fraction of the side
    "translate_y": (_translate_y, _levels(0, 150 / 331)),
    "rotate": (_rotate, _levels(0, 30)),  # degrees
    "color": (
        partial(_enhance, kind=ImageEnhance.Color),
        _levels(0, 0.9),
    ),  # distance of the factor from 1
    "contrast": (partial(_enhance, kind=ImageEnhance.Contrast), _levels(0, 0.9)),
    "brightness": (partial(_enhance, kind=ImageEnhance.Brightness), _levels(0, 0.9)),
    "sharpness": (partial(_enhance, kind=ImageEnhance.Sharpness), _levels(0, 0.9)),
    "posterize": (_posterize, _levels(8, 4, whole=True)),  # bits kept of each channel
    "solarize": (_solarize, _levels(256, 0)),  # values from here on are inverted
    "cutout": (_small_cutout, _levels(0, 20, whole=True)),  # pixels
    "autocontrast": (_autocontrast, _NO_MAGNITUDE),
    "equalize": (_equalize, _NO_MAGNITUDE),
    "invert": (_invert, _NO_MAGNITUDE),
}


class PairAugment:
    """Apply two random operations (of 15, with magnitudes 1 to 9), each with probability 0.5."""

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the augmented RGB image, of the same size; the argument is not changed."""
        # Both operations are drawn before either probability, as in the package, which draws a pair
        # and then applies it. The order of the draws decides what a seed means.
        for name, row in [self.draw(), self.draw()]:
            if random.random() < PROBABILITY:
                operation, levels = OPERATIONS[name]
                image = operation(image, levels[row])
        return image

    @staticmethod
    def draw() -> tuple[str, int]:
        """Return the name of an operation and a row of its magnitude table, both uniform."""
        return random.choice(_NAMES), random.randrange(1, NUM_LEVELS)


_NAMES = tuple(OPERATIONS)
