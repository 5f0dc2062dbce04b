"""Scatter plots of the studies, with matplotlib."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mldec.figures import SMALL, new_figure, set_title, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
