"""What all charts share: matplotlib, an empty figure, texts as they are, and the file.

matplotlib is optional (`pip install mldec[plot]`), so it is imported by the functions that draw,
and never through pyplot, whose list of open figures would be a global state.
"""

import importlib.util
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from mldec.errors import ConfigError, visible, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
SMALL = 7  # points, the font size of names and captions
NAME_LENGTH = 28  # characters of a name that are shown
FORMATS = (".png", ".svg", ".pdf")


def require_matplotlib(option: str) -> None:
    """Refuse an option such as "--out" if charts cannot be drawn, before the work for them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option}: the charts need matplotlib, which is not installed; "
            f"run pip install -e '.[plot]'"
        )


def check_format(option: str, target: str) -> None:
    """Refuse an option whose file has a suffix of no format."""
    if Path(target).suffix.lower() not in FORMATS:
        raise ConfigError(
            f"{option} {target}: the name must end in {', '.join(FORMATS)}, which says the format"
        )


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
    with warnings.catch_warnings():
        # A letter that the font lacks is drawn as an empty box; a warning per letter helps nobody.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(content, format=path.suffix.lower().removeprefix("."))

    with writing(path):
        path.write_bytes(content.getvalue())
