"""The cards of the page: what they show, and what cannot get into them."""

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace

import networks
import pytest
import torch
from PIL import Image

from mldec.data.base import Classes
from mldec.demo.answering import Answerer, Photo
from mldec.demo.cards import BARS, HEAT_MAPS, MOST_BARS, render
from mldec.inference.engine import TorchEngine

Make = Callable[..., Photo]
HOSTILE = "<img src=x onerror=alert(1)>{{ 7 * 7 }}"


def texts(html: str, css_class: str) -> list[str]:
    return re.findall(rf'<\w+ class="{css_class}">([^<]*)<', html)


def test_a_card_shows_the_best_classes_and_their_thresholds(
    engine: TorchEngine, photo: Make
) -> None:
    answerer = Answerer(engine)
    answers = answerer.answer([photo(1), Photo("x.jpg", b"text")])
    values = torch.tensor([0.1, 0.9, 0.4, 0.8, 0.5, 0.3, 0.2])
    first = replace(answers.photos[0], scores=values)
    answers = replace(answers, photos=(first, answers.photos[1]))
    html = render(answerer, answers, 0.8, heat=False)

    assert html.count("<article") == 2
    assert texts(html, "name") == ["✓ thing 1", "✓ thing 3", "thing 4", "thing 2", "thing 5"]
    assert texts(html, "score") == ["0.900", "0.800", "0.500", "0.400", "0.300"]
    assert re.findall(r'"fill" style="width:([\d.]+)%', html) == [
        "90.0",
        "80.0",
        "50.0",
        "40.0",
        "30.0",
    ]
    assert re.findall(r'"mark" style="left:([\d.]+)%', html) == ["80.0"] * BARS
    assert "No answer: not an image, or none of JPEG" in html

    own = render(answerer, answers, None, heat=False)
    marks = re.findall(r'"mark" style="left:([\d.]+)%', own)
    thresholds = networks.CALIBRATION.thresholds
    assert marks == [f"{100 * thresholds[index]:.1f}" for index in (1, 3, 4, 2, 5)]


def test_the_picture_is_inside(engine: TorchEngine, photo: Make) -> None:
    answerer = Answerer(engine)
    html = render(answerer, answerer.answer([photo(1, 900, 600)]), None, heat=False)
    [content] = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    assert Image.open(io.BytesIO(base64.b64decode(content))).size == (400, 267)
    assert re.findall(r'src="(?!data:)', html) == []


def test_many_present_classes_are_counted(photo: Make) -> None:
    loaded = networks.loaded("words")
    names = tuple(f"class {number}" for number in range(20))
    many = Classes(names, queries=torch.randn(20, networks.WIDTH))
    answerer = Answerer(TorchEngine(replace(loaded, classes=many)))
    answers = answerer.answer([photo(1)])
    html = render(answerer, answers, 0, heat=False)
    assert len(texts(html, "name")) == MOST_BARS
    assert "5 more classes are present." in html
    html = render(answerer, answers, 1, heat=False)
    assert len(texts(html, "name")) == BARS
    assert "No class reaches its threshold." in html


def test_heat_maps_are_of_present_classes_or_of_the_best_one(
    engine: TorchEngine, photo: Make
) -> None:
    answerer = Answerer(engine)
    answers = answerer.answer([photo(1)])
    html = render(answerer, answers, 0, heat=True)
    assert html.count("<figure>") == HEAT_MAPS
    assert answerer.method(answers)[1:] in html

    best = texts(html, "name")[0].removeprefix("✓ ")
    html = render(answerer, answers, 1, heat=True)
    assert re.findall(r"<figcaption>([^<]*)<", html) == [best]
    assert "<figure>" not in render(answerer, answers, 1, heat=False)


def test_one_label_has_no_thresholds(photo: Make) -> None:
    answerer = Answerer(TorchEngine(networks.loaded("gap", exclusive=True)))
    html = render(answerer, answerer.answer([photo(1)]), 0.9, heat=False)
    assert "mark" not in html
    assert "threshold" not in html
    assert html.count("✓") == 1


def test_names_are_escaped(photo: Make, engine: TorchEngine) -> None:
    names = (HOSTILE, *engine.classes.names[1:])
    loaded = replace(engine.loaded, classes=replace(engine.classes, names=names), calibration=None)
    answerer = Answerer(TorchEngine(loaded))
    answers = answerer.answer([photo(1, name=HOSTILE), Photo(HOSTILE, b"")])
    html = render(answerer, answers, 0, heat=True)
    assert "<img src=x" not in html
    assert html.count("{{ 7 * 7 }}") >= 4
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_no_photo_is_no_card(engine: TorchEngine, threshold: float | None) -> None:
    from mldec.demo.answering import Answers

    assert render(Answerer(engine), Answers(engine, ()), threshold, heat=False).strip() == ""
