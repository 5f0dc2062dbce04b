"""Class names, sparse labels, and tables of images: what they take, refuse, and how they select."""

import logging

import numpy as np
import pytest

from mldec.data.labels import (
    fixed_per_class,
    from_dense,
    from_entries,
    from_single,
    from_statements,
    listed_positives,
    random_drop,
    random_positives,
)
from mldec.data.splits import log_split
from mldec.data.table import Table, TableBuilder, encode_paths, path_inside
from mldec.data.types import Classes
from mldec.errors import DataError
from mldec.names import (
    as_name,
    check_names,
    disambiguate,
    given_names,
    name_fault,
    names_fault,
    split_names,
)

SEE = "see there"

# Names


GOOD = ["dog", " dog ", "caf\u00e9", "\u200f\u05d0", "0", "C/V 'a' \"b\""]
CONTROLS = ["\t", "\n", "\0", "\x1b", "\x7f", "\x9b", "\u2028", "\ud800"]
ODD = [None, True, [], b"dog", "", "  "]


def test_names_that_are_taken():
    assert names_fault(GOOD) is None
    assert Classes(tuple(GOOD)).names == tuple(GOOD)
    assert check_names(GOOD[:2], "", "") == ("dog", " dog ")
    assert [as_name(value, "", "") for value in (1, -2, 0.5)] == ["1", "-2", "0.5"]


@pytest.mark.parametrize("name", [f"red{control}car" for control in CONTROLS] + ODD, ids=ascii)
def test_names_that_are_refused_everywhere(name):
    assert name_fault(name)
    with pytest.raises(DataError, match=r"^the names of the classes: .* of class 1 (has|is)"):
        Classes(("a", name))
    with pytest.raises(DataError, match=r"^a\.csv, row 3: the class name .*: rename it; see there"):
        as_name(name, "a.csv, row 3", SEE)


def test_two_classes_of_one_name():
    with pytest.raises(DataError, match="the classes 0 and 2 are both called 'a'"):
        Classes(("a", "b", "a"))
    # Two MIDs of Open Images may differ in case; of a user's own names it is a mistake.
    assert names_fault(["a", "A"]) is None
    with pytest.raises(DataError, match=r"^a\.txt: the class 'A' and 'a' differ in case only"):
        check_names(["a", "A"], "a.txt", SEE)
    assert disambiguate(["a", "b", "a"]) == ("a (0)", "b", "a (2)")
    assert disambiguate(["a", "b", "a"], ["x", "y", "z"]) == ("a (x)", "b", "a (z)")


def test_names_of_a_setting_and_of_a_text(tmp_path):
    (tmp_path / "classes.txt").write_bytes(b"one\r\n\n  two \nthree\x0bfour\n")
    assert given_names(None, tmp_path, SEE) is None
    assert given_names([" a", "b"], tmp_path, SEE) == ("a", "b")
    with pytest.raises(DataError, match=r"classes\.txt: the class name 'three.*U\+000B"):
        given_names("classes.txt", tmp_path, SEE)
    for names in (["a", " "], ["a\tb"]):
        with pytest.raises(DataError, match=r"^data\.classes: .*; see there$"):
            given_names(names, tmp_path, SEE)

    assert split_names(" a ;; b c;", ";", "x, row 1", SEE) == ["a", "b c"]
    with pytest.raises(DataError, match=r"^x, row 1: the class name 'a.x1b' has .*; see there$"):
        split_names("b;a\x1b", ";", "x, row 1", SEE)


# Labels


MATRIX = np.array([[1, 0, -1], [0, 0, 0], [-1, 1, 1], [0, 1, 0]], np.int8)


