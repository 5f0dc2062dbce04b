"""What all charts share: the format of the file, and what is refused before any work."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from mldec.errors import ConfigError, DataError
from mldec.figures import NAME_LENGTH, check_format, new_figure, require_matplotlib, save, shorten


def test_the_suffix_says_the_format(tmp_path: Path) -> None:
    figure = new_figure(width=3, height=2)
    for name, head in (("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")):
        check_format("--plot", name)
        save(figure, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
    assert Image.open(tmp_path / "a.png").size == (300, 200)


@pytest.mark.parametrize("name", ["a.jpg", "a", ".png", "a.png.txt"])
def test_another_suffix_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--plot .*must end in \.png, \.svg, \.pdf"):
        check_format("--plot", name)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write .*nowhere"):
        save(new_figure(width=1, height=1), tmp_path / "nowhere" / "a.png")


def test_matplotlib_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib("--out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--out: .*pip install .mldec\[plot\]"):
        require_matplotlib("--out")


def test_names_are_shortened_and_printable() -> None:
    assert shorten("short") == "short"
    assert shorten("x" * 99) == "x" * (NAME_LENGTH - 1) + "\u2026"
    assert shorten("a\nb") == "a?b"
