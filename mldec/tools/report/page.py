"""The report as one HTML file: it works without a network and without any other file.

Texts come from a template. Charts are Plotly figures; they go with the columns of the table into a
block of JSON, which the script `page.js` shows. A content security policy allows no request.
"""

import base64
import html
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from PIL import Image
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from mldec.errors import visible
from mldec.evaluation.output import is_count, meaning
from mldec.tools.pages import data_url, template
from mldec.tools.report.advice import Step
from mldec.tools.report.comparison import Comparison
from mldec.tools.report.examples import Example, Picture, Suspect, first_to_look_at
from mldec.tools.report.statistics import ClassTable, Histograms, Interval, Pairs
from mldec.tools.report.training import Points

HEAT_OPACITY = 0.8  # at the maximum of a heat map
MOST_DIFFERENCES = 40  # classes in the chart of differences; the rest is in the table
SCORE_GROUPS = 50  # bars of the scores of a class
NAME_LENGTH = 24  # characters of a class name beside an axis

# The colours of Okabe and Ito (2008), which no colour-blind person takes for one another.
BLUE, VERMILLION, GREY, ORANGE = "#0072B2", "#D55E00", "#6b7280", (230, 159, 0)

LAYOUT = {
    "template": "simple_white",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1f2933"},
    "margin": {"l": 56, "r": 16, "t": 28, "b": 48},
    "hovermode": "closest",
    "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
}


@dataclass(frozen=True)
class Content:
    """What a report says."""

    title: str
    summary: dict[str, str]  # checkpoint, data, images, cost and so on, by their headings
    settings: str  # the configuration as YAML
    images: int  # that are scored
    curves: dict[str, Points]  # learning curves by name; empty if there are none
    metrics: dict[str, Interval]  # in percent; numbers of classes are no percentages
    table: ClassTable
    histograms: Histograms  # of scores
    exclusive: bool  # an image has one label: the page then has no thresholds to move
    pairs: Pairs  # classes in labels and in predictions, or the confusion matrix
    heat_method: str | None  # how the maps were made, one sentence; None without maps
    pictures: dict[int, Picture]  # of examples, suspects and changes, by the rows of the images
    examples: list[Example]  # the surest first
    suspects: list[Suspect]  # most suspicious first
    unreadable: list[str]  # one message per image
    root: Path | None = None  # folder of the data: paths inside it are shown without it
    comparison: Comparison | None = None
    steps: list[Step] = field(default_factory=list)  # what to do next
    notes: list[str] = field(default_factory=list)  # what was sampled, left out or is not known


def page(content: Content) -> str:
    """Return the page as HTML; write it as UTF-8."""
    inside = f"{content.root}{os.sep}" if content.root else ""
    filters = {"number": _number, "meaning": meaning, "bounds": _bounds, "png": _png}
    filters["inside"] = lambda path: path.removeprefix(inside)
    html_page = template("mldec.tools.report", "page.html.j2", **filters)
    policies = html_page.environment.policies
    policies["json.dumps_function"] = PlotlyJSONEncoder(separators=(",", ":")).encode
    policies["json.dumps_kwargs"] = {}  # which would sort columns by name

    examples: dict[int, dict[str, list[Example]]] = {}
    for example in content.examples:
        kinds = examples.setdefault(example.class_index, {"right": [], "wrong": [], "missed": []})
        kinds[example.kind].append(example)

    names = [visible(name) for name in content.table.names]
    weakest = content.table.weakest()
    look_first = first_to_look_at(content.suspects, content.examples, weakest)
    figures = _figures(content, names)
    edges = content.histograms.edges
    data = {
        "exclusive": content.exclusive,
        "names": names,
        "columns": _columns(content),
        "thresholds": content.table.columns.get("threshold"),
        "edges": edges,
        "groups": (edges[:-1] * SCORE_GROUPS + 1e-9).astype(int),
        "positives": content.histograms.positives,
        "negatives": content.histograms.negatives,
        "figures": figures,
        "layout": _figure([], 400).layout,
        "pictures": {
            row: base64.b64encode(picture.jpeg).decode()
            for row, picture in content.pictures.items()
        },
    }
    return html_page.render(
        report=content,
        names=names,
        weakest=weakest,
        look_first=look_first,
        examples=examples,
        figures=figures,
        most_differences=MOST_DIFFERENCES,
        data=data,
        style=Markup(_read("page.css")),
        plotly=Markup(get_plotlyjs()),
        script=Markup(_read("page.js")),
    )


