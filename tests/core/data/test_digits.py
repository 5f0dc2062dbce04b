"""Scenes of handwritten digits: what is in them, and who draws them."""

import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from readers import versions
from sklearn.datasets import load_digits
from support import made
from torch import Tensor

from mldec.data.digits import (
    COLOURS,
    EMPTY,
    NAMES,
    NOISE,
    OVERLAP,
    Box,
    SceneSettings,
    Writings,
    boxes,
    choose_unseen,
    class_names,
    class_queries,
    coloured_digits,
    compose,
    digit,
    digits,
    digits_zsl,
    draw_coloured,
    noisy,
    split_writings,
    tilted,
)
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import DataModule, fixed_sample
from mldec.errors import ConfigError
from mldec.evaluators.single_label import SingleLabelEvaluator

MAKERS = [digits, digit, coloured_digits, digits_zsl]
COLOUR_TABLE = np.array(list(COLOURS.values()), float)


def drawn(dataset: Any, seed: int = 0) -> Tensor:
    """Return the targets of all scenes, drawn with one generator."""
    rng = SampleRandom(seed)
    return torch.stack([dataset.load(index, rng)[1] for index in range(len(dataset))])


# The writings


def test_the_splits_share_no_writing_and_cut_every_digit_alike() -> None:
    train, val = split_writings(0)
    assert {*train.rows} | {*val.rows} == set(range(1797))
    assert not {mask.tobytes() for mask in train.masks} & {mask.tobytes() for mask in val.masks}
    for number in range(10):
        held_out, others = (val.labels == number).sum(), (train.labels == number).sum()
        assert held_out / (held_out + others) == pytest.approx(0.25, abs=0.01)
    assert np.array_equal(val.rows, split_writings(0)[1].rows)
    assert not np.array_equal(np.sort(val.rows), np.sort(split_writings(1)[1].rows))


def test_writings_are_those_of_scikit_learn() -> None:
    source = load_digits()
    for part in split_writings(0):
        assert np.array_equal(part.labels, source.target[part.rows])
        ink = part.masks[:, 1:-1, 1:-1].astype(float) * 16 / 255
        assert np.abs(ink - source.images[part.rows]).max() < 0.05
        assert part.masks.sum() == part.masks[:, 1:-1, 1:-1].sum()  # an empty border


# What all data sets share


@pytest.mark.parametrize("make", MAKERS)
def test_validation_scenes_never_change_and_training_scenes_are_new(
    make: Callable[..., DataModule],
) -> None:
    data = made(make, train_images=4, val_images=5)
    train, val = data.train.dataset, data.val.dataset
    assert (len(train), len(val)) == (4, 5)
    image, target = fixed_sample(val, 3)
    size = 32 if make is digit else 64
    assert (image.shape, image.dtype) == ((3, size, size), torch.uint8)
    assert (target.shape, target.dtype) == ((len(data.val.classes),), torch.int8)
    assert data.transform == EvalTransform(image_size=size)

    again = pickle.loads(pickle.dumps(val))
    for other in (again, made(make, val_images=4).val.dataset):
        assert fixed_sample(other, 3)[0].equal(image)
        assert fixed_sample(other, 3)[1].equal(target)
    assert not fixed_sample(made(make, seed=1).val.dataset, 3)[0].equal(image)
    assert val.name(2) == "digit scene 2 of seed 0"

    state = random.getstate()
    assert len(versions(train)) == 8
    assert drawn(train, 1).equal(drawn(train, 1))
    assert random.getstate() == state
    assert train.name(2) == "digit scene 2 (drawn anew each time)"

    splits = zip((train, val), split_writings(0), strict=True)
    assert all(set(part.draw.keywords["writings"].rows) == set(own.rows) for part, own in splits)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"image_size": 8}, "data.image_size is 8: it must be at least 16"),
        ({"train_images": 0}, "data.train_images is 0: it must be at least 1"),
        ({"val_images": -1}, "data.val_images is -1: it must be at least 1"),
        ({"seed": -1}, "data.seed is -1: it must be at least 0"),
        ({"max_digits": 0}, "data.max_digits is 0: it must be at least 1"),
        ({"threshold": 1.5}, "threshold.*1.5"),
        ({"colours": 1}, "data.colours is 1: it must be from 2 to 14"),
        ({"unseen": 0}, "data.unseen is 0"),
        ({"unseen": 115}, "data.unseen is 115"),
        ({"vectors": "glove"}, "data.vectors: 'glove' is not one of words, one_hot"),
    ],
)
def test_wrong_values_are_refused(arguments: dict[str, Any], expected: str) -> None:
    makers = [digits_zsl]
    if next(iter(arguments)) in ("max_digits", "threshold"):
        makers = [digits, coloured_digits, digits_zsl]
    for make in makers:
        with pytest.raises(ConfigError, match=expected):
            made(make, **arguments)
    with pytest.raises(ConfigError):
        made(digit, top_k=1)


