"""The charts: what is on the axes of a figure, and the size of the file that is written."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from mldec.check_data import charts
from mldec.figures import NAME_LENGTH, save


def written(figure: Figure, path: Path) -> np.ndarray:
    """Write a figure and return the pixels of the file: uint8 [H, W, 3]."""
    save(figure, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_bars_have_the_names_and_counts_of_the_classes_the_largest_on_top(tmp_path: Path) -> None:
    figure = charts.bar_chart(np.array([3, 0, 1200]), ["cat", "owl", "dog"], "train: images")
    pixels = written(figure, tmp_path / "bars.png")
    [axes] = figure.axes
    assert axes.get_title() == "train: images"
    assert [bar.get_width() for bar in axes.patches] == [1200, 3, 0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dog", "cat", "owl"]
    assert [text.get_text() for text in axes.texts] == ["1,200", "3", "0"]

    # Further up on the page, and longer, but less than in proportion: the axis is logarithmic.
    boxes = [bar.get_window_extent() for bar in axes.patches]
    assert boxes[0].y0 > boxes[1].y1 > boxes[1].y0 > boxes[2].y1
    assert boxes[1].width < boxes[0].width < 10 * boxes[1].width
    assert boxes[2].width == 0
    assert pixels.shape[:2] == tuple(round(100 * side) for side in figure.get_size_inches()[::-1])
    blue = (255 * np.array(to_rgba(charts.COLOUR)[:3])).round()
    assert (pixels == blue).all(2).sum() > 0.5 * boxes[0].width * boxes[0].height


@pytest.mark.parametrize("count", [1, 120, 121, 9_605])
def test_bar_charts_of_any_number_of_classes(count: int, tmp_path: Path) -> None:
    names = [f"class {index}" for index in range(count)]
    figure = charts.bar_chart(np.arange(count), names, "title")
    height, width, _ = written(figure, tmp_path / "bars.png").shape
    [axes] = figure.axes
    assert width == 800
    if count <= 120:
        assert height == pytest.approx(120 + 16 * count, abs=1)
        assert len(axes.patches) == count
        assert [label.get_text() for label in axes.get_yticklabels()] == names[::-1]
    else:
        assert height == 600
        [outline] = axes.patches
        assert outline.get_data().values.tolist() == list(range(count))[::-1]


def test_a_heat_map_has_the_values_and_the_names_of_rows_and_columns(tmp_path: Path) -> None:
    figure = charts.heat_map(np.array([[1.0, 0.25], [0.0, 1.0]]), ["cat", "dog"], "title")
    pixels = written(figure, tmp_path / "map.png")
    axes = figure.axes[0]
    [image] = axes.images
    assert image.get_array().tolist() == [[1.0, 0.25], [0.0, 1.0]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]

    # The first row is the upper one, 0 is white and 1 dark blue, whatever the values are.
    def colour(column: int, row: int) -> tuple[int, ...]:
        x, y = axes.transData.transform((column, row))
        return tuple(pixels[len(pixels) - round(y), round(x)].tolist())

    assert colour(0, 0) == colour(1, 1) == (8, 48, 107)
    assert min(colour(0, 1)) > 240
    assert 100 < colour(1, 0)[0] < 240


def test_samples_are_shown_with_their_captions(tmp_path: Path) -> None:
    images = [np.full((8, 8, 3), shade, np.uint8) for shade in (10, 90, 170)]
    captions = ["cat, dog", "(none)", ", ".join(f"a long name {index}" for index in range(20))]
    figure = charts.sample_sheet(images, captions, columns=2)
    pixels = written(figure, tmp_path / "samples.png")
    assert pixels.shape == (480, 400, 3)
    for shade in (10, 90, 170):
        assert (pixels == shade).all(2).sum() > 10_000
    shown = [axes for axes in figure.axes if axes.images]
    assert [axes.images[0].get_array()[0, 0, 0] for axes in shown] == [10, 90, 170]
    assert [axes.get_title("left") for axes in shown][:2] == captions[:2]
    assert shown[2].get_title("left").count("\n") == 2
    assert not any(axes.axison for axes in figure.axes)


def test_a_scatter_plot_has_its_points_bars_and_names(tmp_path: Path) -> None:
    points = [charts.Point(1.0, 10.0, 5.0, "low"), charts.Point(3.0, 20.0, 0.5, "high")]
    panel = charts.Panel("scenes", "MMAC", "mAP", points)
    figure = charts.scatter_plots([panel, panel._replace(title="one digit", points=points[:1])])
    assert written(figure, tmp_path / "plot.png").shape == (760, 800, 3)
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("scenes", "one digit")
    assert (first.get_xlabel(), first.get_ylabel()) == ("MMAC", "mAP")

    for container, point in zip(first.containers, points, strict=True):
        marker, _, [bar] = container
        assert marker.get_xydata().tolist() == [[point.x, point.y]]
        low, high = point.y - point.spread, point.y + point.spread
        assert bar.get_segments()[0].tolist() == [[point.x, low], [point.x, high]]
    assert [text.get_text() for text in first.texts] == ["1", "2"]
    names = [text.get_text() for text in first.get_legend().get_texts()]
    assert names == ["1 low: 10.0 ± 5.0", "2 high: 20.0 ± 0.5"]
    assert len(second.containers) == 1

    # Everything is inside the axes, and no axes covers the other one.
    assert first.get_xlim()[0] < 1 < 3 < first.get_xlim()[1]
    assert first.get_ylim()[0] < 5 < 20.5 < first.get_ylim()[1]
    assert first.get_window_extent().y0 > second.get_window_extent().y1


def test_points_that_are_all_the_same_can_be_drawn(tmp_path: Path) -> None:
    same = [charts.Point(1.0, 1.0, 0.0, name) for name in "ab"]
    figure = charts.scatter_plots([charts.Panel("title", "x", "y", same)])
    written(figure, tmp_path / "plot.png")
    [axes] = figure.axes
    assert [text.get_text() for text in axes.texts] == ["1, 2"]
    for container in axes.containers:
        extent = container[0].get_window_extent()
        assert axes.bbox.x0 < extent.x0 < extent.x1 < axes.bbox.x1


def test_points_that_nearly_coincide_share_a_label() -> None:
    rows = [(1.0, 10.0), (2.0, 50.4), (2.0, 50.0), (2.0, 60.0), (3.0, 50.0)]
    points = [charts.Point(x, y, 1.0, "name") for x, y in rows]
    [axes] = charts.scatter_plots([charts.Panel("title", "x", "y", points)]).axes
    assert [text.get_text() for text in axes.texts] == ["1", "3, 2", "4", "5"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$x^2$", r"$\frac{$", "é中", "two\nlines", "\udcff", "n" * 500])
def test_a_name_is_shown_as_it_is(name: str, tmp_path: Path) -> None:
    figures = [
        charts.bar_chart(np.array([1]), [name], name),
        charts.heat_map(np.eye(1), [name], name),
        charts.sample_sheet([np.zeros((8, 8, 3), np.uint8)], [name]),
        charts.scatter_plots([charts.Panel(name, "x", "y", [charts.Point(1.0, 1.0, 1.0, name)])]),
    ]
    for figure in figures:
        written(figure, tmp_path / "chart.png")
    label = figures[0].axes[0].get_yticklabels()[0]
    if "$" in name:
        assert label.get_text() == name
        assert not label.get_parse_math()
    assert len(label.get_text()) <= NAME_LENGTH
    assert label.get_text().isprintable()
