"""The report as one HTML file, which works offline and without other files.

The template contains the texts. Plotly figures and table columns are in a block of JSON, which the
script `page.js` displays. A content security policy forbids all requests.
"""

import html
import math
import os
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from PIL import Image
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from mldec.errors import visible
from mldec.evaluation.output import is_count, meaning
from mldec.tools.pages import NAME_LENGTH, data_url, shorten, template
from mldec.tools.report.content import ReportContent
from mldec.tools.report.examples import MAX_DECISIONS, Example
from mldec.tools.report.statistics import ClassPairs, Histograms
from mldec.tools.report.training import Curve

HEAT_OPACITY = 0.8  # at the maximum of a heat map
MAX_DIFFERENCES = 40  # classes in the chart of differences
SCORE_BARS = 50  # bars in the chart of scores
MAX_NUMBERED = 12  # classes of a matrix chart with a number in each cell

# The colors of Okabe and Ito (2008) can be distinguished by people with color blindness.
BLUE = "#0072B2"
VERMILLION = "#D55E00"
GRAY = "#6b7280"
ORANGE = (230, 159, 0)

LAYOUT = {
    "template": "simple_white",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1f2933"},
    "paper_bgcolor": "#ffffff",
    "plot_bgcolor": "#ffffff",
    "margin": {"l": 56, "r": 16, "t": 28, "b": 48},
    "hovermode": "closest",
    "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
}


