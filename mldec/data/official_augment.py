"""The official augmentation: two random operations out of fifteen, and cutout."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image, ImageEnhance, ImageOps

PROBABILITY = 0.5  # of each of the two operations
NUM_LEVELS = 10  # rows of the magnitude table; row 0 is not used
GRAY = (128, 128, 128)  # fill color of areas uncovered by geometric operations
PATCH = (125, 122, 113)  # fill color of the small cutout; about the ImageNet mean
ROWS = 32  # rows of a shear per block; a block fits in the cache

Operation = Callable[[Image.Image, float, Random], Image.Image]


def cutout(image: Image.Image, fraction: float, rng: Random) -> Image.Image:
    """Fill a random rectangle of an RGB image with a random color, in place.

    Source: official helper_functions.py, CutoutPIL.

    `fraction` is the fraction of the image sides, in (0, 1]. The sides are rounded to an odd number
    of pixels, such as 225 of 448. The center is uniform over the image. Returns the same image.
    """
    half_width = int(fraction * image.width + 0.5) // 2
    half_height = int(fraction * image.height + 0.5) // 2
    x = rng.randrange(image.width)
    y = rng.randrange(image.height)
    color = (rng.randrange(256), rng.randrange(256), rng.randrange(256))

    # The official code draws a Pillow rectangle, which includes its last row and column.
    left = x - half_width
    right = x + half_width + 1
    top = y - half_height
    bottom = y + half_height + 1
    image.paste(color, (left, top, right, bottom))
    return image


def _sign(rng: Random) -> int:
    """Return 1 or -1. The magnitudes of most operations have no sign."""
    return rng.choice((-1, 1))


def channels(image: Image.Image) -> np.ndarray:
    """Return the channels of an RGB image, uint8 [3, H, W]."""
    # Copying channel by channel takes half the time of transposing [H, W, 3].
    values = bytearray().join([image.tobytes("raw", name) for name in "RGB"])
    return np.frombuffer(values, np.uint8).reshape(3, image.height, image.width)


def _sheared(image: Image.Image, slope: float) -> Image.Image:
    """Map pixel (x, y) to the color at (x + slope * y, y), or gray if outside.

    The result equals Pillow's affine transform with bicubic interpolation, in 0.4 of the time.
    Pillow interpolates between 4 x 4 pixels, and a shear needs only four pixels of the same row.

    Source: Pillow, src/libImaging/Geometry.c, whose operations are done in the same order.
    """
    width, height = image.size
    columns = np.arange(width) + 0.5
    offsets = slope * (np.arange(height) + 0.5)
    shifts = np.floor(offsets).astype(int)

    # Pixel x of the result is interpolated from pixels x to x + 3 of a window.
    margin = int(np.abs(shifts).max()) + 2
    padded = np.pad(channels(image), ((0, 0), (0, 0), (margin, margin)), mode="edge")
    windows = sliding_window_view(padded, width + 3, axis=2)
    starts = margin + shifts - 1

    result = np.empty((3, height, width), np.uint8)
    buffer = np.empty((3, ROWS, width))
    for top in range(0, height, ROWS):
        rows = np.arange(top, min(top + ROWS, height))
        pixels = windows[:, rows, starts[rows]].astype(np.int16)
        steps = np.diff(pixels)
        first = steps[..., :-2]
        second = steps[..., 1:-1]
        cubic = first + steps[..., 2:]

        # Position of each center between the second and the third pixel, 0 to 1.
        centers = columns + offsets[rows, None]
        position = centers - (columns + shifts[rows, None])

        # Horner's method in double precision.
        values = buffer[:, : len(rows)]
        np.multiply(cubic, position, out=values)
        values -= cubic + first
        values *= position
        values += first + second
        values *= position
        values += pixels[..., 1:-2]

        # Pillow rounds toward zero.
        rounded = values.astype(np.int16).clip(0, 255)
        np.copyto(rounded, GRAY[0], where=(centers < 0) | (centers >= width))
        result[:, rows] = rounded
    return Image.merge("RGB", [Image.fromarray(channel) for channel in result])


def _sheared_down(image: Image.Image, slope: float) -> Image.Image:
    transpose = Image.Transpose.TRANSPOSE
    return _sheared(image.transpose(transpose), slope).transpose(transpose)


def _translated(image: Image.Image, across: float, down: float) -> Image.Image:
    """Map pixel (x, y) to the color at (x + across, y + down), or gray if outside."""
    matrix = (1, 0, across, 0, 1, down)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=GRAY)


def _small_cutout(image: Image.Image, pixels: float, rng: Random) -> Image.Image:
    # The side is in pixels for any image size, as in the official package. It is rounded down to an
    # even number, and is small compared to 448 pixels.
    x = rng.randrange(image.width)
    y = rng.randrange(image.height)
    half = int(pixels) // 2

    covered = image.copy()
    covered.paste(PATCH, (x - half, y - half, x + half, y + half))
    return covered


def _enhanced(kind: type[Any], image: Image.Image, strength: float, rng: Random) -> Image.Image:
    return kind(image).enhance(1 + strength * _sign(rng))


def _levels(weakest: float, strongest: float, *, whole: bool = False) -> tuple[float, ...]:
    """Return evenly spaced magnitudes for all rows, rounded to integers if `whole` is set."""
    span = strongest - weakest
    steps = [weakest + span * row / (NUM_LEVELS - 1) for row in range(NUM_LEVELS)]
    if whole:
        return tuple(round(step) for step in steps)
    return tuple(steps)


_NO_MAGNITUDE = (0.0,) * NUM_LEVELS

# Maps a name to an operation on image i with magnitude m, and the magnitudes of rows 0 to 9.
OPERATIONS: dict[str, tuple[Operation, tuple[float, ...]]] = {
    "shear_x": (lambda i, m, rng: _sheared(i, m * _sign(rng)), _levels(0, 0.3)),
    "shear_y": (lambda i, m, rng: _sheared_down(i, m * _sign(rng)), _levels(0, 0.3)),
    # Fraction of the image side.
    "translate_x": (
        lambda i, m, rng: _translated(i, m * i.width * _sign(rng), 0),
        _levels(0, 150 / 331),
    ),
    "translate_y": (
        lambda i, m, rng: _translated(i, 0, m * i.height * _sign(rng)),
        _levels(0, 150 / 331),
    ),
    # Degrees without a random sign. The package of the published results only rotates
    # counterclockwise.
    "rotate": (lambda i, m, rng: i.rotate(m, fillcolor=GRAY), _levels(0, 30)),
    # Absolute difference of the factor from 1.
    "color": (partial(_enhanced, ImageEnhance.Color), _levels(0, 0.9)),
    "contrast": (partial(_enhanced, ImageEnhance.Contrast), _levels(0, 0.9)),
    "brightness": (partial(_enhanced, ImageEnhance.Brightness), _levels(0, 0.9)),
    "sharpness": (partial(_enhanced, ImageEnhance.Sharpness), _levels(0, 0.9)),
    # Number of kept bits (posterize), threshold (solarize), side in pixels (cutout).
    "posterize": (lambda i, m, rng: ImageOps.posterize(i, int(m)), _levels(8, 4, whole=True)),
    "solarize": (lambda i, m, rng: ImageOps.solarize(i, m), _levels(256, 0)),  # type: ignore[arg-type]
    "cutout": (_small_cutout, _levels(0, 20, whole=True)),
    "autocontrast": (lambda i, m, rng: ImageOps.autocontrast(i), _NO_MAGNITUDE),
    "equalize": (lambda i, m, rng: ImageOps.equalize(i), _NO_MAGNITUDE),
    "invert": (lambda i, m, rng: ImageOps.invert(i), _NO_MAGNITUDE),
}


def augment_by_pair(image: Image.Image, rng: Random) -> Image.Image:
    """Apply two random operations (of 15, with magnitudes 1 to 9), each with probability 0.5."""
    # Draw both operations before the probabilities, as in the official package. The order of the
    # draws determines the result of a seed.
    for name, row in [draw_operation(rng), draw_operation(rng)]:
        if rng.random() < PROBABILITY:
            operation, levels = OPERATIONS[name]
            image = operation(image, levels[row], rng)
    return image


def draw_operation(rng: Random) -> tuple[str, int]:
    """Return the name of an operation and a row of its magnitude table, both uniform."""
    return rng.choice(tuple(OPERATIONS)), rng.randrange(1, NUM_LEVELS)
