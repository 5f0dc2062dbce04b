"""Folds, against the hash itself and as parts of a source."""

import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mldec.data.cache import TableCache
from mldec.data.settings import (
    FileSettings,
    Folds,
    Source,
    View,
    assemble,
    fold_numbers,
    parse_fold,
)
from mldec.data.table import encode_paths, from_dense, held_out
from mldec.data.tasks import MultiLabel, ZeroShot
from mldec.data.types import ImageFiles, LabelledImages, VectorOrigin, fixed_sample
from mldec.data.word_vectors import WordVectors
from mldec.errors import ConfigError, DataError

KEYS = encode_paths([f"photos/{number}.jpg" for number in range(2000)])
NAMES = ("cat", "dog", "eel")


def by_hand(path: str, count: int) -> int:
    digest = sha256(f"0 {path}".encode()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % count


@pytest.mark.parametrize("count", [2, 5, 7])
def test_every_image_is_in_one_fold_which_its_path_alone_decides(count: int) -> None:
    numbers = fold_numbers(KEYS, count)
    assert numbers.tolist() == [by_hand(f"photos/{index}.jpg", count) for index in range(2000)]

    parts = [Folds(fold=f"{number}/{count}").held_out(KEYS) for number in range(1, count + 1)]
    assert np.array_equal(np.sum(parts, axis=0), np.ones(2000))

    # The standard deviation of the size of a fold is below sqrt(2000 / count).
    sizes = np.bincount(numbers, minlength=count + 1)[1:]
    assert np.abs(sizes - 2000 / count).max() < 5 * np.sqrt(2000 / count)


def test_other_images_and_their_order_do_not_matter() -> None:
    numbers = fold_numbers(KEYS, 5)
    order = np.random.default_rng(0).permutation(2000)[:300]
    wider = np.append(KEYS[order], np.bytes_(b"x" * 200))
    assert fold_numbers(wider, 5)[:-1].tolist() == numbers[order].tolist()


def test_images_that_a_hash_left_for_training_are_in_folds_of_one_size() -> None:
    remaining = KEYS[~held_out(KEYS.tolist(), 0.5, 0)]
    sizes = np.bincount(fold_numbers(remaining, 4))[1:]
    assert np.abs(sizes - len(remaining) / 4).max() < 5 * np.sqrt(len(remaining) / 4)


def test_the_images_of_one_fold_are_spread_by_another_seed() -> None:
    fold = KEYS[fold_numbers(KEYS, 5) == 3]
    sizes = np.bincount(fold_numbers(fold, 5, seed=1), minlength=6)[1:]
    assert np.abs(sizes - len(fold) / 5).max() < 5 * np.sqrt(len(fold) / 5)


def test_keys_may_be_numbers_or_pixels() -> None:
    rng = np.random.default_rng(0)
    for keys in (rng.integers(0, 10**6, 500), rng.integers(0, 256, (500, 4, 4, 3), np.uint8)):
        numbers = fold_numbers(keys, 2)
        assert set(numbers.tolist()) == {1, 2}
        assert np.array_equal(fold_numbers(keys[::-1], 2), numbers[::-1])


def test_without_a_fold_nothing_is_held_out() -> None:
    assert not Folds().held_out(KEYS).any()


@pytest.mark.parametrize(
    "fold",
    ["3/2", "0/5", "a/b", "1/1", "1", "", "1/2/3", "-1/5", "01/5", "1/5 ", "1.0/5", "\u0661/5"],
)
def test_another_form_is_refused(fold: str) -> None:
    with pytest.raises(ValueError, match=f"^fold is {re.escape(repr(fold))}: it must be i/N"):
        Folds(fold=fold)
    assert parse_fold("5/5") == (5, 5)


# In a data module

PLAIN = View(image_size=8, augment="none", cutout=0)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Twenty training images of three classes; there is no validation split to read."""
    for number in range(20):
        Image.new("RGB", (9, 6), (10 * number, 0, 0)).save(tmp_path / f"{number}.png")
    labels = np.eye(3, dtype=np.int8)[np.arange(20) % 3]

    def load(split: str, cache: TableCache) -> LabelledImages:
        assert split == "train"
        files = encode_paths([f"{number}.png" for number in range(20)])
        return LabelledImages(ImageFiles(tmp_path, files, "see"), from_dense(labels), NAMES)

    return Source(load=load, train="train", val="val", task=MultiLabel(), where=tmp_path, see="see")


def divided(source: Source, fold: str) -> Any:
    return assemble(source, PLAIN, FileSettings(), folds=Folds(fold=fold))


def names(split: Any) -> list[str]:
    return [Path(split.dataset.name(index)).name for index in range(len(split.dataset))]


def test_a_fold_is_the_validation_split_and_the_others_are_trained_on(source: Source) -> None:
    everything = {f"{number}.png" for number in range(20)}
    validated = []
    for number in (1, 2, 3):
        data = divided(source, f"{number}/3")
        train, val = names(data.train), names(data.val)
        assert set(train) | set(val) == everything
        assert len(train) + len(val) == 20
        assert data.val.dataset.transform == data.transform != data.train.dataset.transform
        for index, name in enumerate(val):
            _, target = fixed_sample(data.val.dataset, index)
            assert target.tolist() == np.eye(3)[int(name.removesuffix(".png")) % 3].tolist()
        validated += val
    assert sorted(validated) == sorted(everything)


def test_validation_labels_have_their_own_meaning_in_a_fold_too(source: Source) -> None:
    def load_train(split: str, cache: TableCache) -> LabelledImages:
        images = source.load(split, cache)
        return replace(images, labels=images.labels.recode({1: -1}))

    data = divided(replace(source, load_train=load_train), "1/2")
    assert fixed_sample(data.train.dataset, 0)[1].sum() == -1
    assert fixed_sample(data.val.dataset, 0)[1].sum() == 1


def test_a_fold_without_an_image_is_refused(source: Source) -> None:
    taken = fold_numbers(encode_paths([f"{number}.png" for number in range(20)]), 500)
    empty = min(set(range(1, 501)) - set(taken.tolist()))
    with pytest.raises(
        DataError, match=f"data.fold={empty}/500 leaves no image to validate, of 20"
    ):
        _ = divided(source, f"{empty}/500").val

    def load_one(split: str, cache: TableCache) -> LabelledImages:
        return source.load(split, cache).select(np.array([0]))

    number = by_hand("0.png", 2)
    with pytest.raises(DataError, match=f"data.fold={number}/2 leaves no image to train, of 1"):
        _ = divided(replace(source, load=load_one), f"{number}/2").train


def test_zero_shot_data_has_no_folds(source: Source) -> None:
    vectors = WordVectors(("a", "b", "c"), torch.eye(3), VectorOrigin("words.txt", "0" * 64))
    task = ZeroShot(lambda names: ([0, 1], [2]), lambda names: vectors, "all", "there")
    with pytest.raises(ConfigError, match=r"data\.fold 1/2: this data is trained on 2 classes and"):
        _ = divided(replace(source, task=task), "1/2").train
