"""The first screen of a report: the weakest classes, the images and the steps that it advises."""

import numpy as np
import pytest

from mldec.tools.report.advice import next_steps
from mldec.tools.report.examples import Example, Suspect, first_to_look_at
from mldec.tools.report.statistics import ClassTable, Histograms, Interval

CHECK = "mldec check-data --checkpoint 'a b.pt' --out check"

# Name, positives of 100 images, AP, and the half width of its interval.
CLASSES = [
    ("cat", 40, 95.0, 2.0),
    ("mouse", 4, 30.0, 15.0),  # weak, and few images say so
    ("house", 96, 97.0, 2.0),  # chance gives 96
    ("chair", 40, 55.0, 6.0),  # weak, and enough images say so
    ("dog", 30, 90.0, 5.0),
    ("ghost", 0, np.nan, np.nan),
]


def table():
    names, positives, precision, half = zip(*CLASSES, strict=True)
    ap = np.array(precision)
    columns = {"positives": [float(n) for n in positives], "AP": ap.tolist()}
    made = ClassTable(names, columns, ((ap - half).tolist(), (ap + half).tolist()))
    counts = np.array(positives)[:, None]
    histograms = Histograms(np.array([0.0, 1.0]), counts, 100 - counts, counts / 2)
    return made, histograms


def steps(**changes):
    usual = {"calibrated": True, "suspects": 0, "unreadable": 0}
    main = Interval(73.4, 72.0, 75.0)
    made, histograms = table()
    words = {"checkpoint": "a b.pt", "image_size": 224, **usual, **changes}
    return next_steps(made, histograms, words.pop("main", main), **words)


def test_classes_are_named_by_what_their_intervals_say():
    assert table()[0].weakest(3) == [1, 3, 4]
    assert len(table()[0].weakest(9)) == 5
    chance, few, weak = (step.text for step in steps())
    assert "than chance: house (96). " in chance
    assert "Collect more images" in few
    assert "mouse (4)." in few
    assert "many images: chair (40). " in weak
    assert "now 224" in weak


@pytest.mark.parametrize(
    ("changes", "part", "command"),
    [
        ({"unreadable": 3}, "the 3 unreadable", None),
        (
            {"suspects": 7},
            "7 below",
            "mldec check-data --checkpoint 'a b.pt' --out check",
        ),
        ({"calibrated": False}, "Calib", "mldec calibrate 'a b.pt' --out calibrated.pt"),
        ({"main": Interval(73.4, 68.0, 79.0)}, "11 points wide", None),
        ({"main": Interval(73.4)}, None, None),  # without an interval nothing is said of it
    ],
)
def test_each_number_has_its_step(changes, part, command):
    [*added] = [step for step in steps(**changes) if step not in steps()]
    assert [step.command for step in added] == [command] * bool(part)
    assert all(part in step.text for step in added)


def test_images_are_suspects_and_errors_of_the_weakest_classes():
    suspects = [Suspect(0, row, True, 0.01) for row in range(10)]
    errors = [
        Example(index, kind, 100 * index + 10 * number + place, 0.5)
        for index in (1, 2, 3)
        for number, kind in enumerate(("right", "wrong", "missed"))
        for place in range(3)
    ]
    chosen = first_to_look_at(suspects, errors, [3, 1])
    assert [one.row for one in chosen] == [0, 1, 2, 3, 320, 120, 310, 110]
    assert [one.row for one in first_to_look_at(suspects, [], [])] == list(range(8))
    twice = first_to_look_at(suspects[:1], [Example(1, "wrong", 0, 0.5)], [1])
    assert twice == suspects[:1]
