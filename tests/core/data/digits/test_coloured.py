import colorsys
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from readers import versions
from support import made

from mldec.data.digits import (
    COLOURS,
    NAMES,
    choose_unseen,
    class_names,
    class_queries,
    coloured_digits,
    digits_zsl,
    draw_coloured,
    split_writings,
)
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError


@pytest.fixture(scope="module")
def closed():
    return made(coloured_digits, val_images=300, train_images=300)


@pytest.fixture(scope="module")
def zero_shot():
    return made(digits_zsl, val_images=300, train_images=300)


def drawn(dataset, seed=0):
    rng = SampleRandom(seed)
    return torch.stack([dataset.load(index, rng)[1] for index in range(len(dataset))])


def test_what_the_rest_needs(closed):
    names = closed.train.classes.names
    assert names == closed.val.classes.names == class_names(12)
    assert (len(names), len(set(names)), names[0], names[-1]) == (120, 120, "red zero", "rose nine")
    assert closed.train.classes.queries is None
    assert closed.transform == EvalTransform(image_size=64)
    image, target = fixed_sample(closed.val.dataset, 0)
    assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
    assert (target.shape, target.dtype) == ((120,), torch.int8)
    again = pickle.loads(pickle.dumps(closed.val.dataset))
    assert fixed_sample(again, 3)[0].equal(fixed_sample(closed.val.dataset, 3)[0])
    assert closed.val.dataset.name(7) != closed.val.dataset.name(8)
    with pytest.raises(IndexError):
        fixed_sample(closed.val.dataset, 300)


@pytest.mark.parametrize("make", [coloured_digits, digits_zsl])
def test_training_and_validation_share_no_writing(make):
    data = made(make, train_images=1, val_images=1)
    train, val = (split.dataset.draw.keywords["writings"] for split in (data.train, data.val))
    assert not {mask.tobytes() for mask in train.masks} & {mask.tobytes() for mask in val.masks}


def test_validation_scenes_never_change_and_training_scenes_are_new(closed):
    first = fixed_sample(closed.val.dataset, 4)
    again = fixed_sample(made(coloured_digits, val_images=5).val.dataset, 4)
    assert first[0].equal(again[0])
    assert first[1].equal(again[1])
    assert len(versions(closed.train.dataset)) == 8
    assert drawn(closed.train.dataset, 1).equal(drawn(closed.train.dataset, 1))


def test_every_class_comes_about_equally_often(closed):
    targets = torch.cat([drawn(closed.train.dataset, seed) for seed in range(8)]).float()
    assert 1.2 < targets.sum(1).mean() < 1.5
    assert targets.sum(1).max() == 2
    share = targets.mean(0)
    assert share.min() > 0.004
    assert share.max() < 0.023  # 1.37 / 120 = 0.011


