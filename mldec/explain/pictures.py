"""Pictures of what a model sees: an image, its classes, and a heat map per class.

Drawn with Pillow alone. Colours are those of a ramp whose lightness rises evenly, so that it reads
the same to colour-blind people and in print.
"""

import hashlib
import io
import math
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mldec.errors import ConfigError, visible
from mldec.files.results import write_file

PANEL = 280  # longer side of an image in pixels
NARROWEST = 150  # width of a panel, for its caption
GAP = 18
COLUMNS = 4
NAME_SIZE, SCORE_SIZE, NOTE_SIZE = 19, 16, 14
QUALITY = 92  # of JPEG

PAPER, INK, PALE = (255, 255, 255), (20, 20, 30), (95, 95, 110)

# Nine evenly spaced colours of the ramp "inferno" of matplotlib (CC0), dark to light.
RAMP = np.array(
    [
        (0, 0, 4),
        (31, 12, 72),
        (85, 15, 109),
        (136, 34, 106),
        (186, 54, 85),
        (227, 89, 51),
        (249, 140, 10),
        (249, 201, 50),
        (252, 255, 164),
    ]
)
DIMMED = 0.6  # brightness of the grey image below the colours
OPAQUE = 0.7  # of the colours at the maximum of a map; 0 where it is 0

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Finding:
    """A class that the model named, and where it looked.

    Attributes:
        name: of the class.
        score: from 0 to 1.
        heat: float [h, w], >= 0, over the whole image that is drawn.
    """

    name: str
    score: float
    heat: np.ndarray


class Typeface:
    """A font in several sizes, and what it can write.

    Args:
        file: a TrueType or OpenType font; None for Pillow's own, which has the letters of English.

    Raises:
        ConfigError: if the file is no font that Pillow reads.
    """

    def __init__(self, file: str | None = None) -> None:
        self._file = file
        self.at = cache(self._at)
        self._lacks = cache(self._is_missing)
        try:
            self.at(NAME_SIZE)
        except OSError as error:
            raise ConfigError(
                f"--font {file}: not a font that can be read ({error}); name a .ttf or .otf file"
            ) from error

    def _at(self, size: int) -> Font:
        if self._file is None:
            return ImageFont.load_default(size)
        return ImageFont.truetype(self._file, size)

    def _is_missing(self, letter: str) -> bool:
        """Tell whether the font draws the same for this letter as for one that cannot exist."""
        font = self.at(NAME_SIZE)
        return bytes(font.getmask(letter)) == bytes(font.getmask("\uffff"))

    def writable(self, text: str) -> str:
        """Replace letters that the font lacks: by the letter without its accent, else by `?`."""
        letters = []
        for letter in unicodedata.normalize("NFC", visible(text)):
            if self._lacks(letter):
                letter = unicodedata.normalize("NFKD", letter)[0]
            letters.append("?" if self._lacks(letter) else letter)
        return "".join(letters)

    def fitted(self, text: str, size: int, width: float) -> str:
        """Return a text that this font can write within a width in pixels, shortened if need be."""
        text, font = self.writable(text), self.at(size)
        if font.getlength(text) <= width:
            return text

        while text and font.getlength(text + "...") > width:
            text = text[:-1]
        return text + "..."

    def lines(self, text: str, size: int, width: float) -> list[str]:
        """Break a text into lines of at most a width in pixels."""
        lines = [""]
        for word in self.writable(text).split():
            longer = f"{lines[-1]} {word}".strip()
            if self.at(size).getlength(longer) > width and lines[-1]:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines


def file_name(path: Path) -> str:
    """Return the name of the picture of an image: its own, and a hash of its whole path.

    Two images get two names, whatever their folders, endings and bytes. Bytes that are not UTF-8
    become `?`, and long names are cut.
    """
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:8]
    stem = os.fsencode(path.stem).decode("utf-8", "replace").replace("\ufffd", "?")
    return f"{visible(stem)[:50]}-{digest}.jpg"


def draw(
    image: Image.Image, title: str, findings: Sequence[Finding], method: str, typeface: Typeface
) -> Image.Image:
    """Draw an image, and beside it a panel per class with the heat map over it.

    Args:
        image: the part of an image that the model saw, RGB.
        title: below the image, such as its file name.
        findings: the classes, in the order of the panels.
        method: how the maps were made.
        typeface: of all texts.

    Returns:
        An RGB picture.
    """
    scale = PANEL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.LANCZOS)

    cell = max(size[0], NARROWEST)
    caption = round(1.35 * NAME_SIZE + 1.5 * SCORE_SIZE)
    count = 1 + len(findings)
    rows = math.ceil(count / COLUMNS)
    columns = math.ceil(count / rows)  # five panels are three and two, not four and one
    width = GAP + columns * (cell + GAP)

    note = (
        f"Bright: where the model looked; each map is scaled to its own maximum. "
        f"{method[0].upper()}{method[1:]}."
    )
    notes = typeface.lines(note, NOTE_SIZE, width - 2 * GAP) if findings else []
    line = round(1.4 * NOTE_SIZE)
    height = GAP + rows * (size[1] + caption + GAP) + len(notes) * line + (GAP if notes else 0)

    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    score = "" if findings else "no class named"
    panels = [(image, title, score)]
    for finding in findings:
        panels.append((heated(image, finding.heat), finding.name, f"{finding.score:.3f}"))

    for number, (panel, name, below) in enumerate(panels):
        row, column = divmod(number, columns)
        left = GAP + column * (cell + GAP)
        top = GAP + row * (size[1] + caption + GAP)
        sheet.paste(panel, (left, top))

        baseline = top + size[1] + round(0.3 * NAME_SIZE)
        text = typeface.fitted(name, NAME_SIZE, cell)
        pen.text((left, baseline), text, INK, typeface.at(NAME_SIZE))
        baseline += round(1.3 * NAME_SIZE)
        pen.text((left, baseline), below, PALE, typeface.at(SCORE_SIZE))

    for number, text in enumerate(notes):
        top = height - GAP - (len(notes) - number) * line
        pen.text((GAP, top), text, PALE, typeface.at(NOTE_SIZE))
    return sheet


def heated(image: Image.Image, heat: np.ndarray) -> Image.Image:
    """Return a grey copy of an image with the colours of a heat map over it.

    Args:
        image: RGB.
        heat: float [h, w], >= 0; the ramp ends at its maximum. Zeros leave the grey image.
    """
    most = float(heat.max())
    share = heat / most if most > 0 else heat
    small = Image.fromarray(share.astype(np.float32))
    share = np.clip(np.asarray(small.resize(image.size, Image.Resampling.BICUBIC)), 0, 1)

    grey = DIMMED * np.asarray(image.convert("L"), np.float32)[..., None]
    places = np.linspace(0, 1, len(RAMP))
    colours = np.stack([np.interp(share, places, channel) for channel in RAMP.T], -1)
    opacity = OPAQUE * share[..., None]
    return Image.fromarray(((1 - opacity) * grey + opacity * colours).astype(np.uint8))


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture as a JPEG file, completely or not at all.

    Raises:
        DataError: if it cannot be written.
    """
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=QUALITY, subsampling=0)
    write_file(path, content.getvalue())
