"""Templates, embedded images and matplotlib figures for HTML pages and charts.

matplotlib is optional (`pip install -e '.[plot]'`), so it is imported inside functions.
"""

import base64
import io
import re
import warnings
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template
from PIL import Image

from mldec.errors import UserError, log, naming_errors, visible, writing
from mldec.names import format_list

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
SMALL = 7  # font size of names and captions in points
NAME_LENGTH = 28  # maximum length of a name in a chart


def template(package: str, name: str, **filters: Any) -> Template:
    """Return a template of a package that escapes HTML and control characters."""
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
    """Encode an image as a data URL, with the options of `Image.save`."""
    content = io.BytesIO()
    image.save(content, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def new_figure(*, width: float, height: float) -> "Figure":
    """Return an empty figure with the Agg backend; width and height are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_title(axes: "Axes", title: str) -> None:
    """Set the title of a chart without math markup."""
    axes.set_title(visible(title), fontsize=10, parse_math=False)


def shorten(name: str) -> str:
    """Shorten a name for a chart."""
    name = visible(name)
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def save(figure: "Figure", path: Path) -> None:
    """Save a figure in the format of the file extension."""
    content = io.BytesIO()
    remedy = "name a file .png, .svg or .pdf"
    with naming_errors(path, UserError, remedy=remedy), writing(path):
        with warnings.catch_warnings(record=True) as caught:
            figure.savefig(content, format=path.suffix.lower().removeprefix("."))
        path.write_bytes(content.getvalue())

    # Characters that are missing in the font are drawn as boxes, with a warning for each.
    messages = "\n".join(str(warning.message) for warning in caught)
    numbers = re.findall(r"Glyph (\d+) .* missing from", messages)
    missing = [chr(int(number)) for number in dict.fromkeys(numbers)]
    if missing:
        fault = f"the font has no glyphs for {format_list(missing)}"
        log.info(f"{path}: {fault}; add another font to font.family in a file matplotlibrc")
