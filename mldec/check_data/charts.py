"""Pictures with Pillow alone: a grid of images, a bar chart, a heat map and a plot of points."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

INK, BAR, PAPER = (20, 20, 20), (52, 101, 164), (255, 255, 255)
LINE = 12  # pixels from one line of text to the next
LETTER = 6.2  # mean width of a letter in pixels
MARGIN = 8


def grid(
    images: Sequence[np.ndarray], captions: Sequence[str], *, columns: int = 6, cell: int = 192
) -> Image.Image:
    """Return images uint8 [H, W, 3] side by side, each above its caption in up to three lines."""
    rows = -(-len(images) // columns)
    height = cell + 3 * LINE + MARGIN
    page = Image.new("RGB", (columns * (cell + MARGIN) + MARGIN, rows * height + MARGIN), PAPER)
    draw = ImageDraw.Draw(page)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = MARGIN + place % columns * (cell + MARGIN), MARGIN + place // columns * height
        page.paste(
            Image.fromarray(image).resize((cell, cell), Image.Resampling.BILINEAR), (left, top)
        )
        for number, line in enumerate(_wrap(caption, int(cell / LETTER))[:3]):
            draw.text((left, top + cell + number * LINE), line, INK)
    return page


def bars(values: np.ndarray, names: Sequence[str], title: str) -> Image.Image:
    """Return a chart of non-negative numbers [K], the largest on top, their lengths on a logarithmic scale.

    With up to 120 of them each bar has its name and number; beyond, they shrink to lines.
    """
    order = np.argsort(-values, kind="stable")
    named = len(values) <= 120
    step = LINE if named else 1
    left, length, top = (190 if named else MARGIN), 480, MARGIN + 2 * LINE
    page = Image.new("RGB", (left + length + 90, top + step * len(values) + MARGIN), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((MARGIN, MARGIN), title, INK)
    widths = np.log1p(values) / max(np.log1p(values.max(initial=0)), 1e-9) * length
    for place, index in enumerate(order.tolist()):
        y = top + place * step
        draw.rectangle((left, y, left + widths[index], y + step - (3 if named else 1)), fill=BAR)
        if named:
            draw.text((MARGIN, y - 1), _ascii(names[index])[:28], INK)
            draw.text((left + widths[index] + 4, y - 1), f"{int(values[index]):,}", INK)
    return page


def heat_map(matrix: np.ndarray, names: Sequence[str], title: str) -> Image.Image:
    """Return a matrix of numbers in [0, 1], float [K, K], as squares from white (0) to dark blue (1)."""
    cell, left, top = 12, 190, MARGIN + 2 * LINE
    shade = np.clip(matrix, 0, 1)[..., None]
    colours = (np.array(PAPER) * (1 - shade) + np.array([8, 48, 107]) * shade).astype(np.uint8)
    side = cell * len(matrix)
    page = Image.new(
        "RGB",
        (max(left + side, left + int(LETTER * len(title))) + MARGIN, top + side + MARGIN),
        PAPER,
    )
    page.paste(Image.fromarray(colours).resize((side, side), Image.Resampling.NEAREST), (left, top))
    draw = ImageDraw.Draw(page)
    draw.text((MARGIN, MARGIN), title, INK)
    for place, name in enumerate(names):
        draw.text((MARGIN, top + place * cell - 1), _ascii(name)[:28], INK)
    return page


def scatter(
    points: Sequence[tuple[float, float, float]], names: Sequence[str], title: str
) -> Image.Image:
    """Return a plot of points (x, y, half the height of a bar at y), numbered, with their names beside it.

    Args:
        points: at least one.
        names: of the points.
        title: what x and y are.
    """
    side, left, top = 300, 60, MARGIN + 2 * LINE
    width = left + side + 300
    page = Image.new(
        "RGB", (max(width, int(LETTER * len(title)) + 2 * MARGIN), top + side + 3 * LINE), PAPER
    )
    draw = ImageDraw.Draw(page)
    draw.text((MARGIN, MARGIN), _ascii(title), INK)
    draw.rectangle((left, top, left + side, top + side), outline=INK)
    across = _axis([x for x, _, _ in points])
    up = _axis([y + sign * spread for _, y, spread in points for sign in (-1, 1)])
    for share in (0, 0.5, 1):
        draw.text(
            (left + share * side - 10, top + side + 4),
            f"{across[0] + share * (across[1] - across[0]):.4g}",
            INK,
        )
        draw.text(
            (MARGIN, top + (1 - share) * side - 6), f"{up[0] + share * (up[1] - up[0]):.4g}", INK
        )
    for number, ((x, y, spread), name) in enumerate(zip(points, names, strict=True), start=1):
        place = left + side * (x - across[0]) / (across[1] - across[0])
        low, middle, high = (
            top + side * (up[1] - value) / (up[1] - up[0]) for value in (y - spread, y, y + spread)
        )
        draw.line((place, low, place, high), fill=BAR)
        draw.ellipse((place - 3, middle - 3, place + 3, middle + 3), fill=BAR)
        draw.text((place + 5, middle - 6), str(number), INK)
        draw.text(
            (left + side + 12, top + (number - 1) * LINE),
            f"{number:>2} {_ascii(name)}: {y:.1f} +- {spread:.1f}",
            INK,
        )
    return page


def stacked(pages: Sequence[Image.Image]) -> Image.Image:
    """Return pictures one above the other."""
    whole = Image.new(
        "RGB", (max(page.width for page in pages), sum(page.height for page in pages)), PAPER
    )
    top = 0
    for page in pages:
        whole.paste(page, (0, top))
        top += page.height
    return whole


def _axis(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis with some room at both."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


def _ascii(text: str) -> str:
    """Replace what Pillow's built-in font may not have."""
    return text.encode("ascii", "replace").decode()


def _wrap(text: str, width: int) -> list[str]:
    """Break a list of words after commas."""
    lines = [""]
    for word in _ascii(text).split(", "):
        longer = f"{lines[-1]}, {word}" if lines[-1] else word
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line[:width] for line in lines if line]
