"""What grey and coloured scenes share: the writings, their squares, how scenes are drawn."""

import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from mldec.data.digits import (
    NOISE,
    OVERLAP,
    Scenes,
    SceneSettings,
    Writings,
    boxes,
    how_many,
    make_splits,
    noisy,
    split_writings,
    tilted,
)
from mldec.data.randomness import SampleRandom


@pytest.mark.parametrize("seed", [0, 1])
def test_training_and_validation_share_no_writing(seed):
    train, val = split_writings(seed)
    assert not set(train.rows) & set(val.rows)
    assert set(train.rows) | set(val.rows) == set(range(1797))
    assert not {mask.tobytes() for mask in train.masks} & {mask.tobytes() for mask in val.masks}


def test_every_digit_is_cut_alike():
    train, val = split_writings(0)
    assert len(val.rows) / 1797 == pytest.approx(0.25, abs=0.01)
    for number in range(10):
        held_out = (val.labels == number).sum()
        assert held_out / ((train.labels == number).sum() + held_out) == pytest.approx(
            0.25, abs=0.01
        )


def test_the_seed_decides_which_writings_are_held_out():
    first, again, other = split_writings(0)[1], split_writings(0)[1], split_writings(1)[1]
    assert np.array_equal(first.rows, again.rows)
    assert not np.array_equal(np.sort(first.rows), np.sort(other.rows))


def test_writings_are_those_of_scikit_learn():
    source = load_digits()
    for part in split_writings(0):
        assert np.array_equal(part.labels, source.target[part.rows])
        ink = part.masks[:, 1:-1, 1:-1].astype(float) * 16 / 255
        assert np.abs(ink - source.images[part.rows]).max() < 0.05
        assert part.masks.sum() == part.masks[:, 1:-1, 1:-1].sum()  # an empty border
        assert part.masks.max() == 255


def test_a_nearest_writing_classifier_works_on_clean_squares():
    """The labels fit the pictures: checked without the composer."""
    train, val = split_writings(0)
    flat, queries = (
        part.masks.reshape(len(part.masks), -1).astype(np.float32) for part in (train, val)
    )
    distance = (queries**2).sum(1)[:, None] - 2 * queries @ flat.T + (flat**2).sum(1)
    assert (train.labels[distance.argmin(1)] == val.labels).mean() > 0.97


# Where they are put


def test_squares_lie_inside_with_little_overlap() -> None:
    rng = np.random.default_rng(0)
    placed = [boxes(rng, 64, 4, (0.2, 0.5)) for _ in range(200)]
    assert {len(of_scene) for of_scene in placed} >= {3, 4}
    for of_scene in placed:
        covered = np.zeros((64, 64), int)
        for left, top, right, bottom in of_scene:
            assert right - left == bottom - top
            assert 0.2 * 64 - 1 <= right - left <= 0.5 * 64 + 1
            assert 0 <= left < right <= 64
            assert 0 <= top < bottom <= 64
            others = covered[top:bottom, left:right].sum()
            assert others <= len(of_scene) * OVERLAP * (right - left) ** 2
            covered[top:bottom, left:right] += 1


def test_what_finds_no_room_is_left_out() -> None:
    assert len(boxes(np.random.default_rng(0), 64, 5, (1.0, 1.0))) == 1


def test_the_number_of_digits() -> None:
    rng = np.random.default_rng(0)
    counts = np.bincount([how_many(rng, 3, empty=0.25) for _ in range(2000)]) / 2000
    assert counts == pytest.approx([0.25, 0.25, 0.25, 0.25], abs=0.04)
    assert {how_many(rng, 2, empty=0.0) for _ in range(100)} == {1, 2}


