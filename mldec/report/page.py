"""The report as one HTML file: it works without a network and without any other file.

Texts come from a Jinja2 template, which escapes them. Charts are Plotly figures; they go with the
columns of the table into a block of JSON, which the script `page.js` shows. A content security
policy allows the scripts of the page alone, by their hashes, and no request: what a name of a class
or of a file contains cannot run.
"""

import base64
import hashlib
import html
import io
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from PIL import Image
from plotly.offline import get_plotlyjs

from mldec.errors import visible
from mldec.report.comparison import Comparison
from mldec.report.examples import Example, Picture, Suspect
from mldec.report.statistics import ClassTable, Histograms, Interval, Pairs, is_count, meaning
from mldec.report.training import Points

DIGITS = 9  # significant ones of a number on the page: counts up to 10^9 are exact
HEAT_OPACITY = 0.8  # at the maximum of a heat map
MOST_DIFFERENCES = 40  # classes in the chart of differences; the rest is in the table
SCORE_GROUPS = 50  # bars of the scores of a class
NAME_LENGTH = 24  # characters of a class name beside an axis

# The colours of Okabe and Ito (2008), which no colour-blind person takes for one another.
BLUE, VERMILLION, GREY, ORANGE = "#0072B2", "#D55E00", "#6b7280", (230, 159, 0)
LINES = [(BLUE, "solid"), (VERMILLION, "dash"), ("#009E73", "dot"), ("#CC79A7", "dashdot")]


@dataclass(frozen=True)
class Content:
    """What a report says.

    Attributes:
        title: of the page.
        summary: checkpoint, data, images, cost and so on, by their headings.
        settings: the configuration as YAML.
        images: number of images that are scored.
        curves: learning curves by name; empty if there are none, which `notes` then explains.
        metrics: by name, in percent; numbers of classes are no percentages.
        table: of classes.
        histograms: of scores.
        exclusive: whether an image has one label: the page then has no thresholds to move.
        pairs: classes in labels and in predictions, or the confusion matrix.
        heat_method: how the maps were made, one sentence; None without maps.
        pictures: of the images that examples, suspects and changes show, by their rows.
        examples: of the classes that have some, the surest first.
        suspects: most suspicious first.
        unreadable: one message per image that could not be read.
        comparison: with another checkpoint, or None.
        notes: what was sampled, left out or is not known, one sentence each.
    """

    title: str
    summary: dict[str, str]
    settings: str
    images: int
    curves: dict[str, Points]
    metrics: dict[str, Interval]
    table: ClassTable
    histograms: Histograms
    exclusive: bool
    pairs: Pairs
    heat_method: str | None
    pictures: dict[int, Picture]
    examples: list[Example]
    suspects: list[Suspect]
    unreadable: list[str]
    comparison: Comparison | None = None
    notes: list[str] = field(default_factory=list)


