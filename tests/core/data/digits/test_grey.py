import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from support import made

from mldec.data.digits import EMPTY, NAMES, OVERLAP, compose, digit, digits, split_writings
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError
from mldec.evaluators.single_label import SingleLabelEvaluator


def scenes(dataset, count):
    return torch.stack([fixed_sample(dataset, index)[0] for index in range(count)])


@pytest.fixture(scope="module")
def data():
    return made(digits, val_images=600)


def test_what_the_rest_needs(data):
    assert data.train.classes.names == data.val.classes.names == NAMES
    assert NAMES == ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    assert not data.train.classes.exclusive
    assert data.transform == EvalTransform(image_size=64)
    assert (len(data.train.dataset), len(data.val.dataset)) == (8192, 600)
    image, target = fixed_sample(data.val.dataset, 0)
    assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
    assert (target.shape, target.dtype) == ((10,), torch.int8)
    assert image.is_contiguous()
    assert data.val.dataset.name(7) != data.val.dataset.name(8)
    again = pickle.loads(pickle.dumps(data.val.dataset))
    assert fixed_sample(again, 3)[0].equal(fixed_sample(data.val.dataset, 3)[0])


@pytest.mark.parametrize(("threshold", "recall"), [(0.5, 100), (0.75, 0)])
def test_the_evaluator_gets_the_threshold(threshold, recall):
    evaluator = made(digits, threshold=threshold).evaluator()
    # Each digit alone, with a probability of 0.73.
    evaluator.update(2 * torch.eye(10) - 1, torch.eye(10))
    metrics = evaluator.compute()
    assert next(iter(metrics)) == "mAP"
    assert metrics["OR"] == pytest.approx(recall)


def test_beyond_the_end_there_is_nothing(data):
    assert len(made(digits, train_images=3).train.dataset) == 3
    for index in (600, -1):
        with pytest.raises(IndexError):
            data.val.dataset.load(index, SampleRandom(0))


def test_each_split_uses_its_own_writings(data):
    train, val = split_writings(0)
    assert np.array_equal(data.train.dataset.draw.keywords["writings"].rows, train.rows)
    assert np.array_equal(data.val.dataset.draw.keywords["writings"].rows, val.rows)


# Draws


def test_a_scene_that_is_drawn_again_has_the_squares_of_its_labels(data):
    dataset, (_, writings) = data.val.dataset, split_writings(0)
    for index in range(30):
        image, target = fixed_sample(dataset, index)
        scene, placed = compose(
            dataset.generator(index, SampleRandom(0)), writings, size=64, max_digits=4
        )
        assert np.array_equal(np.asarray(scene).transpose(2, 0, 1), image.numpy())
        labels = {int(writings.labels[row]) for row, _ in placed}
        assert labels == set(target.nonzero().flatten().tolist())


def test_validation_scenes_never_change(data):
    first = scenes(data.val.dataset, 20)
    random.seed(99)
    torch.manual_seed(99)
    state = random.getstate()
    again = made(digits, val_images=20, train_images=5).val.dataset
    backwards = [fixed_sample(again, index)[0] for index in reversed(range(20))]
    assert torch.equal(first, torch.stack(backwards).flip(0))
    assert random.getstate() == state
    assert len({scene.numpy().tobytes() for scene in first}) == 20


def test_validation_scenes_follow_the_seed(data):
    assert not torch.equal(scenes(made(digits, seed=1).val.dataset, 3), scenes(data.val.dataset, 3))


def test_training_scenes_are_new_at_each_draw_and_follow_the_generator(data):
    def draw(seed):
        rng = SampleRandom(seed)
        return [data.train.dataset.load(0, rng) for _ in range(5)]

    first, again, other = draw(1), draw(1), draw(2)
    assert all(
        torch.equal(a, b) and torch.equal(s, t) for (a, s), (b, t) in zip(first, again, strict=True)
    )
    assert len({image.numpy().tobytes() for image, _ in first + other}) == 10


# Scenes


@pytest.fixture(scope="module")
def composed():
    """600 scenes with what was placed in them."""
    _, writings = split_writings(0)
    rng = np.random.default_rng(0)
    return writings, [compose(rng, writings, size=64, max_digits=4) for _ in range(600)]


def test_targets_are_what_was_placed(data):
    writings = data.val.dataset.draw.keywords["writings"]
    for index in range(100):
        image, target = fixed_sample(data.val.dataset, index)
        scene, placed = compose(np.random.default_rng((0, index)), writings, size=64, max_digits=4)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(scene))
        shown = {int(writings.labels[row]) for row, _ in placed}
        assert set(target.nonzero().flatten().tolist()) == shown
        assert set(target.tolist()) <= {0, 1}


def test_digits_lie_inside_the_scene_with_little_overlap(composed):
    _, drawn = composed
    sides = []
    for scene, placed in drawn:
        assert (scene.mode, scene.size) == ("RGB", (64, 64))
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


def test_numbers_of_digits(composed):
    _, drawn = composed
    counts = np.bincount([len(placed) for _, placed in drawn], minlength=5) / len(drawn)
    assert len(counts) == 5
    assert counts[0] == pytest.approx(EMPTY, abs=0.03)
    assert counts[1:].min() > 0.03  # four find room less often than they are drawn
    assert counts[2:].sum() > 0.5


