"""The report as one HTML file: it works without a network and without any other file.

Texts come from a Jinja2 template, which escapes them. Numbers and pictures go into a block of JSON,
from which the script `page.js` fills tables and draws charts with Plotly. A content security policy
allows these scripts alone, by their hashes, and no request: what a name of a class or of a file
contains cannot run.
"""

import base64
import hashlib
import io
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from PIL import Image
from plotly.offline import get_plotlyjs

from mldec.errors import visible
from mldec.report.content import Content, Histograms
from mldec.report.meanings import is_count, meaning

DIGITS = 9  # significant ones of a number on the page: counts up to 10^9 are exact
HEAT_COLOUR = (230, 159, 0)  # orange of Okabe and Ito, which no colour-blind person takes for grey
HEAT_OPACITY = 0.8  # at the maximum of a heat map
TABLE_CLASSES = 30  # up to so many, the co-occurrence is also written as a table


def page(content: Content) -> str:
    """Return the page as HTML; write it as UTF-8.

    Control characters and halves of surrogate pairs in names are shown as `?`.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    environment.filters["meaning"] = meaning
    environment.policies["json.dumps_kwargs"] = {}  # which would sort columns and metrics by name
    template = environment.from_string(_read("page.html.j2"))

    scripts = [get_plotlyjs(), _read("page.js")]
    return template.render(
        report=_plain(_texts(content)),
        settings=[visible(line) for line in content.settings.splitlines()],
        data=_data(content),
        table_classes=TABLE_CLASSES,
        style=Markup(_read("page.css")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[_hash(script) for script in scripts],
    )


def _read(name: str) -> str:
    """Return a text file that lies beside this module."""
    return resources.files("mldec.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the source expression that allows a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _texts(content: Content) -> dict[str, Any]:
    """Return what the template writes, without what only the script needs."""
    fields = ("title", "summary", "metrics", "exclusive", "heat_method", "unreadable", "notes")
    comparison = content.comparison
    return {
        **{name: getattr(content, name) for name in fields},
        "metrics": {name: asdict(interval) for name, interval in content.metrics.items()},
        "num_classes": len(content.table.names),
        "num_curves": len(content.curves),
        "num_suspects": len(content.suspects),
        "co_occurrence": _co_occurrence(content),
        "comparison": comparison
        and {
            **{name: getattr(comparison, name) for name in ("other", "p_value", "test")},
            **{name: getattr(comparison, name) for name in ("fixed", "broken")},
            "metrics": {
                name: [asdict(interval) for interval in intervals]
                for name, intervals in comparison.metrics.items()
            },
            "num_changed": len(comparison.changed),
        },
    }


def _data(content: Content) -> dict[str, Any]:
    """Return what the script draws, ready for JSON."""
    comparison = content.comparison
    return _plain(
        {
            "exclusive": content.exclusive,
            "classes": asdict(content.table),
            "histograms": _histograms(content.histograms),
            "curves": [asdict(curve) for curve in content.curves],
            "metrics": {
                name: asdict(interval)
                for name, interval in content.metrics.items()
                if not is_count(name)
            },
            "coOccurrence": _co_occurrence(content),
            "pictures": [asdict(picture) for picture in content.pictures],
            "examples": [
                {**asdict(example), "heat": None if example.heat is None else _heat(example.heat)}
                for example in content.examples
            ],
            "suspects": [asdict(suspect) for suspect in content.suspects],
            "differences": comparison
            and [asdict(difference) for difference in comparison.per_class],
            "changed": [asdict(image) for image in comparison.changed] if comparison else [],
        }
    )


def _co_occurrence(content: Content) -> dict[str, Any]:
    """Return the names of the classes and both matrices as lists."""
    matrices = content.co_occurrence
    return {
        "names": [content.table.names[index] for index in matrices.classes],
        "labels": matrices.labels.tolist(),
        "predictions": matrices.predictions.tolist(),
    }


def _histograms(histograms: Histograms) -> dict[str, Any]:
    """Return counts and mean scores of all bins, compressed: most bins of most classes are empty.

    The mean score of a bin becomes its position between the edges of the bin in 255 steps, which is
    finer than a chart can show, and needs one byte.
    """
    lower, upper = histograms.edges[:-1], histograms.edges[1:]
    counts = histograms.positives + histograms.negatives
    means = histograms.score_sums / np.maximum(counts, 1)
    positions = np.where(counts > 0, (means - lower) / (upper - lower), 0)

    return {
        "edges": histograms.edges.tolist(),
        "positives": _packed(histograms.positives.astype("<u4")),
        "negatives": _packed(histograms.negatives.astype("<u4")),
        "positions": _packed((255 * positions.clip(0, 1)).round().astype(np.uint8)),
    }


def _packed(array: np.ndarray) -> bytes:
    """Return the elements of an array, compressed in the format of zlib."""
    return zlib.compress(np.ascontiguousarray(array).tobytes())


def _heat(heat: np.ndarray) -> bytes:
    """Return a map uint8 [h, w] as a PNG file of one colour; the heat is its opacity."""
    pixels = np.empty((*heat.shape, 4), np.uint8)
    pixels[..., :3] = HEAT_COLOUR
    pixels[..., 3] = HEAT_OPACITY * heat

    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    """Return nested dicts and lists that JSON can hold, with text that can be shown.

    Bytes become base64, numbers that are not finite None, and control characters in text `?`.
    """
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {visible(key): _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    return value


def _number(value: float | None, name: str, sign: str = "") -> str:
    """Return a metric as text: a count without decimals, a percentage with two.

    Args:
        value: of the metric; None if it is undefined.
        name: of the metric.
        sign: "+" for a difference.
    """
    if value is None:
        return "\N{EN DASH}"
    text = f"{value:{sign}z,.0f}" if is_count(name) else f"{value:{sign}z.2f}"
    return text.replace("-", "\N{MINUS SIGN}")