@pytest.mark.parametrize("default", [0, -1])
def test_labels_are_those_of_the_matrix(default):
    labels = from_dense(MATRIX, default=default)
    assert np.array_equal(labels.dense(), MATRIX)
    assert [labels.row(i).tolist() for i in range(len(labels))] == MATRIX.tolist()
    labels.row(0).fill_(7)
    assert np.array_equal(labels.dense(), MATRIX)

    for images in (np.array([True, False, True, True]), np.array([3, 0]), np.array([], np.int64)):
        assert np.array_equal(labels.select(images).dense(), MATRIX[images])
    for columns in ([2, 0], [1], []):
        assert np.array_equal(labels.select_classes(columns).dense(), MATRIX[:, columns])

    for value in (1, 0, -1):
        assert np.array_equal(labels.all_counts(value), (value == MATRIX).sum(0))
        if value != default:
            assert np.array_equal(labels.counts(value), (value == MATRIX).sum(0))
            assert np.array_equal(labels.counts_per_image(value), (value == MATRIX).sum(1))


def test_labels_of_entries_single_classes_and_statements():
    partial = from_entries([{1: 0, 2: 1}, {0: 0}, {0: 1}], num_classes=3, default=-1)
    assert partial.dense().tolist() == [[-1, 0, 1], [0, -1, -1], [1, -1, -1]]
    assert from_single(np.array([2, 0]), 3).dense().tolist() == [[0, 0, 1], [1, 0, 0]]

    rng = np.random.default_rng(0)
    images, classes, values = rng.integers(0, 5, 40), rng.integers(0, 3, 40), rng.integers(0, 2, 40)
    said = {}
    for image, column, value in zip(images, classes, values, strict=True):
        said.setdefault((image, column), set()).add(value)
    expected = np.full((6, 3), -1)
    for pair, both in said.items():
        expected[pair] = max(both)
    labels, contradictions = from_statements(images, classes, values, num_images=6, num_classes=3)
    assert np.array_equal(labels.dense(), expected)
    assert contradictions == sum(len(both) == 2 for both in said.values())


# Labels that are dropped, to simulate partial annotation


LARGE = (np.random.default_rng(5).random((4000, 6)) < [0, 0.001, 0.05, 0.3, 0.9, 1]).astype(np.int8)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_each_label_goes_with_the_same_probability(p):
    thin = random_drop(from_dense(LARGE), p, 0).dense()
    gone = thin == -1
    assert np.array_equal(thin[~gone], LARGE[~gone])
    deviation = (p * (1 - p) / len(LARGE)) ** 0.5
    assert np.abs(gone.mean(0) - p).max() <= 5 * deviation  # each class by itself
    together = (gone[:, 0] & gone[:, 1]).mean()
    assert abs(together - p * p) <= 5 * deviation  # and independently of the others


@pytest.mark.parametrize("n", [1, 20, 10**6])
def test_each_class_keeps_its_number_of_labels(n):
    kept = fixed_per_class(from_dense(LARGE), n, 0).dense()
    for value in (1, 0):
        assert np.array_equal((kept == value).sum(0), np.minimum((value == LARGE).sum(0), n))
    assert np.array_equal(kept[kept != -1], LARGE[kept != -1])


def test_what_goes_depends_on_the_seed_and_what_is_unknown_stays_so():
    partly = LARGE.copy()
    partly[::2] = -1
    for default in (0, -1):
        labels = from_dense(partly, default=default)
        for thin, argument in ((random_drop, 0.5), (fixed_per_class, 30)):
            first, again, other = (thin(labels, argument, seed).dense() for seed in (1, 1, 2))
            assert np.array_equal(first, again)
            assert not np.array_equal(first, other)
            assert (first[::2] == -1).all()
        assert np.array_equal(labels.dense(), partly)


# Positives that are observed, to simulate missing labels


@pytest.mark.parametrize("share", [None, 0.3, 0.7, 1.0])
def test_one_positive_of_each_image_is_observed_or_a_share_of_all(share):
    labels = from_dense(LARGE)
    chosen = random_positives(labels, 1, share)
    kept = labels.only(chosen).dense()
    assert (kept <= LARGE).all()
    assert np.array_equal(kept.any(1), LARGE.any(1))  # every image keeps one
    one_each = LARGE.any(1).sum()
    wanted = one_each if share is None else max(one_each, round(share * LARGE.sum()))
    assert kept.sum() == wanted
    assert np.array_equal(chosen, random_positives(labels, 1, share))
    if share != 1:
        assert not np.array_equal(chosen, random_positives(labels, 2, share))