def _read(name: str) -> str:
    return resources.files("mldec.tools.report").joinpath(name).read_text(encoding="utf-8")


def _number(value: float, name: str, sign: str = "") -> str:
    """Return a metric as text: a count without decimals, a percentage with two."""
    if not math.isfinite(value):
        return "\N{EN DASH}"
    text = f"{value:{sign}z,.0f}" if is_count(name) else f"{value:{sign}z.2f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _bounds(interval: Interval, name: str) -> str:
    """Return the bounds of the interval of a metric as text."""
    if math.isnan(interval.low):
        return "\N{EN DASH}"
    return f"{_number(interval.low, name)} to {_number(interval.high, name)}"


def _columns(content: Content) -> list[dict[str, Any]]:
    """Return the columns of the table of classes, as the script shows them."""
    columns: list[dict[str, Any]] = []
    decimals = {"positives": 0, "threshold": 3}  # of what is no percentage
    for name, values in content.table.columns.items():
        unit = "" if name in decimals else " (%)"
        heading = f"{name[0].upper()}{name[1:]}{unit}"
        columns.append({"heading": heading, "values": values, "decimals": decimals.get(name, 1)})
        if name == "AP":
            columns[-1]["low"], columns[-1]["high"] = content.table.intervals

    if content.comparison:
        gaps = content.comparison.per_class
        heading = "AP of A \N{MINUS SIGN} B (points)"
        column = {"heading": heading, "values": [gap.value for gap in gaps]}
        bounds = {"low": [gap.low for gap in gaps], "high": [gap.high for gap in gaps]}
        columns.append(column | bounds | {"decimals": 1, "signed": True})
    return columns


def _png(heat: np.ndarray) -> str:
    """Return a map uint8 [h, w] as the address of an orange image; the heat is its opacity."""
    pixels = np.empty((*heat.shape, 4), np.uint8)
    pixels[..., :3] = ORANGE
    pixels[..., 3] = HEAT_OPACITY * heat
    return data_url(Image.fromarray(pixels, "RGBA"), "PNG", optimize=True)


