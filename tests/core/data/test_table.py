"""Class names, sparse labels, and tables of images: what they take, refuse, and how they select."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from mldec.data.table import (
    COCO_NAMES,
    VOC,
    Table,
    TableBuilder,
    are_indices,
    as_name,
    check_names,
    encode_paths,
    fixed_per_class,
    from_dense,
    from_entries,
    from_single,
    from_statements,
    given_names,
    log_split,
    name_fault,
    names_fault,
    path_inside,
    random_drop,
    split_names,
    told_apart,
)
from mldec.data.types import Classes
from mldec.errors import DataError

SEE = "see there"

# Names


GOOD = [
    "dog",
    " dog ",
    "caf\u00e9",
    "\u200f\u05d0",
    "\U0001f415",
    "0",
    "C/V 'a' \"b\"",
]
CONTROLS = ["\t", "\n", "\0", "\x1b", "\x7f", "\x9b", "\u2028", "\ud800"]
ODD = [None, True, [], b"dog", "", "  "]


def test_names_that_are_taken() -> None:
    assert names_fault(GOOD) is None
    assert Classes(tuple(GOOD)).names == tuple(GOOD)
    assert check_names(GOOD[:2], "", "") == ("dog", " dog ")
    assert [as_name(value, "", "") for value in (1, -2, 0.5)] == ["1", "-2", "0.5"]


@pytest.mark.parametrize("name", [f"red{control}car" for control in CONTROLS] + ODD, ids=ascii)
def test_names_that_are_refused_everywhere(name: object) -> None:
    assert name_fault(name)
    with pytest.raises(DataError, match=r"^the names of the classes: .* of class 1 (has|is)"):
        Classes(("a", name))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"^a\.csv, row 3: the class name .*: rename it; see there"):
        as_name(name, "a.csv, row 3", SEE)


def test_two_classes_of_one_name() -> None:
    with pytest.raises(DataError, match="the classes 0 and 2 are both called 'a'"):
        Classes(("a", "b", "a"))
    # Two MIDs of Open Images may differ in case; of a user's own names it is a mistake.
    assert names_fault(["a", "A"]) is None
    with pytest.raises(DataError, match=r"^a\.txt: the class 'A' and 'a' differ in case only"):
        check_names(["a", "A"], "a.txt", SEE)
    assert told_apart(["a", "b", "a"]) == ("a (0)", "b", "a (2)")
    assert told_apart(["a", "b", "a"], ["x", "y", "z"]) == ("a (x)", "b", "a (z)")


def test_names_of_a_setting_and_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_bytes(b"one\r\n\n  two \nthree\x0bfour\n")
    assert given_names(None, tmp_path, SEE) is None
    assert given_names([" a", "b"], tmp_path, SEE) == ("a", "b")
    with pytest.raises(DataError, match=r"classes\.txt: the class name 'three.*U\+000B"):
        given_names("classes.txt", tmp_path, SEE)
    for names in ([], ["a", " "], ["a\tb"]):
        with pytest.raises(DataError, match=r"^data\.classes: .*; see there$"):
            given_names(names, tmp_path, SEE)

    assert split_names(" a ;; b c;", ";", "x, row 1", SEE) == ["a", "b c"]
    with pytest.raises(DataError, match=r"^x, row 1: the class name 'a.x1b' has .*; see there$"):
        split_names("b;a\x1b", ";", "x, row 1", SEE)


def test_published_networks_have_the_names_of_coco_and_voc(sample_data: Path) -> None:
    file = sample_data / "coco2014_mini" / "annotations" / "instances_val2014.json"
    categories = json.loads(file.read_text())["categories"]
    by_id = sorted(categories, key=lambda category: category["id"])
    assert tuple(category["name"] for category in by_id) == COCO_NAMES

    lists = [path.stem for path in (sample_data / "voc2012_mini").rglob("*_trainval.txt")]
    assert sorted(name.removesuffix("_trainval") for name in lists) == list(VOC) == sorted(VOC)


# Labels


MATRIX = np.array([[1, 0, -1], [0, 0, 0], [-1, 1, 1], [0, 1, 0]], np.int8)


@pytest.mark.parametrize("default", [0, -1])
def test_labels_are_those_of_the_matrix(default: int) -> None:
    labels = from_dense(MATRIX, default=default)
    assert np.array_equal(labels.dense(), MATRIX)
    assert [labels.row(i).tolist() for i in range(len(labels))] == MATRIX.tolist()
    labels.row(0).fill_(7)
    assert np.array_equal(labels.dense(), MATRIX)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            labels.row(index)

    for images in (np.array([True, False, True, True]), np.array([3, 0]), np.array([], np.int64)):
        assert np.array_equal(labels.select(images).dense(), MATRIX[images])
    for columns in ([2, 0], [1], []):
        assert np.array_equal(labels.select_classes(columns).dense(), MATRIX[:, columns])
    if default == 0:
        assert np.array_equal(labels.recode({-1: 1, 1: -1}).dense(), -MATRIX)

    for value in (1, 0, -1):
        assert np.array_equal(labels.all_counts(value), (value == MATRIX).sum(0))
        if value != default:
            assert np.array_equal(labels.counts(value), (value == MATRIX).sum(0))
            assert np.array_equal(labels.counts_per_image(value), (value == MATRIX).sum(1))


def test_labels_of_entries_single_classes_and_statements() -> None:
    partial = from_entries([{1: 0, 2: 1}, {0: 0}, {0: 1}], num_classes=3, default=-1)
    assert partial.dense().tolist() == [[-1, 0, 1], [0, -1, -1], [1, -1, -1]]
    assert from_single(np.array([2, 0]), 3).dense().tolist() == [[0, 0, 1], [1, 0, 0]]

    rng = np.random.default_rng(0)
    images, classes, values = rng.integers(0, 5, 40), rng.integers(0, 3, 40), rng.integers(0, 2, 40)
    said: dict[tuple[int, int], set[int]] = {}
    for image, column, value in zip(images, classes, values, strict=True):
        said.setdefault((image, column), set()).add(value)
    expected = np.full((6, 3), -1)
    for pair, both in said.items():
        expected[pair] = max(both)
    labels, contradictions = from_statements(images, classes, values, num_images=6, num_classes=3)
    assert np.array_equal(labels.dense(), expected)
    assert contradictions == sum(len(both) == 2 for both in said.values())


def test_class_indices_of_a_file() -> None:
    assert are_indices([0, 2], 3)
    assert not any(
        are_indices(value, 3) for value in (3, None, {"0": 1}, [0, 3], [-1], [True], ["0"])
    )


# Labels that are dropped, to simulate partial annotation


LARGE = (np.random.default_rng(5).random((4000, 6)) < [0, 0.001, 0.05, 0.3, 0.9, 1]).astype(np.int8)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_each_label_goes_with_the_same_probability(p: float) -> None:
    thin = random_drop(from_dense(LARGE), p, 0).dense()
    gone = thin == -1
    assert np.array_equal(thin[~gone], LARGE[~gone])
    deviation = (p * (1 - p) / len(LARGE)) ** 0.5
    assert np.abs(gone.mean(0) - p).max() <= 5 * deviation  # each class by itself
    together = (gone[:, 0] & gone[:, 1]).mean()
    assert abs(together - p * p) <= 5 * deviation  # and independently of the others


@pytest.mark.parametrize("n", [1, 20, 10**6])
def test_each_class_keeps_its_number_of_labels(n: int) -> None:
    kept = fixed_per_class(from_dense(LARGE), n, 0).dense()
    for value in (1, 0):
        assert np.array_equal((kept == value).sum(0), np.minimum((value == LARGE).sum(0), n))
    assert np.array_equal(kept[kept != -1], LARGE[kept != -1])


def test_what_goes_depends_on_the_seed_and_what_is_unknown_stays_so() -> None:
    partly = LARGE.copy()
    partly[::2] = -1
    for default in (0, -1):
        labels = from_dense(partly, default=default)
        for thin, argument in ((random_drop, 0.5), (fixed_per_class, 30)):
            first, again, other = (thin(labels, argument, seed).dense() for seed in (1, 1, 2))  # type: ignore[arg-type]
            assert np.array_equal(first, again)
            assert not np.array_equal(first, other)
            assert (first[::2] == -1).all()
        assert np.array_equal(labels.dense(), partly)


# Tables


def test_a_table_of_classes_by_name_or_by_index() -> None:
    for labels in ({"dog": 1, "cat": 2}, {1: 1, 0: 2}):
        for default in (0, -1):
            made = TableBuilder(SEE, classes=["cat", "dog", "eel"], default=default)
            made.add("b/2.jpg", labels, "a.csv, row 2")
            made.add("b/1.jpg", {}, "a.csv, row 3")
            table = made.build("a.csv")
            assert table.classes == ("cat", "dog", "eel")
            assert table.files.tolist() == [b"b/2.jpg", b"b/1.jpg"]  # as they were added
            assert table.labels.dense().tolist() == [[2, 1, default], [default] * 3]
            assert table.labels.default == default

    some = table.select(np.array([1]))
    assert (some.files.tolist(), some.classes) == ([b"b/1.jpg"], table.classes)
    assert some.labels.dense().tolist() == [[-1, -1, -1]]


def test_without_classes_they_are_the_sorted_labels() -> None:
    made = TableBuilder(SEE)
    labels = {"eel": 1, "cat": 1}
    made.add("1.jpg", labels, "row 1")
    labels["fox"] = 1  # the labels of the caller are copied
    made.add("2.jpg", {"dog": 0}, "row 2")
    table = made.build("a.csv")
    assert table.classes == ("cat", "dog", "eel")
    assert table.labels.dense().tolist() == [[1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../1.jpg", "a/../../1.jpg", "a\\..\\1.jpg", "C:\\1.jpg", "a\0b"]
)
def test_a_path_that_leads_elsewhere(path: str) -> None:
    with pytest.raises(DataError) as caught:
        TableBuilder(SEE).add(path, {}, "a.csv, row 2")
    expected = f"a.csv, row 2: {path!r} is not a path inside the image folder; see there"
    assert str(caught.value) == expected


@pytest.mark.parametrize("path", ["a/1.jpg", "a\\1.jpg", "./a//1.jpg", "a/./1.jpg"])
def test_paths_are_written_in_one_way(path: str) -> None:
    made = TableBuilder(SEE, classes=["cat"])
    made.add("a/1.jpg", {}, "a.csv, row 2")
    with pytest.raises(
        DataError, match=r"row 7: the image a/1.jpg is listed twice, first in row 2"
    ):
        made.add(path, {}, "a.csv, row 7")
    assert path_inside("..a/b..jpg", "", SEE) == "..a/b..jpg"
    assert encode_paths(["\udce9.jpg"]).tolist() == [b"\xe9.jpg"]


def test_what_no_table_may_hold() -> None:
    made = TableBuilder(SEE, classes=["Cat", "dog"])
    with pytest.raises(DataError, match=r"^row 2: the class 'cat' is not in .* mean 'Cat'\?"):
        made.add("1.jpg", {"cat": 1}, "row 2")
    for index in (-1, 2):
        with pytest.raises(DataError, match=rf"row 3: the class {index} is not an index below 2"):
            made.add(f"{index}.jpg", {index: 1}, "a.csv, row 3")

    empty, clash = TableBuilder(SEE), TableBuilder(SEE)
    empty.add("1.jpg", {}, "row 1")
    clash.add("1.jpg", {"cat": 1, "Cat": 1}, "row 1")
    for made, expected in ((empty, "no image has a label"), (clash, "differ in case only")):
        with pytest.raises(DataError, match=rf"^a\.csv: .*{expected}.*; see there$"):
            made.build("a.csv")


def test_the_log_names_classes_without_an_image(caplog: pytest.LogCaptureFixture) -> None:
    dense = np.array([[1, 0, 0, 0, -1]], np.int8)
    table = Table(encode_paths(["a"]), from_dense(dense), ("p", "q", "r", "s", "t"))
    with caplog.at_level(logging.INFO, "mldec"):
        log_split("some", "val", table)
    assert caplog.messages == [
        "some val: 1 images, 5 classes",
        "some val: 4 of 5 classes have no image: 'q', 'r', 's', ...",
    ]
