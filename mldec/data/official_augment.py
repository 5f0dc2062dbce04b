"""The official augmentation: two of fifteen random operations, and a cutout."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

# Rows of pixels that are computed at once: enough to be fast, few enough for the processor's cache.
ROWS = 32

# Columns read beyond the two ends of a row: bicubic interpolation needs two neighbours.
MARGIN = 2


def shear_x(image: Image.Image, slope: float, fill: int) -> Image.Image:
    """Give pixel (x, y) the colour at (x + slope y, y).

    Pillow interpolates between 4 x 4 pixels, whatever the transform; a shear only needs the four in
    a row. They are combined by the operations of src/libImaging/Geometry.c, in the same order and
    precision, so that the results are those of Pillow's affine transform with bicubic
    interpolation. The slope is below 1 to either side; `fill` is the grey value, 0 to 255, of
    pixels whose colour would lie outside the image.
    """
    channels = np.stack([np.asarray(channel) for channel in image.split()])
    sheared = _sheared(channels, slope, fill)
    return Image.merge("RGB", [Image.fromarray(channel) for channel in sheared])


def shear_y(image: Image.Image, slope: float, fill: int) -> Image.Image:
    """Give pixel (x, y) the colour at (x, y + slope x); see `shear_x`."""
    turned = image.transpose(Image.Transpose.TRANSPOSE)
    return shear_x(turned, slope, fill).transpose(Image.Transpose.TRANSPOSE)


def _sheared(channels: np.ndarray, slope: float, fill: int) -> np.ndarray:
    """Return the channels, uint8 [3, H, W], after a shear along their rows."""
    _, height, width = channels.shape
    result = np.full_like(channels, fill)
    padded = np.pad(channels, ((0, 0), (0, 0), (MARGIN, MARGIN)), mode="edge")

    # A window holds the input of ROWS rows: column j is the left one of the four neighbours that
    # pixel j is interpolated between.
    length = width + 3
    columns = np.arange(length)
    window = np.zeros((3, ROWS, length), np.uint8)

    for top in range(0, height, ROWS):
        count = min(ROWS, height - top)
        offsets = slope * (np.arange(top, top + count) + 0.5)
        shifts = np.floor(offsets).astype(int)

        # Pillow leaves out pixels whose centre lies outside.
        centres = (columns + 0.5) + offsets[:, None]
        inside = (centres[:, :width] >= 0) & (centres[:, :width] < width)

        # How far a centre is from that of the second neighbour to the third, 0 to 1.
        fractions = (centres - 0.5) - (columns + shifts[:, None])

        for row, shift in enumerate(shifts.tolist()):
            # Columns beyond the padding belong to pixels that are outside.
            first = min(length, max(0, -1 - shift))
            last = max(first, min(length, width + 3 - shift))
            source = padded[:, top + row, first + shift + 1 : last + shift + 1]
            window[:, row, first:last] = source

        values = _interpolated(window[:, :count].reshape(3, -1), fractions.ravel())
        values = values.reshape(3, count, length)[:, :, :width]
        np.copyto(result[:, top : top + count], values, where=inside)

    return result


def _interpolated(pixels: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Interpolate between four neighbours in a row of pixels, uint8 [3, N], by a cubic.

    Value i of the result, uint8 [3, N], is at fraction i, float64 [N], between pixels i + 1 and
    i + 2; the last three are undefined.
    """
    result = np.empty_like(pixels)
    count = pixels.shape[1] - 3
    fractions = fractions[:count]

    # One row for all four, so that each operation is on a contiguous array.
    signed = pixels.astype(np.int16)
    v1, v2, v3, v4 = (signed[:, shift : shift + count] for shift in range(4))

    # v2 + d (p2 + d (p3 + d p4)); the factors are whole numbers.
    p2 = v3 - v1
    step = v1 - v2
    negative_p4 = step + v3
    negative_p4 -= v4
    p3 = step + negative_p4

    value = negative_p4 * fractions
    np.subtract(p3, value, out=value)
    value *= fractions
    value += p2
    value *= fractions
    value += v2

    # Pillow rounds down, too.
    whole = value.astype(np.int16)
    np.clip(whole, 0, 255, out=whole)
    result[:, :count] = whole
    return result


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
    image.paste(colour, (x - half_width, y - half_height, x + half_width + 1, y + half_height + 1))
    return image