def _figures(content: Content, names: list[str]) -> dict[str, go.Figure]:
    """Return the charts by the ids of their elements; the script makes those of one class."""
    figures = {"metrics-chart": _intervals(content.metrics, "percent")}
    losses = {name: points for name, points in content.curves.items() if "loss" in name}
    metrics = {name: points for name, points in content.curves.items() if name not in losses}
    if losses:
        figures["loss-chart"] = _curves(losses, "loss")
    if metrics:
        figures["metric-chart"] = _curves(metrics, "percent")

    if content.comparison:
        gaps = zip(names, content.comparison.per_class, strict=True)
        known = [(name, gap) for name, gap in gaps if math.isfinite(gap.value)]
        ranked = sorted(known, key=lambda entry: -entry[1].value)
        if len(ranked) > MOST_DIFFERENCES:
            ranked = ranked[: MOST_DIFFERENCES // 2] + ranked[-MOST_DIFFERENCES // 2 :]
        figures["differences-chart"] = _intervals(dict(ranked), "difference of AP (points)")

    if content.pairs.classes:
        shown = [names[index] for index in content.pairs.classes]
        figures["pairs-chart"] = _pairs(content.pairs, shown, exclusive=content.exclusive)
    return figures | {"calibration": _calibration(content.histograms)}


def _figure(traces: list[Any], height: int, **layout: Any) -> go.Figure:
    """Return a chart as wide as its element, and as high as so many pixels."""
    figure = go.Figure(traces, {**LAYOUT, "height": height, **layout})
    figure.update_xaxes(automargin=True, title_standoff=8)
    figure.update_yaxes(automargin=True, title_standoff=8)
    return figure


def _label(name: str) -> str:
    """Return a name of a class beside an axis; Plotly would take tags for its own."""
    return html.escape(name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…")


def _intervals(entries: Mapping[str, Interval], unit: str) -> go.Figure:
    """Draw one row per percentage: a mark with its interval, the first entry at the top."""
    names = [
        name for name, entry in entries.items() if math.isfinite(entry.value) and not is_count(name)
    ]
    shown = [entries[name] for name in names]
    above = [entry.high - entry.value for entry in shown]
    below = [entry.value - entry.low for entry in shown]
    rows = list(range(len(names)))
    marks = go.Scatter(
        x=[entry.value for entry in shown],
        y=rows,
        mode="markers",
        marker={"color": BLUE, "size": 9},
        error_x={"array": above, "arrayminus": below, "thickness": 1.5, "width": 4},
        customdata=[html.escape(name) for name in names],
        hovertemplate="%{customdata}: %{x:.2f}<extra></extra>",
    )
    labels = [_label(name) for name in names]
    xaxis = {"title": unit, "showgrid": True, "zeroline": True, "zerolinecolor": GREY}
    yaxis = {"tickvals": rows, "ticktext": labels, "range": [len(names) - 0.5, -0.5]}
    return _figure([marks], 24 * len(names) + 90, xaxis=xaxis, yaxis=yaxis)


def _curves(curves: dict[str, Points], unit: str) -> go.Figure:
    traces = []
    # There are at most two: average and raw weights, or training and validation.
    for (name, points), color in zip(curves.items(), (BLUE, VERMILLION), strict=False):
        steps, values = zip(*points, strict=True)
        marks = {"mode": "lines+markers", "line": {"color": color}}
        traces.append(go.Scatter(x=steps, y=values, name=html.escape(name), **marks))
    axes = {"xaxis": {"title": "step"}, "yaxis": {"title": unit, "showgrid": True}}
    return _figure(traces, 340, showlegend=True, **axes)


def _pairs(pairs: Pairs, names: list[str], *, exclusive: bool) -> go.Figure:
    """Draw which share of the images of each row's class is in each column.

    Of several labels, it is the share of the predictions minus that of the labels.
    """

    def shares(matrix: np.ndarray, of_classes: np.ndarray) -> np.ndarray:
        whole = np.diag(of_classes)[:, None]
        return np.where(whole > 0, 100 * matrix / np.maximum(whole, 1), np.nan)

    if exclusive:
        values = shares(pairs.predictions, pairs.labels)
        limits, scale = (0.0, 100.0), [[0, "#f3f7fb"], [1, BLUE]]
    else:
        values = shares(pairs.predictions, pairs.predictions) - shares(pairs.labels, pairs.labels)
        np.fill_diagonal(values, np.nan)
        highest = max(1.0, np.nanmax(np.abs(values), initial=0))
        limits, scale = (-highest, highest), [[0, BLUE], [0.5, "#f7f7f7"], [1, VERMILLION]]

    heatmap = go.Heatmap(
        z=values.tolist(),
        zmin=limits[0],
        zmax=limits[1],
        colorscale=scale,
        colorbar={"title": "%", "thickness": 14},
        hoverongaps=False,
        texttemplate="%{z:.0f}" if len(names) <= 12 else "",
        hovertemplate="row %{y}, column %{x}: %{z:.1f} %<extra></extra>",
    )
    labels = [_label(name) for name in names]
    cells = (52 if len(names) <= 12 else 28) * len(names)
    longest = 8 * max(map(len, labels)) + 40
    ticks = {"tickvals": list(range(len(names))), "ticktext": labels}
    axes = {"xaxis": {**ticks, "tickangle": -60}, "yaxis": {**ticks, "autorange": "reversed"}}
    margin = {"l": longest, "r": 16, "t": 28, "b": longest}
    size = longest + cells
    return _figure([heatmap], size + 70, width=size + 130, margin=margin, **axes)


def _calibration(histograms: Histograms) -> go.Figure:
    """Draw the share of positives over the mean score of all classes together."""
    images, positives, sums = (counts.sum(0) for counts in histograms.calibration_bins())
    used = images > 0
    perfect = go.Scatter(
        x=[0, 1], y=[0, 100], mode="lines", name="perfect", line={"color": GREY, "dash": "dash"}
    )
    observed = go.Scatter(
        x=(sums[used] / images[used]).tolist(),
        y=(100 * positives[used] / images[used]).tolist(),
        mode="lines+markers",
        name="all classes",
        line={"color": BLUE},
        customdata=images[used].tolist(),
        hovertemplate="mean score %{x:.3f}: %{y:.1f} % of %{customdata:,} decisions<extra></extra>",
    )
    xaxis = {"title": "score", "range": [-0.02, 1.02]}
    yaxis = {"title": "show the class (%)", "range": [-4, 104], "showgrid": True}
    return _figure([perfect, observed], 400, xaxis=xaxis, yaxis=yaxis)
