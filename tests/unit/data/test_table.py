"""Class names, sparse labels, and tables of images."""

import numpy as np
import pytest

from mldec.data.labels import from_dense, from_entries, from_single, from_statements
from mldec.data.observed import fixed_per_class, listed_positives, random_drop, random_positives
from mldec.data.readers.class_folders import _read_info, readable
from mldec.data.table import TableBuilder, encode_paths, path_inside
from mldec.data.types import Classes
from mldec.errors import DataError
from mldec.names import (
    COCO_NAMES,
    VOC,
    as_name,
    check_names,
    disambiguate,
    given_names,
    name_fault,
    names_fault,
    split_names,
)

# Names


GOOD = ["dog", "hot dog", "caf\u00e9", "\u05d0", "0", "C/V 'a' \"b\"", "\U0001f468\u200d\U0001f469"]
CONTROLS = ["\t", "\n", "\0", "\x1b", "\x7f", "\x9b", "\u2028", "\ud800"]
ODD = [None, True, [], b"dog", "", "  "]


@pytest.mark.parametrize(
    "name",
    ["hot\u00a0dog", "hot  dog", " hot dog ", "\ufeffhot dog", "hot\u200b dog"],
)
def test_names_that_look_equal_are_equal(name):
    assert as_name(name, "") == "hot dog"
    assert as_name("Tu\u0308r", "") == "T\u00fcr"
    with pytest.raises(DataError, match="listed twice"):
        check_names(["hot dog", name], "")


def test_names_of_known_lists_are_not_changed():
    known = COCO_NAMES + VOC + readable(sorted(_read_info("imagenet_synsets.txt").split()))
    assert [as_name(name, "") for name in known] == list(known)


def test_valid_names_are_accepted(tmp_path):
    assert names_fault(GOOD) is None
    assert Classes(tuple(GOOD)).names == tuple(GOOD)
    assert check_names(GOOD, "") == tuple(GOOD)
    assert [as_name(value, "") for value in (1, -2, 0.5)] == ["1", "-2", "0.5"]
    assert split_names(" a ;; b c;", ";", "") == ["a", "b c"]

    # MIDs of Open Images may differ only in case.
    assert names_fault(["a", "A"]) is None
    assert disambiguate(["a", "b", "a"]) == ("a (0)", "b", "a (2)")
    assert disambiguate(["a", "b", "a"], ["x", "y", "z"]) == ("a (x)", "b", "a (z)")

    (tmp_path / "classes.txt").write_bytes(b"one\r\n\n  two \n")
    assert given_names(None, tmp_path) is None
    assert given_names([" a", "b"], tmp_path) == ("a", "b")
    assert given_names("classes.txt", tmp_path) == ("one", "two")


@pytest.mark.parametrize("name", [f"red{control}car" for control in CONTROLS] + ODD, ids=ascii)
def test_names_with_control_characters_and_odd_types_are_invalid(name):
    assert name_fault(name)


# Labels


MATRIX = np.array([[1, 0, -1], [0, 0, 0], [-1, 1, 1], [0, 1, 0]], np.int8)


@pytest.mark.parametrize("default", [0, -1])
def test_labels_equal_their_matrix(default):
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
    stated = {}
    for image, column, value in zip(images, classes, values, strict=True):
        stated.setdefault((image, column), set()).add(value)
    expected = np.full((6, 3), -1)
    for pair, both in stated.items():
        expected[pair] = max(both)
    labels, contradictions = from_statements(images, classes, values, num_images=6, num_classes=3)
    assert np.array_equal(labels.dense(), expected)
    assert contradictions == sum(len(both) == 2 for both in stated.values())


# Partial labels


LARGE = (np.random.default_rng(5).random((4000, 6)) < [0, 0.001, 0.05, 0.3, 0.9, 1]).astype(np.int8)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_each_label_is_dropped_with_same_probability(p):
    thin = random_drop(from_dense(LARGE), p, 0).dense()
    dropped = thin == -1
    assert np.array_equal(thin[~dropped], LARGE[~dropped])
    deviation = (p * (1 - p) / len(LARGE)) ** 0.5
    assert np.abs(dropped.mean(0) - p).max() <= 5 * deviation  # each class by itself
    together = (dropped[:, 0] & dropped[:, 1]).mean()
    assert abs(together - p * p) <= 5 * deviation  # independent of other classes


@pytest.mark.parametrize("n", [1, 20, 10**6])
def test_each_class_keeps_n_labels(n):
    kept = fixed_per_class(from_dense(LARGE), n, 0).dense()
    for value in (1, 0):
        assert np.array_equal((kept == value).sum(0), np.minimum((value == LARGE).sum(0), n))
    assert np.array_equal(kept[kept != -1], LARGE[kept != -1])


def test_dropped_labels_depend_on_seed_and_unknown_labels_stay_unknown():
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


