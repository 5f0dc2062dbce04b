"""Draw validation images with their labels and predictions below them, as one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from PIL import Image, ImageDraw, ImageFont

COLUMNS = 4  # images per row
SIDE = 224  # pixels, the longer side of an image
MARGIN = 12
LINE_HEIGHT = 15
FONT_SIZE = 12
MAX_LINES = 6  # below an image
NAME_LENGTH = 20  # characters of a class name that are shown


class Verdict(Enum):
    """Whether a prediction agrees with a label; the value is what the picture says."""

    right = "right"
    missed = "missed"
    wrong = "wrong"
    unknown = "unknown"


# For those who see them; the words say the same. Colours of Okabe and Ito, darkened for white
# paper: colour-blind people tell them apart.
COLOURS = {
    Verdict.right: "#00694e",
    Verdict.missed: "#0059a3",
    Verdict.wrong: "#b34700",
    Verdict.unknown: "#555555",
}
KEY = (
    "right: labelled and predicted; missed: labelled only; wrong: predicted only; "
    "unknown: predicted, not annotated"
)


@dataclass(frozen=True)
class Answer:
    """What is shown of one class of one image."""

    name: str
    verdict: Verdict
    probability: float


@dataclass(frozen=True)
class Example:
    """A validation image, and the classes that are labelled or predicted."""

    image: Image.Image
    answers: Sequence[Answer]  # in the order in which they are shown


def draw(examples: Sequence[Example]) -> Image.Image:
    """Draw images in a grid, the classes of each below it.

    Args:
        examples: at least one.
    """
    rows = -(-len(examples) // COLUMNS)
    cell_width = SIDE + MARGIN
    cell_height = SIDE + (MAX_LINES + 1) * LINE_HEIGHT + MARGIN
    header = LINE_HEIGHT + MARGIN

    sheet = Image.new(
        "RGB", (COLUMNS * cell_width + MARGIN, rows * cell_height + header + MARGIN), "white"
    )
    canvas, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    canvas.text((MARGIN, MARGIN), KEY, fill="black", font=font)

    for number, example in enumerate(examples):
        row, column = divmod(number, COLUMNS)
        left, top = MARGIN + column * cell_width, header + MARGIN + row * cell_height

        image = fit(example.image)
        sheet.paste(image, (left, top + SIDE - image.height))
        for line, (text, colour) in enumerate(_lines(example.answers)):
            position = left, top + SIDE + 4 + line * LINE_HEIGHT
            canvas.text(position, text, fill=colour, font=font)
    return sheet


def fit(image: Image.Image) -> Image.Image:
    """Return the image with a longer side of `SIDE` pixels; small ones keep their sharp pixels."""
    scale = SIDE / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    method = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC
    return image.resize(size, method)


def _lines(answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """Return text and colour of the lines below an image."""
    if not answers:
        return [("nothing labelled, nothing predicted", COLOURS[Verdict.unknown])]

    lines = []
    for answer in answers[:MAX_LINES]:
        name = answer.name
        if len(name) > NAME_LENGTH:
            name = name[: NAME_LENGTH - 3] + "..."
        text = f"{answer.verdict.value} {name} {answer.probability:.2f}"
        lines.append((text, COLOURS[answer.verdict]))

    if len(answers) > MAX_LINES:
        lines.append((f"and {len(answers) - MAX_LINES} more", COLOURS[Verdict.unknown]))
    return lines
