"""Pictures: what is drawn where, names of files, and letters that a font lacks."""

import os
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from PIL import Image

from mldec.errors import ConfigError, DataError
from mldec.predict import heat_maps as pictures
from mldec.predict.heat_maps import Finding, Typeface, draw, file_name, heated, save

PLAIN = Typeface()


def heat(row: int = 1, column: int = 6) -> np.ndarray:
    values = np.zeros((8, 8))
    values[row, column] = 0.3
    return values


def test_a_heat_map_is_brightest_at_its_maximum() -> None:
    grey = Image.new("RGB", (80, 40), (90, 60, 200))
    pixels = np.asarray(heated(grey, heat())).astype(int).sum(2)
    row, column = np.unravel_index(pixels.argmax(), pixels.shape)
    assert (row, column) == (pytest.approx(7, abs=3), pytest.approx(65, abs=5))

    # Far away from it, and without any heat, the image is left in grey.
    untouched = np.asarray(heated(grey, np.zeros((8, 8))))
    assert len(np.unique(untouched)) == 1
    assert (pixels[30:, :30] == untouched[0, 0].astype(int).sum()).all()


def test_colours_are_lighter_the_more_heat() -> None:
    light = pictures.RAMP @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(light) > 5).all()


@pytest.mark.parametrize(
    ("size", "count", "panels"),
    [
        ((400, 300), 0, (1, 1)),
        ((400, 300), 3, (4, 1)),
        ((300, 400), 4, (3, 2)),
        ((2000, 10), 10, (4, 3)),
        ((10, 2000), 1, (2, 1)),
        ((1, 1), 1, (2, 1)),
    ],
)
def test_a_picture_has_a_panel_per_class(
    size: tuple[int, int], count: int, panels: tuple[int, int]
) -> None:
    findings = [Finding(f"class {number}", 0.5, heat()) for number in range(count)]
    sheet = draw(picture(*size), "photo.jpg", findings, "a method", PLAIN)
    scale = pictures.PANEL / max(size)
    cell = max(round(size[0] * scale), pictures.NARROWEST)
    assert sheet.width == pictures.SPACING + panels[0] * (cell + pictures.SPACING)
    assert sheet.height >= panels[1] * max(1, round(size[1] * scale))

    # The first panel is the image itself.
    corner = (pictures.SPACING, pictures.SPACING)
    width, height = (max(1, round(side * scale)) for side in size)
    panel = sheet.crop((*corner, corner[0] + width, corner[1] + height))
    expected = picture(*size).resize(panel.size, Image.Resampling.LANCZOS)
    assert np.array_equal(np.asarray(panel), np.asarray(expected))


def test_texts_are_those_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(
        pictures.ImageDraw.ImageDraw, "text", lambda self, at, text, *_: written.append(text)
    )
    finding = Finding("a very long name of a class that nobody could read", 0.98765, heat())
    draw(picture(), "photo.jpg", [finding], "gradient times attention", PLAIN)
    assert written[:2] == ["photo.jpg", ""]
    assert written[2].startswith("a very long name")
    assert written[2].endswith("...")
    assert written[3] == "0.988"
    assert "Gradient times attention." in " ".join(written[4:])

    written.clear()
    draw(picture(), "photo.jpg", [], "gradient times attention", PLAIN)
    assert written == ["photo.jpg", "no class named"]


def test_letters_that_the_font_lacks_are_replaced(tmp_path: Path) -> None:
    assert PLAIN.writable("Tree 1") == "Tree 1"
    assert PLAIN.writable("cafe\u0301 \u65e5\u672c \n \udcff") == "cafe ?? ? ?"
    with pytest.raises(ConfigError, match=r"^--font .*x\.ttf: not a font"):
        Typeface(str(tmp_path / "x.ttf"))

    # matplotlib brings a font that has more letters.
    matplotlib = pytest.importorskip("matplotlib")
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    assert (
        Typeface(str(file)).writable("\u0434\u043e\u043c caf\u00e9")
        == "\u0434\u043e\u043c caf\u00e9"
    )


def test_two_images_have_two_names() -> None:
    odd = Path(os.fsdecode(b"a/\xff\n.png"))
    paths = [Path("a/x.png"), Path("b/x.png"), Path("a/x.jpg"), odd, Path("a/?.png")]
    paths += [Path("a") / f"{'long' * 60}{end}.png" for end in "12"]
    names = [file_name(path) for path in paths]
    assert len(set(names)) == len(names)
    assert names[0].startswith("x-")
    assert names[3].startswith("??-")
    for name in names:
        assert len(name.encode("utf-8")) < 255
        assert name.endswith(".jpg")
        assert name.isprintable()
    assert file_name(Path("a/x.png")) == file_name(Path.cwd() / "a" / "x.png")


def test_a_picture_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.jpg"
    save(picture(), path)
    with Image.open(path) as stored:
        assert (stored.format, stored.size) == ("JPEG", (40, 30))
    assert list(path.parent.iterdir()) == [path]

    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*file/x\.jpg"):
        save(picture(), tmp_path / "file" / "x.jpg")