def test_each_positive_of_an_image_is_as_likely():
    labels = from_dense(np.tile(np.array([[0, 1, 1, 0, 1]], np.int8), (3000, 1)))
    share = labels.only(random_positives(labels, 0)).counts() / 3000
    deviation = (1 / 3 * 2 / 3 / 3000) ** 0.5
    assert np.abs(share - np.array([0, 1, 1, 0, 1]) / 3).max() <= 5 * deviation


def test_a_public_list_names_the_observed_positives(tmp_path):
    labels = from_dense(np.array([[1, 1, 0], [0, 1, 1]], np.int8))
    files, path = ["x/a.jpg", "y/b c.jpg"], tmp_path / "kept.txt"

    def chosen(text):
        path.write_text(text)
        return labels.only(listed_positives(labels, files, path, SEE)).dense().tolist()

    assert chosen("b c.jpg, 1 2\nother.jpg,9\na.jpg,0\n") == [[1, 0, 0], [0, 1, 1]]
    assert chosen("b c.jpg,\na.jpg,1\n") == [[0, 1, 0], [0, 0, 0]]
    for text, part in (
        ("a.jpg,0\n", "1 training images are not in it, as b c.jpg"),
        ("a.jpg,2\nb c.jpg,1\n", "'a.jpg' does not show class 2"),
        ("other.jpg,0\n", "2 training images are not in it, as a.jpg"),
        ("a.jpg,cat\n", "invalid literal"),
    ):
        with pytest.raises(DataError) as caught:
            chosen(text)
        assert str(caught.value).startswith(f"{path} cannot be used (")
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_name_in_two_folders_is_ambiguous_in_a_public_list(tmp_path):
    labels = from_dense(np.array([[1, 1], [0, 1]], np.int8))
    path = tmp_path / "kept.txt"
    path.write_text("0.jpg,0\n0.jpg,1\n")
    with pytest.raises(
        DataError, match=r"kept\.txt: .* 0\.jpg is the name of both a/0.jpg and b/0"
    ):
        listed_positives(labels, ["a/0.jpg", "b/0.jpg"], path, SEE)


# Tables


def test_a_table_of_classes_by_name_or_by_index():
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


def test_without_classes_they_are_the_sorted_labels():
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
def test_a_path_that_leads_elsewhere(path):
    with pytest.raises(DataError) as caught:
        TableBuilder(SEE).add(path, {}, "a.csv, row 2")
    expected = f"a.csv, row 2: {path!r} is not a path inside the image folder; see there"
    assert str(caught.value) == expected


@pytest.mark.parametrize("path", ["a/1.jpg", "a\\1.jpg", "./a//1.jpg", "a/./1.jpg"])
def test_paths_are_written_in_one_way(path):
    made = TableBuilder(SEE, classes=["cat"])
    made.add("a/1.jpg", {}, "a.csv, row 2")
    with pytest.raises(
        DataError, match=r"row 7: the image a/1.jpg is listed twice, first in row 2"
    ):
        made.add(path, {}, "a.csv, row 7")
    assert path_inside("..a/b..jpg", "", SEE) == "..a/b..jpg"
    assert encode_paths(["\udce9.jpg"]).tolist() == [b"\xe9.jpg"]


def test_what_no_table_may_hold():
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


def test_the_log_names_classes_without_an_image(caplog):
    dense = np.array([[1, 0, 0, 0, -1]], np.int8)
    table = Table(encode_paths(["a"]), from_dense(dense), ("p", "q", "r", "s", "t"))
    with caplog.at_level(logging.INFO, "mldec"):
        log_split("some", "val", table)
    assert caplog.messages == [
        "some val: 1 images, 5 classes",
        "some val: 4 of 5 classes have no image: 'q', 'r', 's', 't'",
    ]
