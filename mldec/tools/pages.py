"""What pages and charts share: templates, pictures inside of a page, and figures of matplotlib.

matplotlib is optional (`pip install -e '.[plot]'`): it is imported by the functions that draw.
"""

import base64
import io
import warnings
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template
from PIL import Image

from mldec.errors import UserError, naming_errors, visible, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
SMALL = 7  # points, the font size of names and captions
NAME_LENGTH = 28  # characters of a name that are shown


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


def new_figure(*, width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches, which the Agg backend draws."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_title(axes: "Axes", title: str) -> None:
    """Write the title of a chart as it is, without formulas."""
    axes.set_title(visible(title), fontsize=10, parse_math=False)


def shorten(name: str) -> str:
    """Return a name as it is printed in a chart."""
    name = visible(name)
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def save(figure: "Figure", path: Path) -> None:
    """Write a figure, in the format that the suffix of the file names."""
    content = io.BytesIO()
    remedy = "name a file .png, .svg or .pdf"
    with naming_errors(path, UserError, remedy=remedy), writing(path), warnings.catch_warnings():
        # A letter that the font lacks is drawn as an empty box; a warning per letter helps nobody.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(content, format=path.suffix.lower().removeprefix("."))
        path.write_bytes(content.getvalue())