def render_page(content: ReportContent, folder: Path) -> str:
    """Return the page as HTML, with links to the images from its folder; write it as UTF-8."""
    names = [visible(name) for name in content.table.names]
    figures = charts(content, names)
    examples: dict[int, dict[str, list[Example]]] = {}
    for example in content.examples:
        kinds = examples.setdefault(example.class_index, {"right": [], "wrong": [], "missed": []})
        kinds[example.kind].append(example)

    root = f"{content.root}{os.sep}" if content.root else ""

    def inside(path: str) -> str:
        return path.removeprefix(root)

    page = template(
        "mldec.tools.report",
        "page.html.j2",
        number=format_metric,
        meaning=meaning,
        is_count=is_count,
        png=heat_image,
        inside=inside,
    )
    policies = page.environment.policies
    policies["json.dumps_function"] = PlotlyJSONEncoder(separators=(",", ":")).encode
    policies["json.dumps_kwargs"] = {}  # the default sorts keys
    data = script_data(content, names, figures)
    training = content.training
    data["training"] = [[visible(name), url] for name, url in training.thumbnails.items()]
    number_of = {name: number for number, name in enumerate(training.thumbnails)}
    data["photos"] = {}
    for row, photo in content.photos.items():
        address = link(photo.name, folder) if photo.is_file else None
        speaking = {}
        for index, found in training.speaking.get(row, {}).items():
            speaking[index] = [
                (number_of[name], value) for name, value in found if name in number_of
            ]
        added = {"name": visible(inside(photo.name)), "link": address, "speaking": speaking}
        data["photos"][row] = vars(photo) | added
    # Metrics with intervals are the main ones. Third-party evaluators may have none.
    metrics = content.metrics.items()
    tested = [(name, interval) for name, interval in metrics if math.isfinite(interval.low)]
    files = resources.files("mldec.tools.report")
    return page.render(
        report=content,
        names=names,
        weakest=content.table.weakest(),
        examples=examples,
        figures=figures,
        has_heat_maps=any(example.heat is not None for example in content.examples),
        max_differences=MAX_DIFFERENCES,
        main_metrics=tested or list(metrics),
        max_decisions=MAX_DECISIONS,
        data=data,
        style=Markup((files / "page.css").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        script=Markup((files / "page.js").read_text(encoding="utf-8")),
    )


def script_data(
    content: ReportContent, names: list[str], figures: dict[str, go.Figure]
) -> dict[str, Any]:
    """Return the data of `page.js`."""
    histograms = content.histograms
    return {
        "exclusive": content.exclusive,
        "names": names,
        "columns": table_columns(content),
        "thresholds": content.table.columns.get("threshold"),
        "edges": histograms.edges,
        "bars": (histograms.edges[:-1] * SCORE_BARS + 1e-9).astype(int),
        "positives": histograms.positives,
        "negatives": histograms.negatives,
        "figures": figures,
        "layout": new_chart([], 400).layout,
        "gallery": content.gallery,
    }


def link(path: str, folder: Path) -> str:
    """Return the address of a file relative to a folder."""
    try:
        path = os.path.relpath(path, folder)
    except ValueError:  # on another drive of Windows
        return Path(path).absolute().as_uri()
    return quote(path.replace(os.sep, "/"), errors="surrogateescape")


def format_metric(value: float, name: str, sign: str = "") -> str:
    """Format a metric: counts without decimals, percentages with two."""
    if not math.isfinite(value):
        return "\N{EN DASH}"
    text = f"{value:{sign}z,.0f}" if is_count(name) else f"{value:{sign}z.2f}"
    return text.replace("-", "\N{MINUS SIGN}")


def heat_image(heat: np.ndarray) -> str:
    """Return a heat map uint8 [h, w] as the data URL of an orange image with varying opacity."""
    pixels = np.empty((*heat.shape, 4), np.uint8)
    pixels[..., :3] = ORANGE
    pixels[..., 3] = HEAT_OPACITY * heat
    return data_url(Image.fromarray(pixels, "RGBA"), "PNG")


def table_columns(content: ReportContent) -> list[dict[str, Any]]:
    """Return the columns of the table of classes for the script."""
    columns: list[dict[str, Any]] = []
    decimals = {"positives": 0, "threshold": 3}  # other columns are percentages
    for name, values in content.table.columns.items():
        unit = "" if name in decimals else " (%)"
        heading = f"{name[0].upper()}{name[1:]}{unit}"
        columns.append({"heading": heading, "values": values, "decimals": decimals.get(name, 1)})
        if name == "AP":
            columns[-1]["low"], columns[-1]["high"] = content.table.intervals

    if content.comparison:
        gaps, low, high = content.comparison.per_class
        heading = "AP of A \N{MINUS SIGN} B (points)"
        column = {"heading": heading, "values": gaps, "low": low, "high": high}
        columns.append(column | {"decimals": 1, "signed": True})
    return columns


def charts(content: ReportContent, names: list[str]) -> dict[str, go.Figure]:
    """Return the charts by the ids of their elements. The script adds the charts of one class."""
    figures = {}
    losses = {name: curve for name, curve in content.curves.items() if "loss" in name}
    metrics = {name: curve for name, curve in content.curves.items() if "loss" not in name}
    if losses:
        figures["loss-chart"] = curve_chart(losses, "loss")
    if metrics:
        figures["metric-chart"] = curve_chart(metrics, "percent")
        # The highest value is the best evaluation of the run.
        epoch, _ = max(chain(*metrics.values()), key=lambda point: point[1])
        line = {"color": GRAY, "dash": "dot", "width": 1.5}  # the default width is 0
        label = {"text": f"best: epoch {epoch:g}"}
        chart = figures["metric-chart"]
        chart.add_vline(epoch, line=line, annotation=label, annotation_position="top")

    if content.comparison:
        values = content.comparison.per_class[0]
        order = np.argsort(-values, kind="stable")[: np.isfinite(values).sum()]
        if len(order) > MAX_DIFFERENCES:
            order = np.delete(order, slice(MAX_DIFFERENCES // 2, -MAX_DIFFERENCES // 2))
        gaps = content.comparison.per_class[:, order]
        figures["differences-chart"] = difference_chart([names[k] for k in order], gaps)

    if content.pairs.classes:
        pair_names = [names[index] for index in content.pairs.classes]
        figures["pairs-chart"] = pair_chart(content.pairs, pair_names, content.exclusive)
    figures["calibration"] = calibration_chart(content.histograms)
    return figures


def new_chart(traces: list[Any], height: int, **layout: Any) -> go.Figure:
    """Return a chart with a height in pixels and the width of its element."""
    figure = go.Figure(traces, {**LAYOUT, "height": height, **layout})
    figure.update_xaxes(automargin=True, title_standoff=8)
    figure.update_yaxes(automargin=True, title_standoff=8)
    return figure


def axis_labels(names: list[str]) -> list[str]:
    """Return shortened names, escaped because Plotly interprets HTML tags."""
    return [html.escape(shorten(name)) for name in names]


def difference_chart(names: list[str], gaps: np.ndarray) -> go.Figure:
    """Draw one row per class with its value, low and high bound, in `gaps` [3, K]."""
    values, low, high = gaps
    rows = list(range(len(names)))
    markers = go.Scatter(
        x=values.tolist(),
        y=rows,
        mode="markers",
        marker={"color": BLUE, "size": 9},
        error_x={"array": high - values, "arrayminus": values - low, "thickness": 1.5, "width": 4},
        customdata=[html.escape(name) for name in names],
        hovertemplate="%{customdata}: %{x:.2f}<extra></extra>",
    )
    unit = "difference of AP (points)"
    xaxis = {"title": unit, "showgrid": True, "zeroline": True, "zerolinecolor": GRAY}
    yaxis = {"tickvals": rows, "ticktext": axis_labels(names), "range": [len(names) - 0.5, -0.5]}
    return new_chart([markers], 24 * len(names) + 90, xaxis=xaxis, yaxis=yaxis)


def curve_chart(curves: dict[str, Curve], unit: str) -> go.Figure:
    """Draw at most two learning curves."""
    traces = []
    for (name, curve), color in zip(curves.items(), (BLUE, VERMILLION), strict=False):
        epochs, values = zip(*curve, strict=True)
        style = {"mode": "lines+markers", "line": {"color": color}}
        traces.append(go.Scatter(x=epochs, y=values, name=html.escape(name), **style))
    yaxis = {"title": unit, "showgrid": True}
    return new_chart(traces, 340, showlegend=True, xaxis={"title": "epoch"}, yaxis=yaxis)


def pair_chart(pairs: ClassPairs, names: list[str], exclusive: bool) -> go.Figure:
    """Draw the confusion matrix, or the difference of predicted and labeled co-occurrence."""

    def shares(matrix: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return np.where(counts > 0, 100 * matrix / np.maximum(counts, 1), np.nan)

    # Each row contains percentages of the images of its class.
    labeled = shares(pairs.labels, pairs.labeled)
    if exclusive:
        values = shares(pairs.predictions, pairs.labeled)
        lowest = 0.0
        highest = 100.0
        colors = [[0, "#f3f7fb"], [1, BLUE]]
    else:
        values = shares(pairs.predictions, pairs.predicted) - labeled
        np.fill_diagonal(values, np.nan)
        highest = max(1.0, np.nanmax(np.abs(values), initial=0))
        lowest = -highest
        colors = [[0, BLUE], [0.5, "#f7f7f7"], [1, VERMILLION]]

    is_small = len(names) <= MAX_NUMBERED
    heatmap = go.Heatmap(
        z=values.tolist(),
        zmin=lowest,
        zmax=highest,
        colorscale=colors,
        colorbar={"title": "%", "thickness": 14},
        hoverongaps=False,
        texttemplate="%{z:.0f}" if is_small else "",
        hovertemplate="row %{y}, column %{x}: %{z:.1f} %<extra></extra>",
    )
    side = (52 if is_small else 28) * len(names) + 8 * NAME_LENGTH
    ticks = {"tickvals": list(range(len(names))), "ticktext": axis_labels(names)}
    xaxis = {**ticks, "tickangle": -60}
    yaxis = {**ticks, "autorange": "reversed"}
    return new_chart([heatmap], side, width=side + 100, xaxis=xaxis, yaxis=yaxis)


def calibration_chart(histograms: Histograms) -> go.Figure:
    """Draw the share of positives over the mean score, for all classes together."""
    images, positives, sums = histograms.calibration_bins().sum(1)
    used = images > 0
    dashed = {"color": GRAY, "dash": "dash"}
    perfect = go.Scatter(x=[0, 1], y=[0, 100], mode="lines", name="perfect", line=dashed)
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
    yaxis = {"title": "positives (%)", "range": [-4, 104], "showgrid": True}
    return new_chart([perfect, observed], 400, xaxis=xaxis, yaxis=yaxis)