def test_the_labels_of_new_scenes_are_drawn_without_painting_them() -> None:
    dataset: Any = digits(SceneSettings(train_images=4000)).train.dataset
    rng = SampleRandom(0)
    targets = torch.stack([dataset.target(index, rng) for index in range(4000)]).float()
    painted = torch.stack([dataset.load(index, rng)[1] for index in range(1000)]).float()
    assert targets.mean(0).tolist() == pytest.approx(painted.mean(0).tolist(), abs=0.05)


# Grey scenes


@pytest.fixture(scope="module")
def composed() -> tuple[Writings, list[tuple[Image.Image, list[tuple[int, Box]]]]]:
    """600 scenes with what was placed in them."""
    _, writings = split_writings(0)
    rng = np.random.default_rng(0)
    return writings, [compose(rng, writings, size=64, max_digits=4) for _ in range(600)]


def test_targets_are_what_was_placed() -> None:
    dataset: Any = made(digits, val_images=60).val.dataset
    writings = dataset.draw.keywords["writings"]
    for index in range(60):
        image, target = fixed_sample(dataset, index)
        generator = dataset.generator(index, SampleRandom(0))
        scene, placed = compose(generator, writings, size=64, max_digits=4)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(scene))
        shown = {int(writings.labels[row]) for row, _ in placed}
        assert set(target.nonzero().flatten().tolist()) == shown


def test_digits_lie_inside_the_scene_with_little_overlap(composed: Any) -> None:
    sides = []
    for _, placed in composed[1]:
        for _, (left, top, right, bottom) in placed:
            assert 0 <= left < right <= 64
            assert 0 <= top < bottom <= 64
            assert right - left == bottom - top
            sides.append(right - left)
        for (_, one), (_, other) in itertools.combinations(placed, 2):
            covered = np.zeros((2, 64, 64), bool)
            for plane, (left, top, right, bottom) in zip(covered, (one, other), strict=True):
                plane[top:bottom, left:right] = True
            assert covered.all(0).sum() <= OVERLAP * covered.sum((1, 2)).min() + 1e-9
    assert 16 <= min(sides) <= 20
    assert 36 <= max(sides) <= 40
    assert len(boxes(np.random.default_rng(0), 64, 5, (1.0, 1.0))) == 1  # the others find no room

    counts = np.bincount([len(placed) for _, placed in composed[1]], minlength=5) / 600
    assert len(counts) == 5
    assert counts[0] == pytest.approx(EMPTY, abs=0.03)
    assert counts[1:].min() > 0.03  # four find room less often than they are drawn
    assert counts[2:].sum() > 0.5


