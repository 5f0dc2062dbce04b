"""A page of the pictures whose labels are most likely wrong: one HTML file without any other."""

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from PIL import Image

from mldec.errors import visible

THUMBNAIL = 240  # pixels of the longer side
QUALITY = 80  # of the JPEG files

_STYLE = """
body { margin: 1rem; font: 16px/1.4 system-ui, sans-serif; color: #222; background: #fff; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: 1rem;
     margin: 0; padding: 0; list-style: none; }
img { display: block; width: 100%; height: 10rem; object-fit: contain; background: #eee; }
p { margin: 0.2rem 0; overflow-wrap: anywhere; }
small { color: #555; }
.suspected b { color: #a40000; }
"""


@dataclass(frozen=True)
class Suspect:
    """One pair of an image and a class on the page.

    Attributes:
        rank: from 1, the most suspicious pair.
        image: its path.
        class_name: of the pair.
        present: whether the label says that the image shows the class.
        probability: that it does, as the model says.
        suspected: whether confident learning counts the label as wrong.
    """

    rank: int
    image: str
    class_name: str
    present: bool
    probability: float
    suspected: bool


def page(summary: str, sections: Mapping[str, Iterable[tuple[Suspect, Image.Image]]]) -> str:
    """Return the page.

    Args:
        summary: one sentence above the pictures.
        sections: under each heading pairs and the pictures of their images, in their order.
    """
    lists = "\n".join(_section(heading, suspects) for heading, suspects in sections.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Labels that may be wrong</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Labels that may be wrong</h1>
<p>{_text(summary)}</p>
{lists}
</body>
</html>
"""


def _section(heading: str, suspects: Iterable[tuple[Suspect, Image.Image]]) -> str:
    """Return a heading and the list of its pairs."""
    items = "\n".join(_item(suspect, picture) for suspect, picture in suspects)
    return f"<h2>{_text(heading)}</h2>\n<ol>\n{items}\n</ol>"


def _item(suspect: Suspect, picture: Image.Image) -> str:
    """Return the list item of a pair."""
    label = "present" if suspect.present else "absent"
    name = _text(suspect.class_name)
    mark = ' class="suspected"' if suspect.suspected else ""
    return (
        f"<li{mark}>"
        f'<img src="{_data_uri(picture)}" alt="{_text(suspect.image)}">'
        f"<p>{suspect.rank}. <b>{name}</b> is labelled {label}; present with probability "
        f"{suspect.probability:.3f}</p>"
        f"<p><small>{_text(suspect.image)}</small></p>"
        f"</li>"
    )


def _data_uri(picture: Image.Image) -> str:
    """Return a small copy of a picture as the text of a JPEG file."""
    small = picture.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))

    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _text(text: str) -> str:
    """Return text for HTML: escaped, with `?` for control characters and what is not Unicode."""
    return escape(visible(text))
