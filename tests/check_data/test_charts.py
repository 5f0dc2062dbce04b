"""The plot of points; the other pictures are looked at by the tests of mldec.check_data."""

import numpy as np
from PIL import Image

from mldec.check_data import charts


def blue(page: Image.Image) -> np.ndarray:
    """Return where the points and their bars are: rows [N, 2] of y and x."""
    return np.argwhere((np.asarray(page) == charts.BAR).all(2))


def test_a_larger_value_is_higher_and_a_larger_work_further_right() -> None:
    page = charts.scatter([(1.0, 10.0, 0.0), (3.0, 20.0, 0.0)], ["low", "high"], "title")
    places = blue(page)
    first, second = (
        places[places[:, 1] < places[:, 1].mean()],
        places[places[:, 1] >= places[:, 1].mean()],
    )
    assert first[:, 0].min() > second[:, 0].max()
    # 8 % room at both ends of 300 pixels: the two centres are 300 / 1.16 apart.
    assert abs(second[:, 1].mean() - first[:, 1].mean() - 300 / 1.16) < 2


def test_a_bar_has_the_height_of_two_spreads() -> None:
    page = charts.scatter([(1.0, 10.0, 5.0)], ["one"], "title")
    places = blue(page)
    assert abs(np.ptp(places[:, 0]) - 300 / 1.16) < 3


def test_points_that_are_all_the_same_have_a_place() -> None:
    assert len(blue(charts.scatter([(1.0, 1.0, 0.0), (1.0, 1.0, 0.0)], ["a", "b"], "t"))) > 0


def test_pictures_one_above_the_other() -> None:
    pages = [Image.new("RGB", size, colour) for size, colour in (((4, 2), "red"), ((3, 5), "blue"))]
    whole = charts.stacked(pages)
    assert whole.size == (4, 7)
    assert whole.getpixel((0, 1)) == (255, 0, 0)
    assert whole.getpixel((2, 2)) == (0, 0, 255)
    assert whole.getpixel((3, 6)) == charts.PAPER
