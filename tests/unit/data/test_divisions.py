"""Validation splits by a hash, stratified validation splits, and folds."""

import re
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldec.data.labels import from_dense
from mldec.data.sampling import Sampling
from mldec.data.splits import HoldOut, fold_numbers, stratified
from mldec.data.table import Table, encode_paths
from mldec.data.types import in_folder

FILES = [f"photos/{number}.jpg" for number in range(2000)]
KEYS = encode_paths(FILES)


def hold_out(images, fraction, seed, split="stratified", *, val):
    return HoldOut(val_fraction=fraction, seed=seed, split=split).select(images, val=val)


def table_of(dense, default=0):
    labels = from_dense(dense, default=default)
    table = Table(KEYS[: len(dense)], labels, tuple(map(str, range(dense.shape[1]))))
    return in_folder(table, Path("photos"))


def long_tail(num_images, num_classes):
    """Return labels whose classes occur in 0.5 % to 30 % of the images, int8 [N, K]."""
    shares = np.geomspace(0.005, 0.3, num_classes)
    return (np.random.default_rng(0).random((num_images, num_classes)) < shares).astype(np.int8)


def test_hash_holds_out_each_image_independently():
    table = table_of(np.zeros((2000, 1), np.int8))

    def held_out(chosen, fraction, seed=0, *, val=True):
        return set(
            hold_out(table.select(chosen), fraction, seed, "hash", val=val).storage.keys.tolist()
        )

    every, half = np.arange(2000), np.arange(0, 2000, 2)
    chosen = held_out(every, 0.25)
    assert len(chosen) / 2000 == pytest.approx(0.25, abs=0.04)
    assert held_out(every, 0.25, val=False) == set(KEYS.tolist()) - chosen
    assert held_out(half, 0.25) == chosen & set(KEYS[half].tolist())
    assert held_out(every, 0.25, seed=1) != chosen
    assert held_out(every, 0.5) > chosen


# Stratified splits


def slow(dense, order, fraction):
    """Return a list of bool: the held-out images of Algorithm 1 of the paper, with plain loops."""
    remaining = list(order)
    classes, shares = range(dense.shape[1]), [1 - fraction, fraction]
    wanted = [len(order) * share for share in shares]
    wanted_of = [[int(dense[:, k].sum()) * share for k in classes] for share in shares]
    is_held_out = [False] * len(order)

    while remaining:
        examples = {k: [image for image in remaining if dense[image, k]] for k in classes}
        examples = {k: images for k, images in examples.items() if images}
        rarest = min(examples, key=lambda k: (len(examples[k]), k), default=None)

        for image in list(remaining) if rarest is None else examples[rarest]:
            wishes = [(0 if rarest is None else wanted_of[j][rarest], wanted[j]) for j in (0, 1)]
            split = 1 if wishes[1] > wishes[0] else 0
            is_held_out[image] = split == 1
            remaining.remove(image)
            wanted[split] -= 1
            for k in np.flatnonzero(dense[image]):
                wanted_of[split][k] -= 1
    return is_held_out


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.sampled_from([0.1, 0.25, 0.5, 0.7]),
    st.randoms(use_true_random=False),
)
def test_stratification_equals_algorithm_of_paper(images, classes, fraction, random):
    rows = [[random.random() < 0.4 for _ in range(classes)] for _ in range(images)]
    dense, order = np.array(rows, np.int8), random.sample(range(images), images)
    held = stratified(from_dense(dense), np.array(order), fraction)
    assert held.tolist() == slow(dense, order, fraction)


def test_stratified_splits_are_disjoint_and_ignore_row_order():
    table = table_of(long_tail(300, 10))
    val = hold_out(table, 0.2, 0, val=True).storage.keys.tolist()
    train = hold_out(table, 0.2, 0, val=False).storage.keys.tolist()
    assert train == [file for file in table.storage.keys.tolist() if file not in set(val)]

    shuffled = table.select(np.random.default_rng(2).permutation(300))
    assert set(hold_out(shuffled, 0.2, 0, val=True).storage.keys.tolist()) == set(val)
    assert hold_out(table, 0.2, 1, val=True).storage.keys.tolist() != val


@pytest.mark.parametrize("seed", range(5))
def test_stratified_validation_has_each_class_with_two_positives(seed):
    rng = np.random.default_rng(seed)
    dense = (rng.random((60, 40)) < rng.choice([0.02, 0.1], 40)).astype(np.int8)
    val = hold_out(table_of(dense), 0.1, seed, val=True)
    train = hold_out(table_of(dense), 0.1, seed, val=False)
    several = dense.sum(0) >= 2
    assert several.any()
    assert val.labels.counts()[several].all()
    assert len(train) + len(val) == 60


def test_stratification_uses_only_positives():
    dense = long_tail(300, 10)
    unknown = np.where(np.random.default_rng(3).random(dense.shape) < 0.5, -1, 0)
    partial = np.where(dense == 1, 1, unknown).astype(np.int8)
    for default in (0, -1):
        files = hold_out(table_of(partial, default), 0.2, 0, val=True).storage.keys
        assert np.array_equal(files, hold_out(table_of(dense), 0.2, 0, val=True).storage.keys)

    without = table_of(np.zeros((100, 3), np.int8))
    assert len(hold_out(without, 0.3, 0, val=True)) == 30
    assert len(hold_out(without.select(np.zeros(0, np.int64)), 0.3, 0, val=True)) == 0


# Folds


def fold_of(path, count):
    digest = sha256(f"0 {path}".encode()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % count


@pytest.mark.parametrize("count", [2, 7])
def test_fold_depends_only_on_path(count):
    numbers = fold_numbers(KEYS, count)
    assert numbers.tolist() == [fold_of(file, count) for file in FILES]

    wider = np.append(KEYS[300:100:-1], np.bytes_(b"x" * 200))
    assert fold_numbers(wider, count)[:-1].tolist() == numbers[300:100:-1].tolist()


def test_keys_of_folds_are_numbers_or_pixels():
    rng = np.random.default_rng(0)
    for keys in (rng.integers(0, 10**6, 500), rng.integers(0, 256, (500, 4, 4, 3), np.uint8)):
        numbers = fold_numbers(keys, 2)
        assert set(numbers.tolist()) == {1, 2}
        assert np.array_equal(fold_numbers(keys[::-1], 2), numbers[::-1])


@pytest.mark.parametrize("fold", ["3/2", "0/5", "1/1", "1", "", "-1/5", "1/5 ", "\u0661/5"])
def test_invalid_fold_raises(fold):
    assert Sampling(fold="5/5").fold == "5/5"
    with pytest.raises(ValueError, match=f"^fold is {re.escape(repr(fold))}"):
        Sampling(fold=fold)
