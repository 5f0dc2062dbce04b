"""The picture of validation images: what stands where, and in which words."""

import numpy as np
import pytest
from PIL import Image, ImageColor, ImageDraw

from mldec.training.gallery import COLOURS, SIDE, Answer, Example, Verdict, draw, fit

ALL = [Answer(kind.value.upper(), kind, 0.5) for kind in Verdict]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written into the pictures of a test."""
    written: list[str] = []
    real = ImageDraw.ImageDraw.text

    def text(
        self: ImageDraw.ImageDraw, position: tuple[float, float], text: str, **named: object
    ) -> None:
        written.append(text)
        real(self, position, text, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return written


def test_words_and_colours_tell_right_from_wrong(texts: list[str]) -> None:
    sheet = draw([Example(Image.new("RGB", (64, 64), "white"), ALL)])
    assert texts[1:] == [
        "right RIGHT 0.50",
        "missed MISSED 0.50",
        "wrong WRONG 0.50",
        "unknown UNKNOWN 0.50",
    ]
    assert all(f"{kind.value}: " in texts[0] for kind in Verdict), "a key explains the words"
    colours = {colour for _, colour in sheet.getcolors(sheet.width * sheet.height) or ()}
    assert {ImageColor.getrgb(colour) for colour in COLOURS.values()} <= colours


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (4, 1), (5, 2), (16, 4)])
def test_every_image_has_its_place(count: int, rows: int) -> None:
    shades = [Image.new("RGB", (8, 8), (10 * number + 5, 0, 0)) for number in range(count)]
    sheet = draw([Example(image, []) for image in shades])
    reds = np.asarray(sheet)
    is_image = (reds[..., 1] == 0) & (reds[..., 0] % 10 == 5)
    seen, areas = np.unique(reds[..., 0][is_image], return_counts=True)
    assert seen.tolist() == [10 * number + 5 for number in range(count)]
    assert set(areas) == {SIDE * SIDE}
    assert sheet.height == pytest.approx(rows * draw([Example(shades[0], [])]).height, rel=0.12)


def test_many_classes_and_long_names_are_cut(texts: list[str]) -> None:
    answers = [Answer(f"class {number} " + "x" * 99, Verdict.wrong, 0.9) for number in range(9)]
    draw([Example(Image.new("RGB", (9, 9)), answers), Example(Image.new("RGB", (9, 9)), [])])
    assert len(texts) == 1 + 6 + 1 + 1
    assert texts[1] == "wrong class 0 xxxxxxxxx... 0.90"
    assert texts[7:] == ["and 3 more", "nothing labelled, nothing predicted"]


@pytest.mark.parametrize(
    ("size", "fitted"), [((64, 64), (224, 224)), ((1000, 10), (224, 2)), ((1, 900), (1, 224))]
)
def test_images_are_scaled_to_one_side(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    assert fit(Image.new("RGB", size)).size == fitted
