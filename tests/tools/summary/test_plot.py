"""The plot of runs: what is on its panels, for few runs and for fifty."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mldec.errors import DataError
from mldec.figures import save
from mldec.summary import Run, draw, share_numbers, style
from mldec.training.log import Evaluation, Progress


def made(name: str, values: Sequence[float], *, metric: str = "mAP", hours: float = 2.0) -> Run:
    evaluations = [
        Evaluation(epoch, 9.0, metric, value, "raw") for epoch, value in enumerate(values, start=1)
    ]
    progress = Progress(3600 * hours, evaluations)
    best = max((value for value in values if math.isfinite(value)), default=None)
    return Run(
        name, name, metric, best, "raw", 1.0, 5.0, 64, "1/1", "finished", "0:00:01", "-", progress
    )


def lines(axes: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def test_the_panels_show_curves_and_costs() -> None:
    runs = [made("b", [10.0, math.nan, 30.0]), made("a", [20.0, 15.0], hours=0.5)]
    figure, messages = draw(runs, cost="hours")
    curves, costs = figure.axes
    assert messages == []
    assert lines(curves) == [([1, 3], [10.0, 30.0]), ([1, 2], [20.0, 15.0])]
    assert lines(costs) == [([2.0], [30.0]), ([0.5], [20.0])]
    assert [text.get_text() for text in curves.get_legend().get_texts()] == [
        "1 b 30.00",
        "2 a 20.00",
    ]
    assert [text.get_text() for text in curves.texts] == ["1", "2"]
    assert [text.get_text() for text in costs.texts] == ["1", "2"]
    assert "hours" in costs.get_xlabel()

    _, costs = draw(runs, cost="gmacs")[0].axes
    assert lines(costs) == [([5.0], [30.0]), ([5.0], [20.0])]


def test_a_run_looks_the_same_in_both_panels() -> None:
    curves, costs = draw([made(f"r{n}", [n, n + 1.0]) for n in range(9)], cost="hours")[0].axes
    for line, point in zip(curves.get_lines(), costs.get_lines(), strict=True):
        assert (line.get_color(), line.get_marker()) == (point.get_color(), point.get_marker())


def test_each_metric_has_panels_of_its_own() -> None:
    runs = [made("a", [1.0]), made("b", [2.0], metric="top1"), made("c", [3.0])]
    figure, _ = draw(runs, cost="hours")
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "mAP (percent)",
        "best mAP (percent)",
        "top1 (percent)",
        "best top1 (percent)",
    ]
    assert [len(axes.get_lines()) for axes in figure.axes] == [2, 2, 1, 1]


def test_fifty_runs_differ_in_more_than_colour_and_their_names_fit() -> None:
    styles = [tuple(style(number).values()) for number in range(56)]
    assert len({looks[1:] for looks in styles}) == 32, "every line style with every marker"
    assert len(set(styles)) == 56

    runs = [made(f"run_{number}_{'x' * 40}", [80 + number / 10]) for number in range(50)]
    figure, _ = draw(runs, cost="hours")
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    curves, costs = figure.axes
    legend = curves.get_legend().get_window_extent(renderer)
    assert legend.y0 >= 0, "the lowest name is on the sheet"
    assert curves.bbox.x1 <= legend.x0
    assert legend.x1 <= costs.bbox.x0
    boxes = [text.get_window_extent(renderer) for text in curves.get_legend().get_texts()]
    assert all(above.y0 >= below.y1 - 2 for above, below in pairwise(boxes))


def test_a_low_beginning_does_not_hide_how_the_runs_differ() -> None:
    curves = draw([made("a", [1.0, 80.0, 90.0]), made("b", [2.0, 88.0])], cost="hours")[0].axes[0]
    assert curves.get_ylim()[0] == pytest.approx(78.0), "10 percent below the lowest end"
    curves = draw([made("a", [1.0, 80.0]), made("b", [2.0, 30.0])], cost="hours")[0].axes[0]
    assert curves.get_ylim()[0] < 1.0, "all of it"


def test_points_that_nearly_coincide_share_a_label() -> None:
    points = [(1.0, 1.0, 1), (1.05, 1.05, 2), (1.05, 2.0, 3), (3.0, 1.0, 4), (1.0, 1.0, 5)]
    assert share_numbers(points, (0.1, 0.1)) == [
        (1.0, 1.0, "1, 2, 5"),
        (1.05, 2.0, "3"),
        (3.0, 1.0, "4"),
    ]


def test_names_are_no_formulas(tmp_path: Any) -> None:
    figure, _ = draw([made("$\\frac{", [1.0])], cost="hours")
    save(figure, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_without_an_evaluation_there_is_nothing_to_draw() -> None:
    with pytest.raises(DataError, match="no run has an evaluation"):
        draw([made("a", []), made("b", [np.nan])], cost="hours")
