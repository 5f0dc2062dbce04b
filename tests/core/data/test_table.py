"""Tables of images and labels: what the builder takes and refuses, and how a table is divided."""

import logging

import numpy as np
import pytest

from mldec.data.table import (
    Table,
    TableBuilder,
    check_fraction,
    encode_paths,
    from_dense,
    held_out,
    hold_out,
    log_split,
    path_inside,
)
from mldec.errors import DataError

SEE = "see there"


def builder(classes: list[str] | None, default: int = 0) -> TableBuilder:
    return TableBuilder(SEE, classes=classes, default=default)


def test_classes_by_name_and_by_index() -> None:
    for labels in ({"dog": 1, "cat": 0}, {1: 1, 0: 0}):
        made = builder(["cat", "dog", "eel"])
        made.add("b/2.jpg", labels, "a.csv, row 2")
        made.add("b/1.jpg", {}, "a.csv, row 3")
        assert len(made) == 2
        table = made.build("a.csv")
        assert table.classes == ("cat", "dog", "eel")
        assert table.files.tolist() == [b"b/2.jpg", b"b/1.jpg"]  # as they were added
        assert table.labels.dense().tolist() == [[0, 1, 0], [0, 0, 0]]


def test_what_is_not_given_may_be_unknown() -> None:
    made = builder(["cat", "dog", "eel"], default=-1)
    made.add("1.jpg", {"dog": 1, "cat": 0}, "row 1")
    made.add("2.jpg", {}, "row 2")
    table = made.build("a.csv")
    assert table.labels.dense().tolist() == [[0, 1, -1], [-1, -1, -1]]
    assert table.labels.default == -1


def test_without_classes_they_are_the_sorted_labels() -> None:
    made = builder(None)
    made.add("1.jpg", {"eel": 1, "cat": 1}, "row 1")
    made.add("2.jpg", {"dog": 0}, "row 2")
    table = made.build("a.csv")
    assert table.classes == ("cat", "dog", "eel")
    assert table.labels.dense().tolist() == [[1, 0, 1], [0, 0, 0]]


def test_codes_of_a_data_set_are_kept() -> None:
    made = builder(["cat"])
    made.add("1.jpg", {"cat": 2}, "row 1")
    assert made.build("").labels.dense().tolist() == [[2]]


def test_the_callers_labels_are_copied() -> None:
    labels = {"cat": 1}
    made = builder(None)
    made.add("1.jpg", labels, "row 1")
    labels["dog"] = 1
    assert made.build("").classes == ("cat",)


# What no table may hold


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../1.jpg", "a/../../1.jpg", "a\\..\\1.jpg", "C:\\1.jpg", "a\0b"]
)
def test_a_path_that_leads_elsewhere(path: str) -> None:
    with pytest.raises(DataError) as caught:
        builder(None).add(path, {}, "a.csv, row 2")
    expected = f"a.csv, row 2: {path!r} is not a path inside the image folder; see there"
    assert str(caught.value) == expected


@pytest.mark.parametrize("path", ["a/1.jpg", "a\\1.jpg", "./a//1.jpg", "a/./1.jpg"])
def test_paths_are_written_in_one_way(path: str) -> None:
    assert path_inside(path, "", SEE) == "a/1.jpg"
    made = builder(["cat"])
    made.add("a/1.jpg", {}, "a.csv, row 2")
    with pytest.raises(DataError) as caught:
        made.add(path, {}, "a.csv, row 7")
    expected = "a.csv, row 7: the image a/1.jpg is listed twice, first in row 2"
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("see there")


def test_dots_that_are_part_of_a_name() -> None:
    assert path_inside("..a/b..jpg", "", SEE) == "..a/b..jpg"


def test_paths_that_are_not_utf8() -> None:
    assert encode_paths(["\udce9.jpg"]).tolist() == [b"\xe9.jpg"]


def test_a_class_that_is_not_in_the_list() -> None:
    expected = r"^a\.csv, row 2: the class 'cat' is not in the list .* did you mean 'Cat'\?"
    with pytest.raises(DataError, match=expected):
        builder(["Cat", "dog"]).add("1.jpg", {"cat": 1}, "a.csv, row 2")
    for index in (-1, 2):
        with pytest.raises(DataError, match=rf"row 3: the class {index} is not an index below 2"):
            builder(["Cat", "dog"]).add("2.jpg", {index: 1}, "a.csv, row 3")


def test_a_table_without_any_class() -> None:
    made = builder(None)
    made.add("1.jpg", {}, "row 1")
    with pytest.raises(DataError, match=r"^a\.csv: no image has a label; see there$"):
        made.build("a.csv")
    assert len(builder(["cat"]).build("a.csv")) == 0


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["cat", "Cat"], "differ in case only"), (["a\x1bb"], "control character"), ([" "], "empty")],
)
def test_labels_that_no_class_may_be_called(names: list[str], expected: str) -> None:
    made = builder(None)
    for number, name in enumerate(names):
        made.add(f"{number}.jpg", {name: 1}, f"row {number}")
    with pytest.raises(DataError, match=rf"^a\.csv: the class.*{expected}"):
        made.build("a.csv")


# Parts of a table


def test_some_images() -> None:
    dense = np.array([[1, 0, 0], [0, 1, -1], [1, 1, 0]], np.int8)
    table = Table(encode_paths(["a", "b", "c"]), from_dense(dense), ("x", "y", "z"))
    some = table.select(np.array([2, 0]))
    assert some.files.tolist() == [b"c", b"a"]
    assert some.classes == ("x", "y", "z")
    assert some.labels.dense().tolist() == dense[[2, 0]].tolist()
    assert len(table.select(np.array([False, True, False]))) == 1


def test_each_image_is_held_out_by_itself() -> None:
    files = [b"%d.jpg" % number for number in range(2000)]
    chosen = held_out(files, 0.25, seed=0)
    assert chosen.mean() == pytest.approx(0.25, abs=0.04)
    assert np.array_equal(held_out(files[::2], 0.25, seed=0), chosen[::2])
    assert not np.array_equal(held_out(files, 0.25, seed=1), chosen)
    assert (held_out(files, 0.5, seed=0) >= chosen).all()  # more, not others

    labels = from_dense(np.zeros((2000, 1), np.int8))
    table = Table(encode_paths([file.decode() for file in files]), labels, ("x",))
    val, train = (hold_out(table, 0.25, 0, val=is_val) for is_val in (True, False))
    assert np.array_equal(val.files, table.files[chosen])
    assert np.array_equal(train.files, table.files[~chosen])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_a_share_is_between_nothing_and_all(fraction: float) -> None:
    check_fraction(0.5)
    with pytest.raises(ValueError, match=rf"^val_fraction is {fraction}: it must be above 0"):
        check_fraction(fraction)


def test_the_log_names_classes_without_an_image(caplog: pytest.LogCaptureFixture) -> None:
    dense = np.array([[1, 0, 0, 0, -1]], np.int8)
    table = Table(encode_paths(["a"]), from_dense(dense), ("p", "q", "r", "s", "t"))
    with caplog.at_level(logging.INFO, "mldec"):
        log_split("some", "val", table)
    assert caplog.messages == [
        "some val: 1 images, 5 classes",
        "some val: 4 of 5 classes have no image: 'q', 'r', 's', ...",
    ]
