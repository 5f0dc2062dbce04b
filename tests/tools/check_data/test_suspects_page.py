"""The page of pictures: one well-formed file, in which every text is escaped."""

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import opened
from PIL import Image

from mldec.check_data.label_errors import Suspect, page

EVIL = '<script>alert("&")</script>\'\x1b[31m\n\udcff'
SHOWN = '<script>alert("&")</script>\'?[31m??'
VOID = ("meta", "img")


class Parser(HTMLParser):
    """Collect tags, texts and attributes; a tag that closes another one is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def suspect(rank: int, *, present: bool = True, name: str = "dog", image: str = "a.jpg") -> Suspect:
    return Suspect(rank, image, name, present, 0.12345, suspected=rank == 1)


def parsed(text: str) -> Parser:
    parser = Parser()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


def test_pairs_are_listed_with_their_pictures() -> None:
    picture = Image.new("RGB", (1000, 500), (200, 0, 0))
    pairs = [suspect(1, name="dog"), suspect(2, name="cat", present=False, image="b/c.png")]
    parser = parsed(
        page("Two of them", {"One": [(pairs[0], picture)], "Other": [(pairs[1], picture)]})
    )

    text = " ".join("".join(parser.texts).split())
    assert "Two of them One 1." in text
    assert text.index("Other") < text.index("2. cat")
    assert "1. dog is labelled present; present with probability 0.123" in text
    assert "2. cat is labelled absent; present with probability 0.123" in text
    items = [attributes for tag, attributes in parser.tags if tag == "li"]
    assert items == [{"class": "suspected"}, {}]

    images = [attributes for tag, attributes in parser.tags if tag == "img"]
    assert [image["alt"] for image in images] == ["a.jpg", "b/c.png"]
    for image in images:
        head, _, content = str(image["src"]).partition(",")
        assert head == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(content, validate=True))) as small:
            assert (small.format, small.size) == ("JPEG", (240, 120))
    assert picture.size == (1000, 500)


def test_a_page_asks_for_nothing_and_fits_a_telephone() -> None:
    text = page("none", {"All": [(suspect(1), Image.new("RGB", (9, 6)))]})
    tags = {tag for tag, _ in parsed(text).tags}
    assert not tags & {"script", "link", "iframe"}
    assert "http" not in text
    assert (
        "meta",
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    ) in parsed(text).tags


@pytest.mark.slow
@pytest.mark.parametrize(("width", "columns"), [(400, 2), (1600, 8)])
def test_a_browser_shows_all_pictures_side_by_side(
    tmp_path: Path, width: int, columns: int
) -> None:
    long_name = f"{'a_very_long_folder_' * 20}/photo.jpg"
    pairs = [
        (suspect(rank, image=long_name), Image.new("RGB", (300, 200), (200, 0, 0)))
        for rank in range(1, 21)
    ]
    file = tmp_path / "page.html"
    file.write_text(page("Twenty pairs", {"All": pairs}), encoding="utf-8")

    with opened(file, width=width) as browser:
        pictures = browser.find_elements("tag name", "img")
        assert {picture.get_property("naturalWidth") for picture in pictures} == {240}
        assert sum(picture.location["y"] == pictures[0].location["y"] for picture in pictures) == (
            columns
        )

        # Nothing is wider than the window, and nothing went wrong.
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []


@pytest.mark.parametrize("place", ["summary", "heading", "name", "image"])
def test_text_from_outside_is_escaped(place: str) -> None:
    words = {"name": "dog", "image": "a.jpg", place: EVIL}
    pair = suspect(1, name=words["name"], image=words["image"])
    sections = {words.get("heading", "All"): [(pair, Image.new("RGB", (9, 6)))]}
    text = page(words.get("summary", "all"), sections)

    parser = parsed(text)
    text.encode("utf-8")
    assert "script" not in {tag for tag, _ in parser.tags}
    assert SHOWN in "".join(parser.texts)
    if place == "image":
        assert [attributes["alt"] for tag, attributes in parser.tags if tag == "img"] == [SHOWN]


def test_a_page_without_pictures_is_a_page() -> None:
    assert "li" not in {tag for tag, _ in parsed(page("nothing", {"None": []})).tags}