def test_a_scene_shows_its_classes_in_their_colours():
    """A reader of its own: the pixels that differ from the background, by the nearest colour."""
    _, writings = split_writings(0)
    rng = np.random.default_rng(0)
    table = np.array(list(COLOURS.values()), float)
    right = []
    for _ in range(150):
        scene, target = draw_coloured(
            rng, writings=writings, classes=range(140), size=64, max_digits=1
        )
        pixels = np.asarray(scene, float).reshape(-1, 3)
        ink = pixels[np.abs(pixels - np.median(pixels, 0)).max(1) > 70]
        if target.any():
            votes = np.bincount(((ink[:, None] - table) ** 2).sum(2).argmin(1), minlength=14)
            right.append(votes.argmax() == int(target.argmax()) // 10)
    assert len(right) > 120
    assert np.mean(right) > 0.97


def test_a_scene_shows_the_digits_that_it_says():
    _, writings = split_writings(0)
    rng = np.random.default_rng(0)
    templates = np.stack([writings.masks[writings.labels == digit].mean(0) for digit in range(10)])
    hits = []
    for _ in range(200):
        scene, target = draw_coloured(  # all red
            rng, writings=writings, classes=range(10), size=64, max_digits=1
        )
        if target.any():
            red = np.asarray(scene, int)
            ink = (red[..., 0] - red[..., 1]).clip(0, 255).astype(np.uint8)
            rows, columns = np.where(ink > 120)
            cut = ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            scores = []
            for template in templates:
                inner = template[1:-1, 1:-1].astype(np.uint8)
                size = Image.fromarray(inner).resize(cut.shape[::-1])
                scores.append(np.corrcoef(np.asarray(size, float).ravel(), cut.ravel())[0, 1])
            hits.append(int(np.argmax(scores)) == int(target.argmax()))
    assert np.mean(hits) > 0.5  # chance is 0.1; the cut is rough


def test_colours_are_far_from_each_other():
    for number, one in enumerate(COLOURS.values()):
        for other in list(COLOURS.values())[:number]:
            assert np.abs(np.subtract(one, other)).max() >= 127
    hues = {
        round(12 * colorsys.rgb_to_hsv(*(value / 255 for value in rgb))[0])
        for rgb in COLOURS.values()
    }
    assert len(hues) == 12


# Zero-shot


def test_training_never_shows_an_unseen_class_and_validation_shows_all(zero_shot):
    names, seen = zero_shot.val.classes.names, zero_shot.train.classes.names
    unseen = {names[place] for place in choose_unseen(12, 24, 0)}
    assert set(seen) | unseen == set(names)
    assert (len(seen), len(unseen)) == (96, 24)
    assert not set(seen) & unseen
    assert set(zero_shot.train.dataset.draw.keywords["classes"]) == {
        names.index(name) for name in seen
    }
    assert drawn(zero_shot.train.dataset).shape == (300, 96)
    shown = drawn(zero_shot.val.dataset).any(0)
    assert sum(name in unseen for name, found in zip(names, shown, strict=True) if found) > 15


def test_the_columns_of_training_targets_are_the_seen_classes(zero_shot):
    dataset = zero_shot.train.dataset
    _, target = dataset.load(0, SampleRandom(3))
    assert target.any()

    all_names, names = zero_shot.val.classes.names, zero_shot.train.classes.names
    shown = [names[column] for column in target.nonzero().flatten().tolist()]
    seen = [all_names.index(name) for name in names]

    # Draw the same scene again, for the picture.
    rng = np.random.default_rng(SampleRandom(3).getrandbits(64))
    writings = dataset.draw.keywords["writings"]
    scene, _ = draw_coloured(rng, writings=writings, classes=seen, size=64, max_digits=2, full=True)

    # A reader of its own: the pixels that differ from the background, by the nearest colour.
    pixels = np.asarray(scene, float).reshape(-1, 3)
    ink = pixels[np.abs(pixels - np.median(pixels, 0)).max(1) > 90]
    table = np.array(list(COLOURS.values()), float)[:12]
    votes = np.bincount(((ink[:, None] - table) ** 2).sum(2).argmin(1), minlength=12)
    colours = {list(COLOURS)[colour] for colour in np.flatnonzero(votes > 0.1 * votes.sum())}
    assert colours == {name.split()[0] for name in shown}


def test_most_zero_shot_scenes_show_two_digits_and_none_is_empty(zero_shot):
    counts = drawn(zero_shot.train.dataset).sum(1)
    assert set(counts.tolist()) == {1, 2}
    assert 0.55 < (counts == 2).float().mean() < 0.75


def test_queries_are_made_of_the_attributes(zero_shot):
    train, val = zero_shot.train.classes, zero_shot.val.classes
    assert val.queries.shape == (120, 300)
    for name, query in zip(train.names, train.queries, strict=True):
        assert query.equal(val.queries[val.names.index(name)])
    by_name = dict(zip(val.names, val.queries, strict=True))
    # red three - red four = blue three - blue four
    difference = by_name["red three"] - by_name["red four"]
    torch.testing.assert_close(difference, by_name["blue three"] - by_name["blue four"])
    assert val.queries.std() == pytest.approx(1, abs=0.05)
    assert torch.linalg.matrix_rank(val.queries) == 12 + 10 - 1
    assert made(digits_zsl, seed=1).val.classes.queries.equal(val.queries)


def test_one_hot_queries():
    queries = class_queries(3, "one_hot")
    assert queries.shape == (30, 13)
    assert queries[14].nonzero().flatten().tolist() == [1, 3 + 4]
    assert queries.sum(1).unique().tolist() == [2]


@pytest.mark.parametrize(("colours", "count"), [(12, 24), (12, 1), (14, 60), (3, 6), (5, 13)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_colour_and_every_digit_stays_seen(colours, count, seed):
    chosen = choose_unseen(colours, count, seed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    table = np.zeros((colours, 10), bool)
    table.reshape(-1)[chosen] = True
    assert not table.all(0).any()
    assert not table.all(1).any()
    assert np.ptp(table.sum(1)) <= 1
    assert table.sum(0).max() <= -(-count // colours) * -(-colours // 10)


def test_the_seed_decides_which_classes_are_unseen():
    assert choose_unseen(12, 24, 0) == choose_unseen(12, 24, 0) != choose_unseen(12, 24, 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"colours": 1}, "data.colours is 1: it must be from 2 to 14"),
        ({"colours": 15}, "data.colours is 15"),
        ({"unseen": 0}, "data.unseen is 0"),
        ({"unseen": 115}, "data.unseen is 115"),
        ({"vectors": "glove"}, "data.vectors: 'glove' is not one of words, one_hot"),
        ({"image_size": 8}, "data.image_size is 8: it must be at least"),
        ({"train_images": 0}, "data.train_images is 0: it must be at least"),
        ({"val_images": 0}, "data.val_images is 0: it must be at least"),
        ({"max_digits": 0}, "data.max_digits is 0: it must be at least"),
        ({"seed": -1}, "data.seed is -1: it must be at least"),
    ],
)
def test_wrong_values_are_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        made(digits_zsl, **arguments)


@pytest.mark.parametrize("make", [coloured_digits, digits_zsl])
def test_wrong_thresholds_are_refused_at_the_start(make):
    with pytest.raises(ConfigError, match=r"threshold.*1\.5"):
        made(make, threshold=1.5)


def test_the_threshold_reaches_the_zero_shot_evaluator():
    low, high = (
        made(digits_zsl, colours=4, unseen=8, threshold=threshold).evaluator()
        for threshold in (0.5, 0.75)
    )
    for evaluator in (low, high):
        evaluator.update(torch.ones(1, 40), torch.ones(1, 40))  # probability 0.73
    assert (low.compute()["zsl_OR"], high.compute()["zsl_OR"]) == (100, 0)


def test_names_say_colour_and_digit():
    assert class_names(2) == tuple(
        f"{colour} {digit}" for colour in ("red", "green") for digit in NAMES
    )