def _sign(rng: Random) -> int:
    """Return a random sign: the magnitudes of most operations have none."""
    return rng.choice((-1, 1))


def _moved(image: Image.Image, across: float, down: float) -> Image.Image:
    """Give pixel (x, y) the colour at (x + across, y + down), or grey if that lies outside."""
    matrix = (1, 0, across, 0, 1, down)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=GREY)


def _shear_x(image: Image.Image, slope: float, rng: Random) -> Image.Image:
    return shear_x(image, slope * _sign(rng), GREY[0])


def _shear_y(image: Image.Image, slope: float, rng: Random) -> Image.Image:
    return shear_y(image, slope * _sign(rng), GREY[0])


def _translate_x(image: Image.Image, fraction: float, rng: Random) -> Image.Image:
    return _moved(image, fraction * image.width * _sign(rng), 0)


def _translate_y(image: Image.Image, fraction: float, rng: Random) -> Image.Image:
    return _moved(image, 0, fraction * image.height * _sign(rng))


def _rotate(image: Image.Image, degrees: float, rng: Random) -> Image.Image:
    # No random sign: the package, with which the published results were made, rotates
    # anticlockwise only.
    return image.rotate(degrees, fillcolor=GREY)


def _small_cutout(image: Image.Image, pixels: float, rng: Random) -> Image.Image:
    # In pixels whatever the size of the image, as in the package: at 448 pixels such a cutout hides
    # almost nothing. The side is rounded down to an even number.
    x, y = rng.randrange(image.width), rng.randrange(image.height)
    half = int(pixels) // 2

    covered = image.copy()
    covered.paste(PATCH, (x - half, y - half, x + half, y + half))
    return covered


def _enhance(image: Image.Image, strength: float, rng: Random, *, kind: type[Any]) -> Image.Image:
    # `kind` is one of Pillow's enhancements.
    return kind(image).enhance(1 + strength * _sign(rng))


def _posterize(image: Image.Image, bits: float, rng: Random) -> Image.Image:
    return ImageOps.posterize(image, int(bits))


def _solarize(image: Image.Image, threshold: float, rng: Random) -> Image.Image:
    # Pillow only compares with the threshold, so that a fraction is fine.
    return ImageOps.solarize(image, threshold)  # type: ignore[arg-type]


def _plain(
    image: Image.Image, _: float, rng: Random, *, operation: Callable[[Image.Image], Image.Image]
) -> Image.Image:
    # One of Pillow's operations without a magnitude.
    return operation(image)


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
    # Distance of the factor from 1.
    "color": (partial(_enhance, kind=ImageEnhance.Color), _levels(0, 0.9)),
    "contrast": (partial(_enhance, kind=ImageEnhance.Contrast), _levels(0, 0.9)),
    "brightness": (partial(_enhance, kind=ImageEnhance.Brightness), _levels(0, 0.9)),
    "sharpness": (partial(_enhance, kind=ImageEnhance.Sharpness), _levels(0, 0.9)),
    "posterize": (_posterize, _levels(8, 4, whole=True)),  # bits kept of each channel
    "solarize": (_solarize, _levels(256, 0)),  # values from here on are inverted
    "cutout": (_small_cutout, _levels(0, 20, whole=True)),  # pixels
    "autocontrast": (partial(_plain, operation=ImageOps.autocontrast), _NO_MAGNITUDE),
    "equalize": (partial(_plain, operation=ImageOps.equalize), _NO_MAGNITUDE),
    "invert": (partial(_plain, operation=ImageOps.invert), _NO_MAGNITUDE),
}


class PairAugment:
    """Apply two random operations (of 15, with magnitudes 1 to 9), each with probability 0.5."""

    def __call__(self, image: Image.Image, rng: Random) -> Image.Image:
        """Return the augmented RGB image, of the same size; the argument is not changed."""
        # Both operations are drawn before either probability, as in the package, which draws a pair
        # and then applies it. The order of the draws decides what a seed means.
        for name, row in [self.draw(rng), self.draw(rng)]:
            if rng.random() < PROBABILITY:
                operation, levels = OPERATIONS[name]
                image = operation(image, levels[row], rng)
        return image

    @staticmethod
    def draw(rng: Random) -> tuple[str, int]:
        """Return the name of an operation and a row of its magnitude table, both uniform."""
        return rng.choice(_NAMES), rng.randrange(1, NUM_LEVELS)


_NAMES = tuple(OPERATIONS)
