"""Pages that need no other file: HTML from templates, and pictures inside of it."""

import base64
import io
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from PIL import Image

from mldec.errors import visible


def template(package: str, name: str, **filters: Any) -> Template:
    """Return a template of a package; it escapes texts, and shows control characters as `?`."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters |= filters
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(text)


def data_url(image: Image.Image, form: str = "JPEG", **options: Any) -> str:
    """Return a picture as an address that holds its file; options are those of Pillow."""
    content = io.BytesIO()
    image.save(content, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"
