import numpy as np
import pytest

from mldec.data.table import are_indices, from_dense, from_entries, from_flags, from_single

MATRIX = np.array([[1, 0, -1], [0, 0, 0], [-1, 1, 1], [0, 1, 0]], np.int8)


@pytest.mark.parametrize("default", [0, -1])
def test_rows_and_matrix_are_those_given(default: int) -> None:
    labels = from_dense(MATRIX, default=default)
    assert np.array_equal(labels.dense(), MATRIX)
    assert [labels.row(i).tolist() for i in range(len(labels))] == MATRIX.tolist()
    with pytest.raises(IndexError):
        labels.row(4)


def test_a_row_is_the_callers_own() -> None:
    labels = from_dense(MATRIX)
    labels.row(0).fill_(7)
    assert np.array_equal(labels.dense(), MATRIX)


@pytest.mark.parametrize(
    "images", [np.array([True, False, True, True]), np.array([3, 0]), np.array([], np.int64)]
)
def test_selection(images: np.ndarray) -> None:
    assert np.array_equal(from_dense(MATRIX).select(images).dense(), MATRIX[images])


def test_counts() -> None:
    labels = from_dense(MATRIX)
    for value in (1, -1):
        assert np.array_equal(labels.counts(value), (value == MATRIX).sum(0))
        assert np.array_equal(labels.counts_per_image(value), (value == MATRIX).sum(1))


@pytest.mark.parametrize("default", [0, -1])
def test_all_counts_are_those_of_the_matrix(default: int) -> None:
    labels = from_dense(MATRIX, default=default)
    for value in (1, 0, -1):
        assert np.array_equal(labels.all_counts(value), (value == MATRIX).sum(0))


def test_recoding() -> None:
    assert np.array_equal(from_dense(MATRIX).recode({-1: 1, 1: -1}).dense(), -MATRIX)


def test_entries_and_single_classes() -> None:
    partial = from_entries([{1: 0, 2: 1}, {0: 0}, {0: 1}], num_classes=3, default=-1)
    assert partial.dense().tolist() == [[-1, 0, 1], [0, -1, -1], [1, -1, -1]]
    assert from_single(np.array([2, 0]), 3).dense().tolist() == [[0, 0, 1], [1, 0, 0]]


def test_some_classes_in_another_order():
    dense = np.array([[1, 0, -1, 0], [0, 0, 0, 1], [0, 1, 1, 0]], np.int8)
    picked = from_dense(dense).select_classes([3, 0, 2])
    assert np.array_equal(picked.dense(), dense[:, [3, 0, 2]])
    assert picked.row(0).tolist() == [0, 1, -1]
    assert (
        from_dense(dense, default=-1).select_classes([1]).dense().tolist() == dense[:, [1]].tolist()
    )
    assert from_dense(dense).select_classes([]).dense().shape == (3, 0)


def test_flags_are_the_same_as_in_a_matrix() -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 500):
        images, classes = random.integers(20, size=count), random.integers(7, size=count)
        flags = 2 ** random.integers(1, 4, size=count).astype(np.int8)
        matrix = np.zeros((20, 7), np.int8)
        np.bitwise_or.at(matrix, (images, classes), flags)
        ours, expected = (
            from_flags(images, classes, flags, num_images=20, num_classes=7),
            from_dense(matrix),
        )
        for name in ("starts", "classes", "values"):
            assert np.array_equal(getattr(ours, name), getattr(expected, name)), name
            assert getattr(ours, name).dtype == getattr(expected, name).dtype, name


@pytest.mark.parametrize("value", [[], [0, 2, 2]])
def test_lists_of_indices(value):
    assert are_indices(value, 3)


@pytest.mark.parametrize("value", [[3], [-1], [True], [1.0], ["1"], "12", None, {0: 1}])
def test_what_is_no_list_of_indices(value):
    assert not are_indices(value, 3)
