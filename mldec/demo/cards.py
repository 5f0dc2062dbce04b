"""The answers as HTML: a card per photo with its classes, their bars and heat maps.

Pictures are inside the HTML, so that no file is made for them.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template
from PIL import Image

from mldec.demo.answering import Answer, Answerer, Answers, Named, ranked, stored_or
from mldec.explain.pictures import heated

BARS = 5  # classes on a card at least, if there are so many
MOST_BARS = 15  # on a card, if more classes are present
HEAT_MAPS = 6  # on a card
HEAT_SIDE = 220  # longer side of a heat map in pixels
QUALITY = 85  # of JPEG


@dataclass(frozen=True)
class Heat:
    """A heat map over the photo, and its class."""

    name: str
    picture: str


@dataclass(frozen=True)
class Card:
    """What the page shows of a photo; pictures are data URLs."""

    name: str
    fault: str | None
    picture: str | None
    bars: Sequence[Named]
    notes: Sequence[str]
    heat: Sequence[Heat]


def render(answerer: Answerer, answers: Answers, threshold: float | None, *, heat: bool) -> str:
    """Return the cards of some photos as HTML.

    Args:
        answerer: that answered.
        answers: to show.
        threshold: of all classes; None for those of the model.
        heat: show where the model looked for the present classes, or for the most probable one.

    Raises:
        UserError: if no heat maps can be made.
    """
    thresholds = stored_or(answers.engine, threshold)
    cards = []
    for index, photo in enumerate(answers.photos):
        if photo.fault is not None:
            cards.append(Card(photo.name, photo.fault, None, [], [], []))
            continue

        classes = ranked(answers.engine, photo.scores, thresholds)
        present = sum(item.present for item in classes)
        bars = classes[: max(BARS, min(present, MOST_BARS))]
        heat_maps: list[Heat] = []
        if heat:
            shown = [item for item in classes if item.present][:HEAT_MAPS] or classes[:1]
            heat_maps = _heat(answerer, answers, index, shown)
        picture = _data_url(_picture(photo))
        cards.append(
            Card(photo.name, None, picture, bars, _notes(classes, bars, present), heat_maps)
        )

    method = ""
    if heat and any(card.heat for card in cards):
        phrase = answerer.method(answers)
        method = phrase[0].upper() + phrase[1:]
    return _template().render(cards=cards, method=method, thresholds=thresholds is not None)


def _heat(answerer: Answerer, answers: Answers, index: int, classes: Sequence[Named]) -> list[Heat]:
    """Return the heat maps of a photo for some classes."""
    picture = _picture(answers.photos[index]).copy()
    picture.thumbnail((HEAT_SIDE, HEAT_SIDE))
    maps = answerer.heat(answers, index, [item.index for item in classes])
    return [
        Heat(item.name, _data_url(heated(picture, heat_map)))
        for item, heat_map in zip(classes, maps, strict=True)
    ]


def _picture(photo: Answer) -> Image.Image:
    assert photo.picture is not None
    return photo.picture


def _notes(classes: Sequence[Named], bars: Sequence[Named], present: int) -> list[str]:
    """Return what the bars do not say."""
    if not present:
        return ["No class reaches its threshold."]
    hidden = present - sum(item.present for item in bars)
    return [f"{hidden} more classes are present."] if hidden else []


def _data_url(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("mldec.demo").joinpath("cards.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)
