"""The functions of the page and of the endpoint, without a server."""

from collections.abc import Callable
from typing import Any

import networks
import pytest

pytest.importorskip("gradio", reason="needs the extra demo")

from gradio.exceptions import Error

from mldec.demo.answering import Answerer, Answers, Photo
from mldec.demo.page import OWN, SLIDER, build, endpoint
from mldec.demo.shelf import Shelf
from mldec.inference.engine import ExportedEngine, TorchEngine

Make = Callable[..., Photo]


class Page:
    """A page, its functions by their names, and the visible components by their labels."""

    def __init__(self, engine: Any, vectors: str | None = None) -> None:
        self.answerer = Answerer(engine, vectors)
        self.uploads: Shelf[Photo] = Shelf(10**6, 60)
        self.kept: Shelf[Answers] = Shelf(10**6, 60)
        self.blocks = build(self.answerer, self.uploads, self.kept, "<b>best.pt</b>")
        self.functions = {fn.fn.__name__: fn for fn in self.blocks.fns.values()}
        self.visible = {
            block.label: block
            for block in self.blocks.blocks.values()
            if getattr(block, "label", None) and block.visible
        }

    def run(self, name: str, *arguments: Any) -> Any:
        return self.functions[name].fn(*arguments)

    def sent(self, *photos: Photo) -> list[dict[str, str]]:
        return [{"upload": self.uploads.add(photo, len(photo.content))} for photo in photos]


def test_photos_are_answered_and_then_seen_at_another_threshold(
    engine: TorchEngine, photo: Make
) -> None:
    page = Page(engine)
    cleared, token, html = page.run("add", page.sent(photo(1)), OWN, 0.5, False, "")
    assert cleared is None
    assert page.uploads.used == 0
    assert page.kept.used > 0
    assert html.count("<article") == 1
    assert "left:55.0%" not in page.run("redraw", token, SLIDER, 0.45, False)
    assert "left:45.0%" in page.run("redraw", token, SLIDER, 0.45, False)
    assert page.run("redraw", token, OWN, 0.5, False) == html
    source, moved = page.run("slide", token, 0.75, True)
    assert source == SLIDER
    assert "left:75.0%" in moved
    assert "<figure>" in moved


def test_what_is_no_longer_kept_is_told(engine: TorchEngine) -> None:
    with pytest.raises(Error, match="the photos are no longer kept: drop them again"):
        Page(engine).run("redraw", "gone", OWN, 0.5, False)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("add", ([{"path": "/etc/passwd"}], OWN, 0.5, False, "")),
        ("add", ([], SLIDER, 0.5, False, "")),
        ("add", (None, None, None, None, None)),
    ],
)
def test_wrong_requests_of_the_page_are_told(
    engine: TorchEngine, function: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(Error, match="photo"):
        Page(engine).run(function, *arguments)


def test_a_threshold_is_a_number(engine: TorchEngine, photo: Make) -> None:
    page = Page(engine)
    _, token, _ = page.run("add", page.sent(photo(1)), OWN, 0.5, False, "")
    for wrong in ("0.5", True, [0.5]):
        with pytest.raises(Error, match=r"threshold: .* is not a number"):
            page.run("redraw", token, SLIDER, wrong, False)


def test_each_model_has_the_controls_that_it_needs(
    engine: TorchEngine, zero_shot: TorchEngine, exported: ExportedEngine, vectors: str
) -> None:
    threshold, heat = "Threshold for all classes", "Show where the model looked"
    controls = {"Thresholds", threshold, heat, "Classes"}

    def shown(page: Page) -> set[str]:
        return controls & page.visible.keys()

    assert shown(Page(engine)) == {"Thresholds", threshold, heat}
    assert shown(Page(zero_shot)) == {threshold, heat}
    assert shown(Page(zero_shot, vectors)) == {threshold, heat, "Classes"}
    assert shown(Page(exported)) == {"Thresholds", threshold}
    exclusive = TorchEngine(networks.loaded("gap", exclusive=True))
    assert shown(Page(exclusive)) == {heat}


def texts(page: Page) -> str:
    values = [getattr(block, "value", None) for block in page.blocks.blocks.values()]
    return "\n".join(value for value in values if isinstance(value, str))


def test_the_page_says_what_the_model_lacks(
    engine: TorchEngine, zero_shot: TorchEngine, exported: ExportedEngine
) -> None:
    assert "&lt;b&gt;best.pt&lt;/b&gt;" in texts(Page(engine))
    assert "7 classes, any number per photo: thing 0, thing 1" in texts(Page(engine))
    assert "not calibrated" not in texts(Page(engine))
    assert "not calibrated" in texts(Page(zero_shot))
    assert "Start it with --vectors FILE" in texts(Page(zero_shot))
    assert "An exported file has no heat maps" in texts(Page(exported))


def test_typed_classes_replace_those_of_the_model(
    zero_shot: TorchEngine, photo: Make, vectors: str
) -> None:
    page = Page(zero_shot, vectors)
    _, token, _ = page.run("add", page.sent(photo(1)), SLIDER, 0.5, False, "")
    renewed, html = page.run("rescore", token, SLIDER, 0.5, False, "zebra, red_<i>")
    assert "zebra" in html
    assert "red_&lt;i&gt;" in html
    assert "thing" not in html
    assert "thing" in page.run("rescore", renewed, SLIDER, 0.5, False, "")[1]
    with pytest.raises(Error, match="&lt;unicorn&gt;"):
        page.run("rescore", renewed, SLIDER, 0.5, False, "<unicorn>")


def test_only_the_endpoint_is_public(engine: TorchEngine) -> None:
    page = Page(engine)
    public = {fn.api_name for fn in page.blocks.fns.values() if fn.api_visibility == "public"}
    assert public == {"answer"}
    assert {fn.concurrency_limit for fn in page.blocks.fns.values()} == {"default", 1, 4}
    alone = [page.functions[name].concurrency_id for name in ("add", "rescore", "answer")]
    assert alone == ["model"] * 3


def test_the_endpoint_gives_rows_as_predict_does(engine: TorchEngine, photo: Make) -> None:
    page = Page(engine)
    answer = endpoint(page.answerer, page.uploads)
    bad = Photo("x.jpg", b"text")
    first, second = answer(page.sent(photo(1), bad), None, 3, "", True)
    assert first["image"] == "1.png"
    assert len(first["predictions"]) == 3
    best = first["predictions"][0]
    assert set(best) == {"name", "score", "threshold", "present", "heat"}
    assert best["score"] >= first["predictions"][1]["score"]
    assert second["image"] == "x.jpg"
    assert second["error"].startswith("not an image")
    [row] = answer(page.sent(photo(1)), threshold=0)
    assert all(item["present"] and "heat" not in item for item in row["predictions"])
