"""The official augmentation: two of fifteen random operations, and a cutout."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

PROBABILITY = 0.5  # of each of the two operations
NUM_LEVELS = 10  # rows of the magnitude table; row 0 is never drawn
GREY = (128, 128, 128)  # fills the area that a geometric operation uncovers
PATCH = (125, 122, 113)  # fills the small cutout; about the mean colour of ImageNet

Operation = Callable[[Image.Image, float, Random], Image.Image]


def cutout(image: Image.Image, fraction: float, rng: Random) -> Image.Image:
    """Cover one rectangle of an RGB image with a random colour and return the image itself.

    The centre is uniform over the image. The rectangle measures `fraction` of each side, in (0, 1],
    rounded to an odd number of pixels: 225 of 448.

    Source: official helper_functions.py, CutoutPIL.
    """
    half_width = int(fraction * image.width + 0.5) // 2
    half_height = int(fraction * image.height + 0.5) // 2
    x, y = rng.randrange(image.width), rng.randrange(image.height)
    colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))

    # Officially a rectangle of Pillow's, which includes its last corner: hence the odd sides.
    left, right = x - half_width, x + half_width + 1
    top, bottom = y - half_height, y + half_height + 1
    image.paste(colour, (left, top, right, bottom))
    return image


def _sign(rng: Random) -> int:
    """Return a random sign: the magnitudes of most operations have none."""
    return rng.choice((-1, 1))


def _sheared(image: Image.Image, across: float, down: float) -> Image.Image:
    """Give pixel (x, y) the colour at (x + across y, y + down x), or grey if that lies outside."""
    affine, matrix = Image.Transform.AFFINE, (1, across, 0, down, 1, 0)
    return image.transform(image.size, affine, matrix, Image.Resampling.BICUBIC, fillcolor=GREY)


def _moved(image: Image.Image, across: float, down: float) -> Image.Image:
    """Give pixel (x, y) the colour at (x + across, y + down), or grey if that lies outside."""
    matrix = (1, 0, across, 0, 1, down)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=GREY)


def _small_cutout(image: Image.Image, pixels: float, rng: Random) -> Image.Image:
    # In pixels whatever the size of the image, as in the package: at 448 pixels such a cutout hides
    # almost nothing. The side is rounded down to an even number.
    x, y = rng.randrange(image.width), rng.randrange(image.height)
    half = int(pixels) // 2

    covered = image.copy()
    covered.paste(PATCH, (x - half, y - half, x + half, y + half))
    return covered


def _enhanced(kind: type[Any], image: Image.Image, strength: float, rng: Random) -> Image.Image:
    """Apply one of Pillow's enhancements."""
    return kind(image).enhance(1 + strength * _sign(rng))


def _levels(weakest: float, strongest: float, *, whole: bool = False) -> tuple[float, ...]:
    """Return ten evenly spaced magnitudes, rounded to integers if `whole`."""
    span = strongest - weakest
    steps = [weakest + span * row / (NUM_LEVELS - 1) for row in range(NUM_LEVELS)]
    if whole:
        return tuple(round(step) for step in steps)
    return tuple(steps)


_NO_MAGNITUDE = (0.0,) * NUM_LEVELS

# Name -> operation on image i with magnitude m, magnitudes of rows 0 to 9.
OPERATIONS: dict[str, tuple[Operation, tuple[float, ...]]] = {
    "shear_x": (lambda i, m, rng: _sheared(i, m * _sign(rng), 0), _levels(0, 0.3)),
    "shear_y": (lambda i, m, rng: _sheared(i, 0, m * _sign(rng)), _levels(0, 0.3)),
    # Fractions of the side of the image.
    "translate_x": (
        lambda i, m, rng: _moved(i, m * i.width * _sign(rng), 0),
        _levels(0, 150 / 331),
    ),
    "translate_y": (
        lambda i, m, rng: _moved(i, 0, m * i.height * _sign(rng)),
        _levels(0, 150 / 331),
    ),
    # Degrees, without a random sign: the package, with which the published results were made,
    # rotates anticlockwise only.
    "rotate": (lambda i, m, rng: i.rotate(m, fillcolor=GREY), _levels(0, 30)),
    # Distance of the factor from 1.
    "color": (partial(_enhanced, ImageEnhance.Color), _levels(0, 0.9)),
    "contrast": (partial(_enhanced, ImageEnhance.Contrast), _levels(0, 0.9)),
    "brightness": (partial(_enhanced, ImageEnhance.Brightness), _levels(0, 0.9)),
    "sharpness": (partial(_enhanced, ImageEnhance.Sharpness), _levels(0, 0.9)),
    # Bits kept of each channel; value from which on all are inverted; pixels of the side.
    "posterize": (lambda i, m, rng: ImageOps.posterize(i, int(m)), _levels(8, 4, whole=True)),
    "solarize": (lambda i, m, rng: ImageOps.solarize(i, m), _levels(256, 0)),  # type: ignore[arg-type]
    "cutout": (_small_cutout, _levels(0, 20, whole=True)),
    "autocontrast": (lambda i, m, rng: ImageOps.autocontrast(i), _NO_MAGNITUDE),
    "equalize": (lambda i, m, rng: ImageOps.equalize(i), _NO_MAGNITUDE),
    "invert": (lambda i, m, rng: ImageOps.invert(i), _NO_MAGNITUDE),
}


def augment_by_pair(image: Image.Image, rng: Random) -> Image.Image:
    """Apply two random operations (of 15, with magnitudes 1 to 9), each with probability 0.5."""
    # Both operations are drawn before either probability, as in the package, which draws a pair and
    # then applies it. The order of the draws decides what a seed means.
    for name, row in [draw_operation(rng), draw_operation(rng)]:
        if rng.random() < PROBABILITY:
            operation, levels = OPERATIONS[name]
            image = operation(image, levels[row], rng)
    return image


def draw_operation(rng: Random) -> tuple[str, int]:
    """Return the name of an operation and a row of its magnitude table, both uniform."""
    return rng.choice(tuple(OPERATIONS)), rng.randrange(1, NUM_LEVELS)
