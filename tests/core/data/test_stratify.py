"""The stratified split: its properties, and a slow form written from the paper's Algorithm 1."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldec.data.settings import hold_out_stratified, stratified
from mldec.data.table import Table, encode_paths, from_dense, hold_out


def slow(dense: np.ndarray, order: list[int], fraction: float) -> list[bool]:
    """Return which images are held out, with the sets and counters of the paper's Algorithm 1."""
    remaining = list(order)
    shares = [1 - fraction, fraction]
    wanted = [len(order) * share for share in shares]
    wanted_of = [
        [int(dense[:, k].sum()) * share for k in range(dense.shape[1])] for share in shares
    ]
    held = [False] * len(order)

    while remaining:
        examples = {
            k: [image for image in remaining if dense[image, k]] for k in range(dense.shape[1])
        }
        examples = {k: images for k, images in examples.items() if images}
        rarest = min(examples, key=lambda k: (len(examples[k]), k), default=None)

        for image in list(remaining) if rarest is None else examples[rarest]:
            wishes = [(0 if rarest is None else wanted_of[j][rarest], wanted[j]) for j in (0, 1)]
            split = 1 if wishes[1] > wishes[0] else 0
            held[image] = split == 1
            remaining.remove(image)
            wanted[split] -= 1
            for k in np.flatnonzero(dense[image]):
                wanted_of[split][k] -= 1
    return held


def table_of(dense: np.ndarray, default: int = 0) -> Table:
    files = encode_paths([f"{number}.jpg" for number in range(len(dense))])
    return Table(files, from_dense(dense, default=default), tuple(map(str, range(dense.shape[1]))))


def long_tail(num_images: int, num_classes: int) -> np.ndarray:
    """Return labels whose classes occur in 0.5 % to 30 % of the images, int8 [N, K]."""
    shares = np.geomspace(0.005, 0.3, num_classes)
    return (np.random.default_rng(0).random((num_images, num_classes)) < shares).astype(np.int8)


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.sampled_from([0.1, 0.25, 0.5, 0.7]),
    st.randoms(use_true_random=False),
)
def test_it_is_the_algorithm_of_the_paper(images, classes, fraction, random) -> None:
    dense = np.array(
        [[random.random() < 0.4 for _ in range(classes)] for _ in range(images)], np.int8
    )
    order = random.sample(range(images), images)
    held = stratified(from_dense(dense), np.array(order), fraction)
    assert held.tolist() == slow(dense, order, fraction)


def test_a_larger_table_agrees_too() -> None:
    dense = long_tail(400, 12)
    order = np.random.default_rng(1).permutation(400)
    assert stratified(from_dense(dense), order, 0.2).tolist() == slow(dense, order.tolist(), 0.2)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_with_one_label_each_class_is_divided_exactly(fraction: float) -> None:
    classes = np.random.default_rng(0).integers(0, 7, 500)
    table = table_of(np.eye(7, dtype=np.int8)[classes])
    counts = hold_out_stratified(table, fraction, 0, val=True).labels.counts()
    assert np.abs(counts - fraction * table.labels.counts()).max() <= 1


def test_shares_are_nearer_than_by_hash() -> None:
    table = table_of(long_tail(2000, 40))
    wanted = 0.1 * table.labels.counts()
    errors = {}
    for divide in (hold_out, hold_out_stratified):
        val = divide(table, 0.1, 0, val=True)
        errors[divide] = np.abs(val.labels.counts() - wanted) / wanted
    assert errors[hold_out_stratified].mean() < errors[hold_out].mean() / 2
    assert val.labels.counts().min() > 0
    assert len(val) == pytest.approx(200, rel=0.1)


def test_both_splits_are_the_whole_and_do_not_depend_on_the_order_of_rows() -> None:
    table = table_of(long_tail(300, 10))
    val = hold_out_stratified(table, 0.2, 0, val=True).files.tolist()
    train = hold_out_stratified(table, 0.2, 0, val=False).files.tolist()
    assert not set(train) & set(val)
    assert set(train) | set(val) == set(table.files.tolist())
    assert train == [file for file in table.files.tolist() if file in set(train)]

    shuffled = table.select(np.random.default_rng(2).permutation(300))
    assert set(hold_out_stratified(shuffled, 0.2, 0, val=True).files.tolist()) == set(val)
    assert hold_out_stratified(table, 0.2, 1, val=True).files.tolist() != val


def test_only_positives_count() -> None:
    dense = long_tail(300, 10)
    unknown = np.where(np.random.default_rng(3).random(dense.shape) < 0.5, -1, 0)
    partial = np.where(dense == 1, 1, unknown).astype(np.int8)
    for default in (0, -1):
        files = hold_out_stratified(table_of(partial, default), 0.2, 0, val=True).files
        assert np.array_equal(files, hold_out_stratified(table_of(dense), 0.2, 0, val=True).files)


def test_images_without_a_label_and_an_empty_table() -> None:
    table = table_of(np.zeros((100, 3), np.int8))
    assert len(hold_out_stratified(table, 0.3, 0, val=True)) == 30
    empty = table.select(np.zeros(0, np.int64))
    assert len(hold_out_stratified(empty, 0.3, 0, val=True)) == 0