def page(content: Content) -> str:
    """Return the page as HTML; write it as UTF-8.

    Control characters and halves of surrogate pairs in names are shown as `?`.
    """
    names = tuple(visible(name) for name in content.table.names)
    content = replace(content, table=replace(content.table, names=names))

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"number": _number, "meaning": meaning, "bounds": _bounds, "png": _png}
    environment.policies["json.dumps_kwargs"] = {}  # which would sort columns by name
    template = environment.from_string(_read("page.html.j2"))

    examples: dict[int, dict[str, list[Example]]] = {}
    for example in content.examples:
        kinds = examples.setdefault(example.class_index, {"right": [], "wrong": [], "missed": []})
        kinds[example.kind].append(example)

    figures = _figures(content)
    data = {
        "exclusive": content.exclusive,
        "names": names,
        "columns": _columns(content),
        "thresholds": content.table.columns.get("threshold"),
        "histograms": _histograms(content.histograms),
        "figures": {name: figure.to_plotly_json() for name, figure in figures.items()},
        "pictures": {row: picture.jpeg for row, picture in content.pictures.items()},
    }
    scripts = [get_plotlyjs(), _read("page.js")]
    return template.render(
        report=content,
        names=names,
        examples=examples,
        figures=figures,
        most_differences=MOST_DIFFERENCES,
        data=_plain(data),
        style=Markup(_read("page.css")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[_hash(script) for script in scripts],
    )


def _shown(value: Any) -> Any:
    """Return what the template writes in place of a value."""
    return visible(value) if type(value) is str else value


def _read(name: str) -> str:
    """Return a text file that lies beside this module."""
    return resources.files("mldec.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the source expression that allows a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _plain(value: Any) -> Any:
    """Return nested dicts and lists that JSON can hold: bytes become base64, NaN becomes None."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    return value


# ------------------------------------------------------------------------------------------ numbers


def _number(value: float, name: str, sign: str = "") -> str:
    """Return a metric as text: a count without decimals, a percentage with two.

    Args:
        value: of the metric.
        name: of the metric.
        sign: "+" for a difference.
    """
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
    table = content.table
    columns = []
    for name, values in table.columns.items():
        heading, decimals = f"{name[0].upper()}{name[1:]} (%)", 1
        if name in ("positives", "threshold"):
            heading, decimals = name.capitalize(), 0 if name == "positives" else 3
        columns.append({"heading": heading, "values": values, "decimals": decimals})
        if name == "AP":
            columns[-1] |= dict(zip(("low", "high"), table.intervals, strict=True))

    if content.comparison:
        gaps = content.comparison.per_class
        columns.append(
            {
                "heading": "AP of A \N{MINUS SIGN} B (points)",
                "values": [gap.value for gap in gaps],
                "low": [gap.low for gap in gaps],
                "high": [gap.high for gap in gaps],
                "decimals": 1,
                "signed": True,
            }
        )
    return columns


def _histograms(histograms: Histograms) -> dict[str, Any]:
    """Return the counts of all bins, compressed: most bins of most classes are empty."""
    edges = histograms.edges
    return {
        "edges": edges.tolist(),
        "groups": (edges[:-1] * SCORE_GROUPS + 1e-9).astype(int).tolist(),
        **{
            name: zlib.compress(np.ascontiguousarray(counts.astype("<u4")).tobytes())
            for name, counts in (
                ("positives", histograms.positives),
                ("negatives", histograms.negatives),
            )
        },
    }


def _png(heat: np.ndarray) -> str:
    """Return a map uint8 [h, w] as the address of an orange image; the heat is its opacity."""
    pixels = np.empty((*heat.shape, 4), np.uint8)
    pixels[..., :3] = ORANGE
    pixels[..., 3] = HEAT_OPACITY * heat

    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# ------------------------------------------------------------------------------------------- charts


def _figures(content: Content) -> dict[str, go.Figure]:
    """Return the charts of the page by the ids of their elements.

    Those of one class are empty: the script fills them.
    """
    figures = {"metrics-chart": _intervals(content.metrics, "percent")}
    for name, unit in (("loss", "loss"), ("metric", "percent")):
        curves = {
            key: points
            for key, points in content.curves.items()
            if ("loss" in key) == (name == "loss")
        }
        if curves:
            figures[f"{name}-chart"] = _curves(curves, unit)

    if content.comparison:
        by_name = zip(content.table.names, content.comparison.per_class, strict=True)
        ranked = sorted(
            ((name, gap) for name, gap in by_name if math.isfinite(gap.value)),
            key=lambda entry: -entry[1].value,
        )
        if len(ranked) > MOST_DIFFERENCES:
            ranked = ranked[: MOST_DIFFERENCES // 2] + ranked[-MOST_DIFFERENCES // 2 :]
        figures["differences-chart"] = _intervals(dict(ranked), "difference of AP (points)")

    if content.pairs.classes:
        figures["pairs-chart"] = _pairs(content)
    return figures | {
        "calibration": _calibration(content.histograms),
        "precision-recall": _precision_recall(content.exclusive),
        "scores": _scores(),
    }


def _figure(traces: list[Any], height: int, **layout: Any) -> go.Figure:
    """Return a chart as wide as its element, and as high as so many pixels."""
    style = {
        "template": "simple_white",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1f2933"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 56, "r": 16, "t": 28, "b": 48},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "#ffffff"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#9aa5b1", "activecolor": BLUE},
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "x": 0},
    }
    figure = go.Figure(traces, {**style, "height": height, **layout})
    figure.update_xaxes(automargin=True, title_standoff=8)
    figure.update_yaxes(automargin=True, title_standoff=8)
    return figure


def _label(name: str) -> str:
    """Return a name of a class beside an axis; Plotly would take tags for its own."""
    return html.escape(name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…")


def _intervals(entries: Mapping[str, Interval], unit: str) -> go.Figure:
    """Draw one row per percentage: a mark with its interval, the first entry at the top."""
    entries = {
        name: entry
        for name, entry in entries.items()
        if math.isfinite(entry.value) and not is_count(name)
    }
    rows, values = list(range(len(entries))), [entry.value for entry in entries.values()]
    bounds = [
        (entry.value, entry.value) if math.isnan(entry.low) else (entry.low, entry.high)
        for entry in entries.values()
    ]
    marks = go.Scatter(
        x=values,
        y=rows,
        mode="markers",
        marker={"color": BLUE, "size": 9},
        error_x={
            "type": "data",
            "array": [high - value for value, (_, high) in zip(values, bounds, strict=True)],
            "arrayminus": [value - low for value, (low, _) in zip(values, bounds, strict=True)],
            "thickness": 1.5,
            "width": 4,
        },
        customdata=[html.escape(name) for name in entries],
        hovertemplate="%{customdata}: %{x:.2f}<extra></extra>",
    )
    labels = [_label(name) for name in entries]
    return _figure(
        [marks],
        24 * len(entries) + 90,
        xaxis={"title": unit, "showgrid": True, "zeroline": True, "zerolinecolor": GREY},
        yaxis={"tickvals": rows, "ticktext": labels, "range": [len(entries) - 0.5, -0.5]},
    )


def _curves(curves: dict[str, Points], unit: str) -> go.Figure:
    """Draw learning curves."""
    traces = []
    for number, (name, points) in enumerate(curves.items()):
        color, dash = LINES[number % len(LINES)]
        steps, values = zip(*points, strict=True)
        line = {"color": color, "dash": dash}
        traces.append(
            go.Scatter(x=steps, y=values, name=html.escape(name), mode="lines+markers", line=line)
        )
    axes = {"xaxis": {"title": "step"}, "yaxis": {"title": unit, "showgrid": True}}
    return _figure(traces, 340, showlegend=True, **axes)


def _pairs(content: Content) -> go.Figure:
    """Draw which share of the images of each row's class is in each column."""
    pairs = content.pairs
    names = [_label(content.table.names[index]) for index in pairs.classes]

    def shares(matrix: np.ndarray, of_classes: np.ndarray) -> np.ndarray:
        whole = np.diag(of_classes)[:, None]
        values = np.where(whole > 0, 100 * matrix / np.maximum(whole, 1), np.nan)
        if not content.exclusive:
            # It is 100 % everywhere and would outshine the pairs.
            np.fill_diagonal(values, np.nan)
        return values

    of_labels = shares(pairs.labels, pairs.labels)
    if content.exclusive:
        views = {"predictions": shares(pairs.predictions, pairs.labels)}
    else:
        of_predictions = shares(pairs.predictions, pairs.predictions)
        views = {
            "predictions minus labels": of_predictions - of_labels,
            "labels": of_labels,
            "predictions": of_predictions,
        }

    traces: list[go.Heatmap] = []
    for view, values in views.items():
        highest = 100.0 if content.exclusive else max(1.0, np.nanmax(np.abs(values), initial=0))
        lowest, scale = 0.0, [[0, "#f3f7fb"], [1, BLUE]]
        if view == "predictions minus labels":
            lowest, scale = -highest, [[0, BLUE], [0.5, "#f7f7f7"], [1, VERMILLION]]
        traces.append(
            go.Heatmap(
                z=values.tolist(),
                name=view,
                zmin=lowest,
                zmax=highest,
                colorscale=scale,
                colorbar={"title": "%", "thickness": 14},
                hoverongaps=False,
                texttemplate="%{z:.0f}" if len(names) <= 12 else "",
                hovertemplate="row %{y}, column %{x}: %{z:.1f} %<extra></extra>",
                visible=not traces,
            )
        )
    buttons = [
        {"label": view, "method": "update", "args": [{"visible": [view == one for one in views]}]}
        for view in views
    ]
    menu = {"buttons": buttons, "type": "buttons", "direction": "right", "x": 0, "xanchor": "left"}
    cell = 52 if len(names) <= 12 else 28
    longest = 8 * max(map(len, names)) + 40
    return _figure(
        traces,
        longest + cell * len(names) + 70,
        width=longest + cell * len(names) + 130,
        margin={"l": longest, "r": 16, "t": 70, "b": longest},
        xaxis={"tickvals": list(range(len(names))), "ticktext": names, "tickangle": -60},
        yaxis={
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "autorange": "reversed",
        },
        updatemenus=[menu | {"y": 1.02, "yanchor": "bottom"}] if len(views) > 1 else [],
    )


def _calibration(histograms: Histograms) -> go.Figure:
    """Draw the share of positives over the mean score of all classes together."""
    images, positives, sums = (counts.sum(0) for counts in histograms.calibration_bins())
    used = images > 0
    share, mean = 100 * positives[used] / images[used], sums[used] / images[used]
    perfect = go.Scatter(
        x=[0, 1], y=[0, 100], mode="lines", name="perfect", line={"color": GREY, "dash": "dash"}
    )
    observed = go.Scatter(
        x=mean.tolist(),
        y=share.tolist(),
        mode="lines+markers",
        name="all classes",
        line={"color": BLUE},
        customdata=[f"{number:,.0f}" for number in images[used].tolist()],
        hovertemplate="mean score %{x:.3f}: %{y:.1f} % of %{customdata} decisions<extra></extra>",
    )
    return _figure(
        [perfect, observed],
        400,
        xaxis={"title": "score", "range": [-0.02, 1.02]},
        yaxis={"title": "show the class (%)", "range": [-4, 104], "showgrid": True},
    )


def _precision_recall(exclusive: bool) -> go.Figure:
    """Return the chart of precision and recall of a class, without its points."""
    traces = [
        go.Scatter(
            x=[],
            y=[],
            name="precision",
            mode="lines",
            line={"color": BLUE, "width": 2.5},
            hovertemplate="threshold %{text}<br>recall %{x:.1f} %<br>precision %{y:.1f} %"
            "<extra></extra>",
        )
    ]
    if not exclusive:
        circle = {"symbol": "circle-open", "size": 13, "color": "#000000", "line": {"width": 2}}
        diamond = {"symbol": "diamond", "size": 11, "color": VERMILLION}
        traces += [
            go.Scatter(x=[], y=[], name="report", mode="markers", marker=circle),
            go.Scatter(x=[], y=[], name="slider", mode="markers", marker=diamond),
        ]
    return _figure(
        traces,
        400,
        xaxis={"title": "recall (%)", "range": [-2, 102]},
        yaxis={"title": "precision (%)", "range": [-2, 104], "showgrid": True},
        showlegend=True,
    )


def _scores() -> go.Figure:
    """Return the chart of the scores of a class, without its counts."""
    centres = ((np.arange(SCORE_GROUPS) + 0.5) / SCORE_GROUPS).tolist()
    stripes = {"shape": "/", "size": 5, "fgcolor": "#ffffff", "fgopacity": 0.5}
    count = {"hovertemplate": "score about %{x:.2f}: %{y:,} images<extra></extra>"}
    return _figure(
        [
            go.Bar(x=centres, y=[], name="positives", marker={"color": BLUE}, **count),
            go.Bar(
                x=centres,
                y=[],
                name="negatives",
                yaxis="y2",
                marker={"color": VERMILLION, "pattern": stripes},
                **count,
            ),
        ],
        400,
        xaxis={"title": "score", "range": [-0.02, 1.02], "anchor": "y2"},
        yaxis={"title": "positives", "type": "log", "domain": [0.54, 1], "dtick": 1},
        yaxis2={"title": "negatives", "type": "log", "domain": [0, 0.46], "dtick": 1},
        bargap=0,
        showlegend=True,
    )