def test_each_square_shows_the_named_digit_and_stands_out(composed: Any) -> None:
    writings, scenes = composed
    rng = np.random.default_rng(0)
    wins, differences = [], []
    for scene, placed in scenes[:300]:
        grey = np.asarray(scene.convert("L")).astype(float)
        for row, (left, top, right, bottom) in placed:
            square, side = grey[top:bottom, left:right], (right - left, bottom - top)
            other = rng.choice(np.flatnonzero(writings.labels != writings.labels[row]))
            masks = [Image.fromarray(writings.masks[number]) for number in (row, other)]
            own, wrong = (np.asarray(mask.resize(side)).astype(float) for mask in masks)
            scores = [np.corrcoef(mask.ravel(), square.ravel())[0, 1] for mask in (own, wrong)]
            wins.append(abs(scores[0]) > abs(scores[1]))
            differences.append(square[own > 200].mean() - square[own < 20].mean())
    assert np.mean(wins) > 0.93
    assert np.median(np.abs(differences)) > 80
    assert 0.4 < np.mean(np.array(differences) < 0) < 0.6  # dark on light, and light on dark


def test_without_digits_there_is_clutter_only(composed: Any) -> None:
    empty = [np.asarray(scene).std() for scene, placed in composed[1] if not placed]
    assert len(empty) > 5
    assert np.mean(empty) > 5
    assert max(empty) < 40  # the contrast of digits is 90 and more


def test_a_writing_stays_whole_when_it_is_turned_and_noise_has_a_limit() -> None:
    mask = np.zeros((10, 10), np.uint8)
    mask[1:-1, 1:-1] = 255
    rng = np.random.default_rng(0)
    for side in (20, 33):
        ink = np.asarray(tilted(rng, mask, side), float) / 255
        assert ink.shape == (side, side)
        assert ink.sum() == pytest.approx(0.64 * side**2, rel=0.05)
    scene = Image.new("RGB", (40, 40), (100, 0, 255))
    change = np.asarray(noisy(rng, scene), int) - np.asarray(scene, int)
    assert np.abs(change).max() == NOISE
    assert change[:, :, 0].std() > NOISE / 2


@pytest.mark.parametrize("size", [16, 33, 224])
def test_other_sizes(size: int) -> None:
    data = made(digits, image_size=size, val_images=2, max_digits=6)
    for split in (data.train, data.val):
        assert fixed_sample(split.dataset, 1)[0].shape == (3, size, size)


def test_a_single_digit_is_one_label() -> None:
    data = made(digit, train_images=40, val_images=40)
    assert data.train.classes.exclusive
    assert data.val.classes.names == NAMES
    targets = torch.cat([drawn(split.dataset) for split in (data.train, data.val)])
    assert (targets.sum(1) == 1).all()
    assert targets.any(0).all()
    assert isinstance(data.evaluator(), SingleLabelEvaluator)
    assert not made(digits).train.classes.exclusive
    assert next(iter(made(digits).evaluator().compute())) == "mAP"


# Coloured scenes


def test_every_class_comes_about_equally_often() -> None:
    data = made(coloured_digits, train_images=300)
    names = data.train.classes.names
    assert names == data.val.classes.names == class_names(12)
    assert (len(set(names)), names[0], names[-1]) == (120, "red zero", "rose nine")
    assert data.train.classes.queries is None
    targets = torch.cat([drawn(data.train.dataset, seed) for seed in range(8)]).float()
    assert 1.2 < targets.sum(1).mean() < 1.5
    assert targets.sum(1).max() == 2
    assert targets.mean(0).min() > 0.004
    assert targets.mean(0).max() < 0.023  # 1.37 / 120 = 0.011


def colour_votes(scene: Image.Image, colours: int) -> np.ndarray:
    """Count the pixels that differ from the background, by the nearest colour."""
    pixels = np.asarray(scene, float).reshape(-1, 3)
    ink = pixels[np.abs(pixels - np.median(pixels, 0)).max(1) > 70]
    nearest = ((ink[:, None] - COLOUR_TABLE[:colours]) ** 2).sum(2).argmin(1)
    return np.bincount(nearest, minlength=colours)