@pytest.mark.parametrize("share", [None, 0.3, 0.7, 1.0])
def test_one_positive_per_image_or_share_of_all_is_observed(share):
    labels = from_dense(LARGE)
    chosen = random_positives(labels, 1, share)
    kept = labels.select_entries(chosen).dense()
    assert (kept <= LARGE).all()
    assert np.array_equal(kept.any(1), LARGE.any(1))
    one_each = LARGE.any(1).sum()
    expected = one_each if share is None else max(one_each, round(share * LARGE.sum()))
    assert kept.sum() == expected
    assert np.array_equal(chosen, random_positives(labels, 1, share))
    if share != 1:
        assert not np.array_equal(chosen, random_positives(labels, 2, share))


def test_positives_of_an_image_are_equally_likely():
    labels = from_dense(np.tile(np.array([[0, 1, 1, 0, 1]], np.int8), (3000, 1)))
    share = labels.select_entries(random_positives(labels, 0)).counts() / 3000
    deviation = (1 / 3 * 2 / 3 / 3000) ** 0.5
    assert np.abs(share - np.array([0, 1, 1, 0, 1]) / 3).max() <= 5 * deviation


def listed(folder, text, files=("x/a.jpg", "y/b c.jpg")):
    path = folder / "kept.txt"
    path.write_text(text)
    labels = from_dense(np.array([[1, 1, 0], [0, 1, 1]], np.int8))
    return labels.select_entries(listed_positives(labels, files, path)).dense().tolist()


def test_published_list_selects_positives(tmp_path):
    assert listed(tmp_path, "b c.jpg, 1 2\nother.jpg,9\na.jpg,0\n") == [[1, 0, 0], [0, 1, 1]]
    assert listed(tmp_path, "b c.jpg,\na.jpg,1\n") == [[0, 1, 0], [0, 0, 0]]


# Tables


def test_table_has_classes_by_name_or_index():
    for labels in ({"dog": 1, "cat": 2}, {1: 1, 0: 2}):
        for default in (0, -1):
            builder = TableBuilder(["cat", "dog", "eel"], default=default)
            builder.add("b/2.jpg", labels, "a.csv, row 2")
            builder.add("b/1.jpg", {}, "a.csv, row 3")
            table = builder.build("a.csv")
            assert table.classes == ("cat", "dog", "eel")
            assert table.files.tolist() == [b"b/2.jpg", b"b/1.jpg"]  # in order of insertion
            assert table.labels.dense().tolist() == [[2, 1, default], [default] * 3]
            assert table.labels.default == default

    subset = table.select(np.array([1]))
    assert (subset.files.tolist(), subset.classes) == ([b"b/1.jpg"], table.classes)
    assert subset.labels.dense().tolist() == [[-1, -1, -1]]


def test_table_without_classes_has_sorted_labels():
    builder = TableBuilder()
    labels = {"eel": 1, "cat": 1}
    builder.add("1.jpg", labels, "row 1")
    labels["fox"] = 1  # the labels are copied
    builder.add("2.jpg", {"dog": 0}, "row 2")
    table = builder.build("a.csv")
    assert table.classes == ("cat", "dog", "eel")
    assert table.labels.dense().tolist() == [[1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("path", ["a\\1.jpg", "./a//1.jpg", "a/./1.jpg", "..a/b..jpg"])
def test_paths_are_normalized(path):
    assert path_inside(path, "") in ("a/1.jpg", "..a/b..jpg")
    assert encode_paths(["\udce9.jpg"]).tolist() == [b"\xe9.jpg"]


def build_table(rows, classes=None):
    builder = TableBuilder(classes)
    for number, (path, labels) in enumerate(rows):
        builder.add(path, labels, f"a.csv, row {number}")
    return builder.build("a.csv")


FIRST = ("a/1.jpg", {})
OUTSIDE = ["", "/etc/passwd", "../1.jpg", "a\\..\\1.jpg", "C:\\1.jpg", "a\0b", ".//a/1.jpg"]
TWINS = ["a/0.jpg", "b/0.jpg"]


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (lambda _: Classes(("a", "b", "a")), "'a'"),
        (lambda _: as_name("\x1b", "a.csv, row 3"), "a.csv, row 3"),
        (lambda _: check_names(["a", "A"], "a.txt"), "a.txt"),
        (lambda _: split_names("b;a\x1b", ";", "row 1"), "row 1"),
        (lambda _: build_table([FIRST, ("2.jpg", {"cat": 1})], ["Cat"]), "row 1.*'Cat'"),
        (lambda _: build_table([FIRST, ("2.jpg", {1: 1})], ["Cat"]), "row 1"),
        (lambda _: build_table([FIRST]), "a.csv"),
        (lambda _: build_table([("1.jpg", {"cat": 1, "Cat": 1})]), "a.csv"),
        (lambda folder: listed(folder, "a.jpg,0\n"), "kept.txt"),
        (lambda folder: listed(folder, "a.jpg,cat\n"), "kept.txt"),
        (lambda folder: listed(folder, "0.jpg,0\n0.jpg,1\n", TWINS), r"a/0\.jpg and b/0\.jpg"),
    ]
    + [
        (lambda _, path=path: build_table([FIRST, (path, {})], ["Cat"]), "row 1")
        for path in OUTSIDE
    ],
)
def test_fault_of_names_or_rows_is_located(tmp_path, check, name):
    with pytest.raises(DataError, match=name):
        check(tmp_path)
