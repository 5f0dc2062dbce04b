"""Charts of a dataset: sample sheets, bar charts, heat maps and scatter plots, with matplotlib.

Every function returns a `matplotlib.figure.Figure`, which `mldec.figures.save` writes.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mldec.errors import visible
from mldec.figures import NAME_LENGTH, SMALL, new_figure, set_title, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR = "#3465a4"
NAMED_BARS = 120  # with more bars than this, names and counts would not be legible
ROW_HEIGHT = 0.16  # inches per class


class Point(NamedTuple):
    """One point of a scatter plot: its coordinates, half the length of its error bar, its name."""

    x: float
    y: float
    spread: float
    name: str


class Panel(NamedTuple):
    """One scatter plot of a sheet."""

    title: str
    x_label: str
    y_label: str
    points: Sequence[Point]


def sample_sheet(
    images: Sequence[np.ndarray], captions: Sequence[str], *, columns: int = 6
) -> "Figure":
    """Draw images in a grid, each below its caption.

    Args:
        images: uint8 [H, W, 3].
        captions: one per image; of each the first three lines are shown.
        columns: images per row.
    """
    rows = max(1, -(-len(images) // columns))
    figure = new_figure(width=2 * columns, height=2.4 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()

    for axes, image, caption in zip(grid[: len(images)], images, captions, strict=True):
        axes.imshow(image)
        lines = textwrap.wrap(visible(caption), NAME_LENGTH)[:3]
        axes.set_title("\n".join(lines), fontsize=SMALL, loc="left", parse_math=False)

    # The last row may have empty cells, which show no frame either.
    for axes in grid:
        axes.axis("off")
    return figure


def bar_chart(values: np.ndarray, names: Sequence[str], title: str) -> "Figure":
    """Draw counts on a logarithmic axis that begins at 0, the largest count on top.

    Up to `NAMED_BARS` bars are labelled with their names and counts. More than that are drawn as
    one outline, the distribution of the counts.

    Args:
        values: non-negative counts [K].
        names: one per count.
        title: of the chart.
    """
    order = np.argsort(-values, kind="stable")
    named = len(values) <= NAMED_BARS
    height = 1.2 + ROW_HEIGHT * len(values) if named else 6
    figure = new_figure(width=8, height=height)
    axes = figure.subplots()

    if named:
        positions = np.arange(len(values))
        bars = axes.barh(positions, values[order], color=COLOUR)
        axes.bar_label(
            bars, labels=[f"{int(value):,}" for value in values[order]], padding=2, fontsize=SMALL
        )
        _name_ticks(axes, "y", [names[index] for index in order])
        axes.set_ylim(-0.6, len(values) - 0.4)
    else:
        edges = np.arange(len(values) + 1)
        axes.stairs(values[order], edges, orientation="horizontal", fill=True, color=COLOUR)
        axes.set_ylabel("classes, the most frequent first")
        axes.set_ylim(0, len(values))

    # Linear below 1, so that a class without images has a place; the room is for the counts.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, 3 * max(1, values.max(initial=0)))
    axes.invert_yaxis()
    set_title(axes, title)
    return figure


def heat_map(matrix: np.ndarray, names: Sequence[str], title: str) -> "Figure":
    """Draw a matrix of numbers in [0, 1] as squares from white (0) to dark blue (1).

    Args:
        matrix: float [K, K].
        names: of the rows, and of the columns.
        title: of the chart.
    """
    side = ROW_HEIGHT * len(matrix)
    figure = new_figure(width=max(side + 3, 7), height=max(side + 2.4, 3.4))
    axes = figure.subplots()

    image = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    _name_ticks(axes, "y", names)
    _name_ticks(axes, "x", names)
    axes.tick_params(axis="x", rotation=90)
    figure.colorbar(image, ax=axes, shrink=0.6)

    # Above the figure, because the title may be wider than the matrix.
    figure.suptitle(visible(title), fontsize=10, parse_math=False)
    return figure


def scatter_plots(panels: Sequence[Panel]) -> "Figure":
    """Draw scatter plots below each other; the points are numbered, a legend gives their names."""
    figure = new_figure(width=8, height=3.8 * len(panels))
    grid = figure.subplots(len(panels), 1, squeeze=False).flatten()

    for axes, panel in zip(grid, panels, strict=True):
        for number, point in enumerate(panel.points, start=1):
            axes.errorbar(
                point.x,
                point.y,
                yerr=point.spread,
                fmt="o",
                markersize=5,
                label=f"{number} {shorten(point.name)}: {point.y:.1f} ± {point.spread:.1f}",
            )
        for x, y, numbers in _number_labels(panel.points):
            axes.annotate(numbers, (x, y), xytext=(5, 2), textcoords="offset points")

        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.margins(0.08)
        set_title(axes, panel.title)

        # Beside the plot: there is no corner that is sure to be free of points.
        legend = axes.legend(
            loc="center left",
            bbox_to_anchor=(1.02, 0.5),
            fontsize=SMALL + 1,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def _number_labels(points: Sequence[Point]) -> list[tuple[float, float, str]]:
    """Return position and text of the points' numbers; points that nearly coincide share one."""
    heights = [point.y for point in points]
    line_height = 0.05 * (max(heights) - min(heights))

    labels: list[tuple[float, float, str]] = []
    for number, point in sorted(enumerate(points, start=1), key=lambda item: item[1][:2]):
        if labels:
            x, y, numbers = labels[-1]
            if point.x == x and point.y - y <= line_height:
                labels[-1] = (x, y, f"{numbers}, {number}")
                continue
        labels.append((point.x, point.y, str(number)))
    return labels


def _name_ticks(axes: "Axes", axis: str, names: Sequence[str]) -> None:
    """Write a class name at each of the positions 0, 1, ... of an axis ("x" or "y")."""
    set_ticks = axes.set_xticks if axis == "x" else axes.set_yticks
    labels = [shorten(name) for name in names]

    # Names are the user's: a dollar sign in them does not begin a formula.
    set_ticks(range(len(names)), labels=labels, fontsize=SMALL, parse_math=False)