def test_a_writing_stays_whole_when_it_is_turned() -> None:
    mask = np.zeros((10, 10), np.uint8)
    mask[1:-1, 1:-1] = 255
    rng = np.random.default_rng(0)
    for side in (20, 33):
        for _ in range(10):
            ink = np.asarray(tilted(rng, mask, side), float) / 255
            assert ink.shape == (side, side)
            assert ink.sum() == pytest.approx(0.64 * side**2, rel=0.05)


def test_noise_has_a_limit() -> None:
    scene = Image.new("RGB", (40, 40), (100, 0, 255))
    change = np.asarray(noisy(np.random.default_rng(0), scene), int) - np.asarray(scene, int)
    assert np.abs(change).max() == NOISE
    assert change[:, :, 0].std() > NOISE / 2


# How scenes are drawn


def draw_number(rng: np.random.Generator, *, size: int) -> tuple[Image.Image, Tensor]:
    value = int(rng.integers(256))
    scene = Image.new("RGB", (size, size), (value, value, value))
    return scene, torch.tensor([1, 0], dtype=torch.int8)


def values(scenes: Scenes, seed: int = 0) -> list[int]:
    rng = SampleRandom(seed)
    return [int(scenes.load(index, rng)[0][0, 0, 0]) for index in range(len(scenes))]


def test_scenes_of_a_seed_never_change_and_draw_no_other_numbers() -> None:
    scenes = Scenes(partial(draw_number, size=4), 8, seed=3)
    assert values(scenes) == values(pickle.loads(pickle.dumps(scenes)))
    assert values(scenes, 1) == values(scenes, 2)
    assert values(scenes) != values(Scenes(partial(draw_number, size=4), 8, seed=4))
    assert len(set(values(scenes))) > 4
    assert scenes.load(0, SampleRandom(0))[0].shape == (3, 4, 4)
    assert scenes.name(2) == "digit scene 2 of seed 3"


def test_scenes_without_a_seed_follow_the_generator_of_the_sample() -> None:
    state = random.getstate()
    scenes = Scenes(partial(draw_number, size=4), 8)
    first = values(scenes, 1)
    assert values(scenes, 2) != first
    assert values(scenes, 1) == first
    assert random.getstate() == state
    assert scenes.name(2) == "digit scene 2 (drawn anew each time)"


@pytest.mark.parametrize("index", [-1, 8])
def test_there_is_no_scene_beyond_the_end(index: int) -> None:
    with pytest.raises(IndexError):
        Scenes(partial(draw_number, size=4), 8).load(index, SampleRandom(0))


@pytest.mark.parametrize(
    ("name", "minimum"), [("image_size", 16), ("train_images", 1), ("val_images", 1), ("seed", 0)]
)
def test_settings_have_a_minimum(name: str, minimum: int) -> None:
    SceneSettings(**{name: minimum})
    with pytest.raises(ValueError, match=rf"^{name} is {minimum - 1}: it must be at least"):
        SceneSettings(**{name: minimum - 1})


def test_only_validation_scenes_have_a_seed() -> None:
    settings = SceneSettings(image_size=16, train_images=3, val_images=2, seed=5)
    train, val = make_splits(settings, train=draw_ink, val=draw_ink, train_target=draw_ink_target)
    assert (len(train), len(val)) == (3, 2)
    assert (train.seed, val.seed) == (None, 5)
    expected = [writings.masks.sum() % 256 for writings in split_writings(5)]
    assert [values(scenes)[0] for scenes in (train, val)] == expected
    assert train.load(0, SampleRandom(0))[0].shape == (3, 16, 16)
    assert train.target(0, SampleRandom(0)).tolist() == [7]
    assert val.target(0, SampleRandom(0)).tolist() == [1]


def draw_ink(rng: np.random.Generator, writings: Writings, size: int) -> tuple[Image.Image, Tensor]:
    value = int(writings.masks.sum() % 256)
    return Image.new("RGB", (size, size), (value, value, value)), torch.tensor([1])


def draw_ink_target(rng: np.random.Generator, writings: Writings, size: int) -> Tensor:
    return torch.tensor([7])
