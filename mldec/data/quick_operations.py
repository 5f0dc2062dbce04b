"""The two slowest operations of the official augmentation, with the pixels of Pillow's.

They are a shear with bicubic interpolation and the filter that images are sharpened against.
"""

import numpy as np
from PIL import Image

# Rows of pixels that are computed at once: enough to be fast, few enough for the processor's cache.
ROWS = 32

# Weight of a pixel and sum of all weights in Pillow's ImageFilter.SMOOTH; its eight neighbours have
# a weight of 1.
CENTRE = 5
WEIGHTS = 13

# Columns read beyond the two ends of a row: bicubic interpolation needs two neighbours.
MARGIN = 2


def shear_x(image: Image.Image, slope: float, fill: int) -> Image.Image:
    """Give pixel (x, y) the colour at (x + slope y, y).

    Pillow interpolates between 4 x 4 pixels, whatever the transform; a shear only needs the four in
    a row. They are combined by the operations of src/libImaging/Geometry.c, in the same order and
    precision, so that the results are those of Pillow's affine transform with bicubic
    interpolation.

    Args:
        image: RGB image; it is not changed.
        slope: change of x per row, below 1 to either side.
        fill: grey value, 0 to 255, of pixels whose colour would lie outside the image.
    """
    channels = np.stack([np.asarray(channel) for channel in image.split()])
    sheared = _sheared(channels, slope, fill)
    return Image.merge("RGB", [Image.fromarray(channel) for channel in sheared])


def shear_y(image: Image.Image, slope: float, fill: int) -> Image.Image:
    """Give pixel (x, y) the colour at (x, y + slope x); see `shear_x`."""
    turned = image.transpose(Image.Transpose.TRANSPOSE)
    return shear_x(turned, slope, fill).transpose(Image.Transpose.TRANSPOSE)


def smoothed(image: Image.Image) -> Image.Image:
    """Return the RGB image after Pillow's ImageFilter.SMOOTH, which leaves its border as it is."""
    values = np.asarray(image)
    height, width, _ = values.shape
    result = np.array(values)
    if height < 3 or width < 3:
        return Image.fromarray(result)

    # As lines of 3 W numbers, the neighbours of a number are three away.
    lines, smooth_lines = values.reshape(height, -1), result.reshape(height, -1)
    for top in range(1, height - 1, ROWS):
        bottom = min(top + ROWS, height - 1)
        block = lines[top - 1 : bottom + 1].astype(np.uint16)

        columns = block[:-2] + block[1:-1]
        columns += block[2:]
        total = columns[:, :-6] + columns[:, 3:-3]
        total += columns[:, 6:]
        total += (CENTRE - 1) * block[1:-1, 3:-3]

        # Rounded half up. No multiple of 1/13 is near a half, so that single precision is exact.
        mean = total.astype(np.float32)
        mean += WEIGHTS / 2
        mean *= np.float32(1 / WEIGHTS)
        smooth_lines[top:bottom, 3:-3] = mean

    return Image.fromarray(result)


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
    """Interpolate between four neighbours in a row by a cubic.

    Args:
        pixels: uint8 [3, N].
        fractions: float64 [N].

    Returns:
        uint8 [3, N]: value i is between pixels i + 1 and i + 2; the last three are undefined.
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