def test_a_scene_shows_its_classes_in_their_colours() -> None:
    _, writings = split_writings(0)
    rng = np.random.default_rng(0)
    arguments: Any = {"writings": writings, "size": 64, "max_digits": 1}
    right = []
    for _ in range(150):
        scene, target = draw_coloured(rng, classes=range(140), **arguments)
        if target.any():
            right.append(colour_votes(scene, 14).argmax() == int(target.argmax()) // 10)
    assert len(right) > 120
    assert np.mean(right) > 0.97

    # All red: the digit is that of the nearest mean writing; chance is 0.1, and the cut is rough.
    templates = np.stack([writings.masks[writings.labels == digit].mean(0) for digit in range(10)])
    hits = []
    for _ in range(200):
        scene, target = draw_coloured(rng, classes=range(10), **arguments)
        if not target.any():
            continue
        red = np.asarray(scene, int)
        ink = (red[..., 0] - red[..., 1]).clip(0, 255).astype(np.uint8)
        rows, columns = np.where(ink > 120)
        cut = ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        scores = []
        for template in templates[:, 1:-1, 1:-1].astype(np.uint8):
            size = Image.fromarray(template).resize(cut.shape[::-1])
            scores.append(np.corrcoef(np.asarray(size, float).ravel(), cut.ravel())[0, 1])
        hits.append(int(np.argmax(scores)) == int(target.argmax()))
    assert np.mean(hits) > 0.5


# Zero-shot scenes


@pytest.fixture(scope="module")
def zero_shot() -> DataModule:
    return made(digits_zsl, val_images=300, train_images=300)


def test_training_never_shows_an_unseen_class_and_validation_shows_all(
    zero_shot: DataModule,
) -> None:
    names, seen = zero_shot.val.classes.names, zero_shot.train.classes.names
    unseen = {names[place] for place in choose_unseen(12, 24, 0)}
    assert (len(seen), len(unseen)) == (96, 24)
    assert {*seen, *unseen} == set(names)
    targets, dataset = drawn(zero_shot.train.dataset), zero_shot.train.dataset
    assert targets.shape == (300, 96)
    assert set(targets.sum(1).tolist()) == {1, 2}
    assert 0.55 < (targets.sum(1) == 2).float().mean() < 0.75
    shown = drawn(zero_shot.val.dataset).any(0)
    assert sum(name in unseen for name, found in zip(names, shown, strict=True) if found) > 15

    # The columns are the seen classes: their names say the colours of the picture.
    image, target = dataset.load(0, SampleRandom(3))
    named = {seen[column].split()[0] for column in target.nonzero().flatten().tolist()}
    votes = colour_votes(Image.fromarray(image.permute(1, 2, 0).numpy()), 12)
    assert named == {list(COLOURS)[colour] for colour in np.flatnonzero(votes > 0.1 * votes.sum())}


def test_queries_are_made_of_the_attributes(zero_shot: DataModule) -> None:
    train, val = zero_shot.train.classes, zero_shot.val.classes
    assert train.queries is not None
    assert val.queries is not None
    assert val.queries.shape == (120, 300)
    assert train.queries.equal(val.queries[[val.names.index(name) for name in train.names]])
    by_name = dict(zip(val.names, val.queries, strict=True))
    difference = by_name["red three"] - by_name["red four"]
    torch.testing.assert_close(difference, by_name["blue three"] - by_name["blue four"])
    assert val.queries.std() == pytest.approx(1, abs=0.05)
    assert torch.linalg.matrix_rank(val.queries) == 12 + 10 - 1
    assert class_queries(12, "words").equal(val.queries)  # whatever the seed is

    queries = class_queries(3, "one_hot")
    assert queries.shape == (30, 13)
    assert queries[14].nonzero().flatten().tolist() == [1, 3 + 4]
    assert queries.sum(1).unique().tolist() == [2]


@pytest.mark.parametrize(("colours", "count"), [(12, 24), (12, 1), (14, 60), (3, 6), (5, 13)])
def test_every_colour_and_every_digit_stays_seen(colours: int, count: int) -> None:
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


def test_the_threshold_reaches_the_zero_shot_evaluator() -> None:
    for threshold, recall in ((0.5, 100), (0.75, 0)):
        evaluator = made(digits_zsl, colours=4, unseen=8, threshold=threshold).evaluator()
        evaluator.update(torch.ones(1, 40), torch.ones(1, 40))  # probability 0.73
        assert evaluator.compute()["zsl_OR"] == recall
