"""Scenes of handwritten digits."""

import numpy as np
import pytest
import torch
from readers import versions
from sklearn.datasets import load_digits
from support import made

from mldec.data.digits import (
    choose_unseen,
    compose,
    digit,
    digits,
    digits_zsl,
    split_writings,
)
from mldec.data.sampling import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.words.digits import NAMES, class_queries

MAKERS = [digits, digit, digits_zsl]


def drawn(dataset, seed=0):
    """Return the targets of all scenes, drawn with one generator."""
    rng = SampleRandom(seed)
    return torch.stack([dataset.load(index, rng)[1] for index in range(len(dataset))])


def test_splits_share_no_writing():
    train, val = split_writings(0)
    assert {*train.rows} | {*val.rows} == set(range(1797))
    assert not {mask.tobytes() for mask in train.masks} & {mask.tobytes() for mask in val.masks}
    for number in range(10):
        held_out, others = (val.labels == number).sum(), (train.labels == number).sum()
        assert held_out / (held_out + others) == pytest.approx(0.25, abs=0.01)
    assert np.array_equal(val.rows, split_writings(0)[1].rows)
    assert not np.array_equal(np.sort(val.rows), np.sort(split_writings(1)[1].rows))


def test_writings_equal_scikit_learn():
    data, (train, _) = load_digits(), split_writings(0)
    assert np.array_equal(train.labels, data.target[train.rows])
    ink = np.round(data.images[train.rows] * 255 / 16)
    assert np.array_equal(train.masks[:, 1:-1, 1:-1], ink)


@pytest.mark.parametrize("make", MAKERS)
def test_validation_scenes_are_fixed_and_training_scenes_are_new(make):
    data = made(make, train_images=4, val_images=5)
    train, val = data.train.dataset, data.val.dataset
    assert (len(train), len(val)) == (4, 5)
    image, target = fixed_sample(val, 3)
    size = 32 if make is digit else 64
    assert (image.shape, image.dtype) == ((3, size, size), torch.uint8)
    assert (target.shape, target.dtype) == ((len(data.val.classes),), torch.int8)
    assert data.transform == EvalTransform(image_size=size)

    again = made(make, val_images=4).val.dataset
    assert fixed_sample(again, 3)[0].equal(image)
    assert fixed_sample(again, 3)[1].equal(target)
    assert not fixed_sample(made(make, seed=1).val.dataset, 3)[0].equal(image)
    assert val.name(2) == "digit scene 2 of seed 0"

    assert len(versions(train)) == 8
    assert drawn(train, 1).equal(drawn(train, 1))
    assert train.name(2) == "digit scene 2 (drawn anew each time)"

    splits = zip((train, val), split_writings(0), strict=True)
    assert all(set(part.draw.keywords["writings"].rows) == set(own.rows) for part, own in splits)


@pytest.mark.parametrize(
    ("make", "setting", "value"),
    [
        (digits_zsl, "image_size", 8),
        (digits, "max_digits", 0),
        (digits_zsl, "threshold", 1.5),
        (digits_zsl, "colours", 1),
        (digits_zsl, "unseen", 0),
        (digits_zsl, "vectors", "glove"),
        (digit, "top_k", 1),
    ],
)
def test_setting_out_of_range_is_named(make, setting, value):
    with pytest.raises(ConfigError, match=f"{setting}.*{value}"):
        made(make, **{setting: value})


# Gray scenes


def test_targets_are_placed_digits():
    dataset = made(digits, val_images=60).val.dataset
    writings = dataset.draw.keywords["writings"]
    for index in range(60):
        image, target = fixed_sample(dataset, index)
        generator = np.random.default_rng((0, index))
        scene, placed = compose(generator, writings, size=64, max_digits=4)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(scene))
        digits_in_scene = {int(writings.labels[row]) for row, _ in placed}
        assert set(target.nonzero().flatten().tolist()) == digits_in_scene


def test_single_digit_is_single_label():
    data = made(digit, train_images=40, val_images=40)
    assert data.train.classes.exclusive
    assert data.val.classes.names == NAMES
    targets = torch.cat([drawn(split.dataset) for split in (data.train, data.val)])
    assert (targets.sum(1) == 1).all()
    assert targets.any(0).all()
    assert isinstance(data.evaluator(), SingleLabelEvaluator)
    assert not made(digits).train.classes.exclusive
    assert next(iter(made(digits).evaluator().compute())) == "mAP"


# Zero-shot scenes


@pytest.fixture(scope="module")
def zero_shot():
    return made(digits_zsl, val_images=300, train_images=300)


def test_unseen_classes_are_only_in_validation(zero_shot):
    names, seen = zero_shot.val.classes.names, zero_shot.train.classes.names
    unseen = {names[place] for place in choose_unseen(12, 24, 0)}
    assert (len(seen), len(unseen)) == (96, 24)
    assert {*seen, *unseen} == set(names)
    targets = drawn(zero_shot.train.dataset)
    assert targets.shape == (300, 96)
    assert set(targets.sum(1).tolist()) == {1, 2}
    assert 0.55 < (targets.sum(1) == 2).float().mean() < 0.75
    present = drawn(zero_shot.val.dataset).any(0)
    assert sum(name in unseen for name, found in zip(names, present, strict=True) if found) > 15


def test_word_vectors_are_sums_of_attributes(zero_shot):
    train, val = zero_shot.train.classes, zero_shot.val.classes
    assert val.word_vectors.shape == (120, 300)
    assert train.word_vectors.equal(
        val.word_vectors[[val.names.index(name) for name in train.names]]
    )
    by_name = dict(zip(val.names, val.word_vectors, strict=True))
    difference = by_name["red three"] - by_name["red four"]
    torch.testing.assert_close(difference, by_name["blue three"] - by_name["blue four"])
    assert val.word_vectors.std() == pytest.approx(1, abs=0.05)
    assert class_queries(12, "words").equal(val.word_vectors)  # for any seed

    word_vectors = class_queries(3, "one_hot")
    assert word_vectors.shape == (30, 13)
    assert word_vectors[14].nonzero().flatten().tolist() == [1, 3 + 4]
    assert word_vectors.sum(1).unique().tolist() == [2]


@pytest.mark.parametrize(("colours", "count"), [(12, 24), (12, 1), (14, 60), (3, 6), (5, 13)])
def test_every_color_and_digit_is_seen(colours, count):
    assert choose_unseen(colours, count, 0) == choose_unseen(colours, count, 0)
    assert choose_unseen(colours, count, 0) != choose_unseen(colours, count, 1)
    for seed in (0, 1):
        chosen = choose_unseen(colours, count, seed)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == count
        table = np.zeros((colours, 10), bool)
        table.reshape(-1)[chosen] = True
        assert not table.all(0).any()
        assert not table.all(1).any()
        assert np.ptp(table.sum(1)) <= 1
