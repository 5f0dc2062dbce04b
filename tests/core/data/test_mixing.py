"""Mixing against timm: FastCollateMixup in whole numbers, Mixup for what they mean."""

import dataclasses
import inspect
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from timm.data.mixup import FastCollateMixup, Mixup
from torch import Tensor

from mldec.config.schema import Mix, MixLabels, MixMode
from mldec.data.loader import TrainBatches, train_loader, unwrap
from mldec.data.mixing import Mixing
from mldec.data.randomness import SampleRandom, sample_seed, seeded
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split
from mldec.errors import ConfigError, DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator

K = 6
ONE = Classes(tuple("abcdef"), exclusive=True)
SEVERAL = Classes(tuple("abcdef"))
KINDS = {
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
    "both": {"mixup": 0.1, "cutmix": 1.0, "smoothing": 0.1, "prob": 0.9},
}


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (size, 3, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(K, (size,), generator=generator)
    return images, torch.nn.functional.one_hot(labels, K).to(torch.int8)


def arguments(kind: str, mode: str) -> dict:
    values = {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0, "prob": 1.0} | KINDS[kind]
    names = {
        "mixup": "mixup_alpha",
        "cutmix": "cutmix_alpha",
        "smoothing": "label_smoothing",
        "prob": "prob",
    }
    return {names[key]: value for key, value in values.items()} | {"mode": mode, "num_classes": K}


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_that_of_timm_with_the_same_random_numbers(kind: str, mode: str) -> None:
    mixing = Mixing(Mix(**KINDS[kind], mode=MixMode(mode)), ONE)
    changed = 0
    for seed in range(8):
        images, targets = batch(6, seed)
        before = images.clone()
        with seeded(seed):
            mixed, soft = mixing(images, targets)
        assert torch.equal(images, before)
        labels = targets.argmax(1)
        with seeded(seed):
            pairs = [
                (image.clone(), label) for image, label in zip(images, labels.tolist(), strict=True)
            ]
            theirs, their_targets = FastCollateMixup(**arguments(kind, mode))(pairs)
        assert mixed.dtype == torch.uint8
        assert torch.equal(mixed, theirs)
        assert torch.equal(soft, their_targets)
        with seeded(seed):  # the same in floating point, before it is rounded
            exact, their_targets = Mixup(**arguments(kind, mode))(images.float(), labels)
        assert (mixed.float() - exact).abs().max() <= 0.501
        torch.testing.assert_close(soft, their_targets)
        assert soft.dtype == torch.float32
        torch.testing.assert_close(soft.sum(1), torch.ones(6))
        changed += not torch.equal(mixed, images)
    assert changed >= 6


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_an_odd_number_the_middle_stays_and_the_others_mix_in_pairs(
    kind: str, mode: str
) -> None:
    mixing = Mixing(Mix(**KINDS[kind] | {"prob": 1.0}, mode=MixMode(mode)), ONE)
    images, targets = batch(5)
    with seeded(6):
        mixed, soft = mixing(images, targets)
    assert mixed.shape == images.shape
    assert torch.equal(mixed[2], images[2])
    smoothing = KINDS[kind].get("smoothing", 0.0)
    torch.testing.assert_close(soft[2], targets[2] * (1 - smoothing) + smoothing / K)
    assert not torch.equal(mixed[[0, 1, 3, 4]], images[[0, 1, 3, 4]])
    for i in (0, 1, 3, 4):
        outside = (targets[i] + targets[4 - i]) == 0
        assert (soft[i][outside] <= smoothing / K + 1e-6).all()


def test_smoothing_alone_changes_the_labels_only() -> None:
    images, targets = batch(4)
    mixed, soft = Mixing(Mix(smoothing=0.1), ONE)(images, targets)
    assert torch.equal(mixed, images)
    torch.testing.assert_close(soft, targets * 0.9 + 0.1 / K)


# Several labels

# Every pair of labels of an image and its partner: K = 9.
PAIRS = list(itertools.product([1, 0, -1], repeat=2))
ALL_PAIRS = Classes(tuple(map(str, range(9))))


@pytest.mark.parametrize("labels", MixLabels)
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", KINDS)
def test_images_and_weighted_labels_are_those_of_timm(
    kind: str, mode: str, labels: MixLabels
) -> None:
    if "multi_label" not in inspect.signature(Mixup).parameters:
        pytest.skip("this timm mixes no targets of several labels")
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(2, (6, K), generator=generator, dtype=torch.int8)
    images, _ = batch(6)
    mixing = Mixing(Mix(**KINDS[kind], mode=MixMode(mode), labels=labels), SEVERAL)
    for seed in range(8):
        with seeded(seed):
            mixed, found = mixing(images, targets)
        pairs = list(zip(images.clone(), targets, strict=True))
        with seeded(seed):
            theirs, expected = FastCollateMixup(**arguments(kind, mode), multi_label=True)(pairs)
        assert torch.equal(mixed, theirs)
        assert found.dtype == torch.float32
        if labels is MixLabels.weighted:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
            assert found.min() >= 0
            assert found.max() <= 1  # a rounding error above 1 would be refused by the losses


def seen(labels: list[int], smoothing: float) -> float:
    """Return the union of the labels of what is seen in an image."""
    if 1 in labels:
        return 1 - smoothing / 2
    return -1 if -1 in labels else smoothing / 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_those_of_what_the_pixels_show(kind: str, mode: str, smoothing: float) -> None:
    """One image is black and the other white, so that the pixels tell the shares of both."""
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    images[1] = 255
    targets = torch.tensor(PAIRS, dtype=torch.int8).T

    mixings = {
        # An alpha of 0.1 draws many shares near 0 and 1.
        labels: Mixing(
            Mix(**{kind: 0.1}, mode=MixMode(mode), labels=labels, smoothing=smoothing), ALL_PAIRS
        )
        for labels in MixLabels
    }
    shown = set()
    for seed in range(60):
        mixed = {}
        for labels, mixing in mixings.items():
            with seeded(seed):
                mixed[labels] = mixing(images, targets)
        for i in range(2):
            image = mixed[MixLabels.union][0][i]
            visible = [j for j in range(2) if (image != images[1 - j]).any()]
            shown.add(tuple(visible))

            share = (image.float() - images[1 - i].float()).abs().mean().item() / 255
            for k in range(9):
                own, partner = targets[i, k].item(), targets[1 - i, k].item()
                union = mixed[MixLabels.union][1][i, k].item()
                assert union == pytest.approx(seen(targets[visible, k].tolist(), smoothing))

                weighted = mixed[MixLabels.weighted][1][i, k].item()
                if -1 in targets[visible, k]:
                    assert weighted == -1
                else:
                    # What is not annotated and not visible has next to no weight.
                    mean = share * max(own, 0) + (1 - share) * max(partner, 0)
                    expected = mean * (1 - smoothing) + smoothing / 2
                    # Pixels are whole numbers, which hide half a step of 1 / 255.
                    tolerance = 1e-6 + 0.5 / 255 * (kind == "mixup")
                    assert weighted == pytest.approx(expected, abs=tolerance)
    assert shown == {(0,), (1,), (0, 1)}


@pytest.mark.parametrize("labels", MixLabels)
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("size", [1, 5])
def test_of_an_odd_number_the_labels_in_the_middle_stay(
    size: int, mode: str, labels: MixLabels
) -> None:
    images, _ = batch(size)
    targets = torch.tensor([[1, 0, -1, 0, 1, -1]] * size, dtype=torch.int8)
    for kind in KINDS:
        mix = Mix(**KINDS[kind] | {"smoothing": 0.0}, mode=MixMode(mode), labels=labels)
        with seeded(3):
            mixed, found = Mixing(mix, SEVERAL)(images, targets)
        assert mixed.shape == images.shape
        assert torch.equal(mixed[size // 2], images[size // 2])
        # All images have the same labels, so that mixing changes none.
        torch.testing.assert_close(found, targets.float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("labels", MixLabels)
def test_a_pair_of_the_same_image_and_a_single_class(labels: MixLabels) -> None:
    image, _ = batch(1)
    images = image.repeat(2, 1, 1, 1)
    for kind, seed in itertools.product(KINDS, range(8)):
        mix = Mix(**KINDS[kind] | {"smoothing": 0.0, "prob": 1.0}, labels=labels)
        with seeded(seed):
            mixed, found = Mixing(mix, Classes(("a",)))(images, torch.tensor([[1], [0]]))
        assert torch.equal(mixed, images)
        assert found.shape == (2, 1)
        # Of one pair in a whole batch, the weights of the label are those of the two images.
        if labels is MixLabels.weighted:
            assert found.sum().item() == pytest.approx(1)
        else:
            assert found.max() == 1


def test_smoothing_alone_moves_the_labels_of_each_class_towards_a_half() -> None:
    images, _ = batch(2)
    targets = torch.tensor([[1, 0, -1, 0, 1, 0], [0, 0, 0, 1, -1, 1]], dtype=torch.int8)
    for labels in MixLabels:
        mixed, soft = Mixing(Mix(smoothing=0.2, labels=labels), SEVERAL)(images, targets)
        assert torch.equal(mixed, images)
        values = {1: 0.9, 0: 0.1, -1: -1.0}
        expected = [[values[label] for label in row] for row in targets.tolist()]
        torch.testing.assert_close(soft, torch.tensor(expected))


# In the loader


class Coloured:
    """Noise of its own for every draw; the label is the index."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            raise DataError("broken")
        generator = torch.Generator().manual_seed(rng.initial_seed)
        image = torch.randint(256, (3, 8, 8), dtype=torch.uint8, generator=generator)
        return image, torch.nn.functional.one_hot(torch.tensor(index % K), K).to(torch.int8)

    def name(self, index: int) -> str:
        return str(index)


def epoch(
    mix: Mix,
    *,
    workers: int = 0,
    start: int = 0,
    number: int = 1,
    broken: int | None = None,
    classes: Classes = ONE,
    **more: int,
):
    split = Split(Coloured(22, broken), classes)
    evaluator = SingleLabelEvaluator if classes.exclusive else MultiLabelEvaluator
    data = DataModule(lambda: split, lambda: split, evaluator, EvalTransform(image_size=8), "skip")
    batches = TrainBatches(22, batch_size=8, seed=5, **more)
    batches.epoch, batches.start = number, start
    return list(unwrap(train_loader(data, batches, workers=workers, pin=False, mix=mix)))


BOTH = Mix(mixup=0.5, cutmix=1.0, mode=MixMode.pair)
UNION = dataclasses.replace(BOTH, labels=MixLabels.union)
KINDS_OF_LABELS = [(BOTH, ONE), (BOTH, SEVERAL), (UNION, SEVERAL)]


def equal(some, others) -> bool:
    pairs = list(itertools.zip_longest(some, others))
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) for a, b in pairs
    )


@pytest.mark.parametrize(("mix", "classes"), KINDS_OF_LABELS)
def test_a_mixed_epoch_goes_on_from_any_step_with_any_workers(mix: Mix, classes: Classes) -> None:
    load = partial(epoch, mix, classes=classes, repeats=2)
    whole = load()
    assert equal(whole, load(workers=2))
    for start in (1, 2):
        assert equal(whole[start:], load(start=start, workers=start - 1))
    assert not equal(whole, load(number=2))


def test_kinds_of_labels_differ_in_the_labels_only() -> None:
    one, weighted, union = (epoch(mix, classes=classes) for mix, classes in KINDS_OF_LABELS)
    for a, b, c in zip(one, weighted, union, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.images, c.images)
        assert torch.equal(a.targets, b.targets)
        assert set(c.targets.unique().tolist()) == {0, 1}
        assert (c.targets >= b.targets.round()).all()
    assert max(batch.targets.sum(1).max() for batch in union) == 2


def test_nothing_is_mixed_with_a_probability_of_0() -> None:
    mix = Mix(mixup=0.5, prob=0.0, labels=MixLabels.union)
    never, plain = epoch(mix, classes=SEVERAL), epoch(Mix(), classes=SEVERAL)
    assert equal(never, plain)
    assert never[0].targets.dtype == torch.int8


def test_batches_and_processes_mix_with_other_numbers() -> None:
    shares = set()
    for rank in range(2):
        for one in epoch(Mix(mixup=0.5), rank=rank, world_size=2):
            shares |= {round(one.targets.max(1).values.min().item(), 5)}
    assert len(shares) == 6


def test_mixing_leaves_the_random_numbers_of_the_samples_alone() -> None:
    plain, soft = epoch(Mix()), epoch(Mix(smoothing=0.1))
    assert all(torch.equal(a.images, b.images) for a, b in zip(plain, soft, strict=True))
    assert plain[0].targets.dtype == torch.int8


@pytest.mark.parametrize(("mix", "classes"), KINDS_OF_LABELS)
def test_a_batch_with_an_image_left_out_is_mixed_too(mix: Mix, classes: Classes) -> None:
    batches = epoch(mix, broken=3, classes=classes)
    (short,) = [one for one in batches if one.bad]
    assert len(short.images) == len(short.targets) in (5, 7)


# Repeated augmentation


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_repeats_are_those_of_timm_on_every_process(world_size: int) -> None:
    from timm.data.distributed_sampler import RepeatAugSampler

    images = (
        1024  # a multiple of 256 and of the batch: the one difference is at the end of an epoch
    )
    for number in (0, 3):
        for rank in range(world_size):
            theirs = RepeatAugSampler(
                range(images), num_replicas=world_size, rank=rank, num_repeats=3
            )
            theirs.set_epoch(sample_seed(7, number, 0))  # the seed of our order
            ours = TrainBatches(
                images, batch_size=64, repeats=3, seed=7, rank=rank, world_size=world_size
            )
            ours.epoch = number
            assert [index for part in ours for _, index, _ in part] == list(theirs)


def test_versions_of_an_image_differ_and_an_epoch_keeps_its_length() -> None:
    keys = [key for part in TrainBatches(30, batch_size=8, repeats=3) for key in part]
    assert len(keys) == 30
    assert len(set(keys)) == 30
    assert len({index for _, index, _ in keys}) == 10
    first = epoch(Mix(), repeats=3)
    by_index: dict[int, list[Tensor]] = {}
    for one in first:
        for index, image in zip(one.indices.tolist(), one.images, strict=True):
            by_index.setdefault(index, []).append(image)
    copies = next(images for images in by_index.values() if len(images) == 3)
    assert not torch.equal(copies[0], copies[1])
    assert not torch.equal(copies[1], copies[2])


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 4), (2, 2)])
def test_repeats_share_the_same_global_batches(world_size: int, accumulate: int) -> None:
    whole = list(TrainBatches(60, batch_size=12, repeats=3, seed=4))
    ranks = [
        list(
            TrainBatches(
                60,
                batch_size=12,
                repeats=3,
                accumulate=accumulate,
                seed=4,
                rank=rank,
                world_size=world_size,
            )
        )
        for rank in range(world_size)
    ]
    for step, keys in enumerate(whole):
        parts = [
            part for rank in ranks for part in rank[step * accumulate : (step + 1) * accumulate]
        ]
        assert sorted(key for part in parts for key in part) == sorted(keys)


def test_repeats_need_a_batch_of_images() -> None:
    with pytest.raises(
        ConfigError, match=r"^train.repeats 3 needs as many images as a batch: there are 50 .* 64;"
    ):
        TrainBatches(50, batch_size=64, repeats=3)
    assert TrainBatches(50, batch_size=64).steps == 1


def test_numpy_is_where_timm_draws_from() -> None:
    """The loader seeds it; another source would break the exact resumption of a run."""
    images, targets = batch(4)
    mixing = Mixing(BOTH, ONE)
    found = []
    for _ in range(2):
        np.random.seed(3)
        torch.rand(5)
        found.append(mixing(images, targets)[0])
    assert torch.equal(*found)
