import numpy as np
import pytest

from mldec.data.partial_labels import fixed_per_class, random_drop
from mldec.data.table import from_dense

RNG = np.random.default_rng(5)
MATRIX = (RNG.random((4000, 6)) < [0.0, 0.001, 0.05, 0.3, 0.9, 1.0]).astype(np.int8)
LABELS = from_dense(MATRIX)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_each_entry_goes_with_the_same_probability(p):
    thin = random_drop(LABELS, p, 0).dense()
    gone = thin == -1
    assert np.array_equal(thin[~gone], MATRIX[~gone])
    deviation = (p * (1 - p) / len(MATRIX)) ** 0.5
    assert np.abs(gone.mean(0) - p).max() < 5 * deviation  # each class by itself
    together = (gone[:, 0] & gone[:, 1]).mean()
    assert abs(together - p * p) < 5 * deviation  # and independently of the others


def test_nothing_or_everything_goes():
    assert np.array_equal(random_drop(LABELS, 0.0, 0).dense(), MATRIX)
    assert (random_drop(LABELS, 1.0, 0).dense() == -1).all()


@pytest.mark.parametrize("n", [1, 20, 10**6])
def test_each_class_keeps_its_number(n):
    kept = fixed_per_class(LABELS, n, 0).dense()
    for value in (1, 0):
        assert np.array_equal((kept == value).sum(0), np.minimum((value == MATRIX).sum(0), n))
    known = kept != -1
    assert np.array_equal(kept[known], MATRIX[known])


def test_what_stays_is_drawn_from_the_whole_split():
    column = fixed_per_class(LABELS, 200, 0).dense()[:, 3]
    for value in (1, 0):
        assert (
            abs(np.flatnonzero(column == value).mean() / len(MATRIX) - 0.5)
            < 5 * (1 / 12 / 200) ** 0.5
        )


@pytest.mark.parametrize(
    "thin",
    [
        lambda labels, seed: random_drop(labels, 0.5, seed),
        lambda labels, seed: fixed_per_class(labels, 30, seed),
    ],
)
def test_the_seed_decides(thin):
    first, again, other = (thin(LABELS, seed).dense() for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(LABELS.dense(), MATRIX)  # the labels given are left as they were


@pytest.mark.parametrize("rest", [0, -1])
def test_what_is_not_annotated_stays_so(rest):
    partly = MATRIX.copy()
    partly[::2] = -1
    labels = from_dense(partly, default=rest)
    assert (random_drop(labels, 0.3, 0).dense()[::2] == -1).all()
    assert (fixed_per_class(labels, 50, 0).dense()[::2] == -1).all()