def test_max_digits_is_a_limit():
    _, writings = split_writings(0)
    rng = np.random.default_rng(0)
    assert {len(compose(rng, writings, size=64, max_digits=1)[1]) for _ in range(200)} == {0, 1}


def enlarged(mask, box):
    left, top, right, bottom = box
    return np.asarray(Image.fromarray(mask).resize((right - left, bottom - top))).astype(float)


def square_of(scene, box):
    left, top, right, bottom = box
    return np.asarray(scene.convert("L")).astype(float)[top:bottom, left:right]


def test_each_placed_digit_stands_out_where_it_is_said_to_be(composed):
    writings, drawn = composed
    differences = []
    for scene, placed in drawn[:300]:
        for row, box in placed:
            mask, square = enlarged(writings.masks[row], box), square_of(scene, box)
            differences.append(abs(square[mask > 200].mean() - square[mask < 20].mean()))
    assert np.median(differences) > 80
    assert np.mean(np.array(differences) < 30) < 0.02


def test_each_square_shows_the_named_digit_rather_than_another(composed):
    writings, drawn = composed
    rng = np.random.default_rng(0)
    wins = []
    for scene, placed in drawn[:300]:
        for row, box in placed:
            others = np.flatnonzero(writings.labels != writings.labels[row])
            square = square_of(scene, box).ravel()
            own, other = (
                abs(np.corrcoef(enlarged(writings.masks[number], box).ravel(), square)[0, 1])
                for number in (row, rng.choice(others))
            )
            wins.append(own > other)
    assert np.mean(wins) > 0.93


def test_dark_on_light_and_light_on_dark(composed):
    writings, drawn = composed
    signs = []
    for scene, placed in drawn:
        for row, box in placed[:1]:
            mask, square = enlarged(writings.masks[row], box), square_of(scene, box)
            signs.append(square[mask > 200].mean() < square[mask < 20].mean())
    assert 0.4 < np.mean(signs) < 0.6


def test_without_digits_there_is_clutter_only():
    _, writings = split_writings(0)
    rng = np.random.default_rng(0)
    empty = [
        np.asarray(scene)
        for scene, placed in (compose(rng, writings, size=64, max_digits=1) for _ in range(300))
        if not placed
    ]
    assert len(empty) > 5
    assert np.mean([scene.std() for scene in empty]) > 5
    assert max(scene.std() for scene in empty) < 40  # the contrast of digits is 90 and more


def test_classes_are_balanced():
    dataset = made(digits, val_images=2048).val.dataset
    share = torch.stack([fixed_sample(dataset, index)[1] for index in range(2048)]).float().mean(0)
    assert share.min() > 0.14
    assert share.max() < 0.26
    assert share.max() / share.min() < 1.3


@pytest.mark.parametrize("size", [16, 33, 224])
def test_other_sizes(size):
    data = made(digits, image_size=size, val_images=5, max_digits=6)
    for index in range(5):
        assert fixed_sample(data.val.dataset, index)[0].shape == (3, size, size)
        assert fixed_sample(data.train.dataset, index)[0].shape == (3, size, size)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"image_size": 8}, "data.image_size is 8: it must be at least"),
        ({"image_size": 64.0}, "image_size: 64.0"),
        ({"train_images": 0}, "data.train_images is 0: it must be at least"),
        ({"val_images": -1}, "data.val_images is -1: it must be at least"),
        ({"max_digits": 0}, "data.max_digits is 0: it must be at least"),
        ({"max_digits": True}, "max_digits: True"),
        ({"seed": -1}, "data.seed is -1: it must be at least"),
        ({"threshold": 1.5}, "threshold.*1.5"),
    ],
)
def test_wrong_values_are_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        made(digits, **arguments)
    assert "\n" not in str(caught.value)


def test_needs_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fixed_sample(made(digits, val_images=1).val.dataset, 0)
    assert list(tmp_path.iterdir()) == []


# One digit an image


def test_a_single_digit_is_one_label_of_a_writing_that_training_never_shows() -> None:
    data = made(digit, train_images=40, val_images=40)
    assert data.train.classes.exclusive
    assert data.val.classes.names == NAMES
    train, val = split_writings(0)
    assert not set(train.rows) & set(val.rows)
    shown = set()
    for split, writings in ((data.train, train), (data.val, val)):
        assert set(split.dataset.draw.keywords["writings"].rows) == set(writings.rows)
        for index in range(40):
            image, target = fixed_sample(split.dataset, index)
            assert image.shape == (3, 32, 32)
            assert target.sum() == 1
            shown.add(int(target.argmax()))
    assert shown == set(range(10))
    assert torch.equal(
        fixed_sample(data.val.dataset, 3)[0],
        fixed_sample(made(digit, val_images=5).val.dataset, 3)[0],
    )
    assert isinstance(data.evaluator(), SingleLabelEvaluator)


def test_single_digits_refuse_what_cannot_be() -> None:
    for wrong in (
        {"image_size": 8},
        {"train_images": 0},
        {"val_images": 0},
        {"seed": -1},
        {"top_k": 1},
    ):
        with pytest.raises(ConfigError):
            made(digit, **wrong)
