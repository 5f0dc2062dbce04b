"""Mixup and cutmix, compared with timm, and in the loader."""

import itertools
from functools import partial

import pytest
import torch
from timm.data.mixup import FastCollateMixup
from torch.nn.functional import one_hot

from mldec import build
from mldec.config.schema import Mix, MixLabels, MixMode
from mldec.data.loader import TrainBatches, train_loader
from mldec.data.mixing import Mixing
from mldec.data.sampling import seeded
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split
from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator

K = 6
ONE = Classes(tuple("abcdef"), exclusive=True)
SEVERAL = Classes(tuple("abcdef"))
KINDS = {
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
    "both": {"mixup": 0.1, "cutmix": 1.0, "smoothing": 0.1, "prob": 0.9},
}
KINDS_OF_LABELS = ("weighted", "union")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("mode", ["batch", "pair", "elem"])


def batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (size, 3, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(K, (size,), generator=generator)
    return images, one_hot(labels, K).to(torch.int8)


def mixing(kind, classes=SEVERAL, **settings):
    return Mixing(classes, **{**KINDS[kind], **settings})


# Names of our settings in timm.
TIMM = {"mixup": "mixup_alpha", "cutmix": "cutmix_alpha", "smoothing": "label_smoothing"}


def of_timm(kind, mode):
    values = {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0, "prob": 1.0} | KINDS[kind]
    renamed = {TIMM.get(key, key): value for key, value in values.items()}
    return {**renamed, "mode": mode, "num_classes": K}


@every_mode
@every_kind
def test_single_label_images_are_mixed_as_in_timm(kind, mode):
    mix, arguments, changed = mixing(kind, ONE, mode=mode), of_timm(kind, mode), 0
    for seed in range(8):
        images, targets = batch(6, seed)
        before, labels = images.clone(), targets.argmax(1)
        with seeded(seed):
            mixed, soft = mix(images, targets)
        assert torch.equal(images, before)

        pairs = list(zip(images.clone(), labels.tolist(), strict=True))
        with seeded(seed):
            theirs, their_targets = FastCollateMixup(**arguments)(pairs)
        assert (mixed.dtype, soft.dtype) == (torch.uint8, torch.float32)
        assert torch.equal(mixed, theirs)
        assert torch.equal(soft, their_targets)
        changed += not torch.equal(mixed, images)
    assert changed >= 6


# Every pair of labels of an image and its partner: K = 9.
PAIRS = list(itertools.product([1, 0, -1], repeat=2))
ALL_PAIRS = Classes(tuple(map(str, range(9))))


def union_of(labels, smoothing):
    """Return the union of the labels of the visible images."""
    if 1 in labels:
        return 1 - smoothing / 2
    return -1 if -1 in labels else smoothing / 2


@every_mode
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_follow_visible_pixels(kind, mode):
    smoothing = 0.1
    # One image is black and the other white, so that the pixels show the shares of both.
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    images[1] = 255
    targets = torch.tensor(PAIRS, dtype=torch.int8).T

    # An alpha of 0.1 draws many shares near 0 and 1.
    settings = {kind: 0.1, "mode": mode, "smoothing": smoothing}
    mixings = [Mixing(ALL_PAIRS, **settings, labels=labels) for labels in KINDS_OF_LABELS]
    visible_pairs = set()
    for seed in range(40):
        mixed = {}
        for labels, mix in zip(KINDS_OF_LABELS, mixings, strict=True):
            with seeded(seed):
                mixed[labels] = mix(images, targets)
        for i in range(2):
            image = mixed["union"][0][i]
            visible = [j for j in range(2) if (image != images[1 - j]).any()]
            visible_pairs.add(tuple(visible))

            share = (image.float() - images[1 - i].float()).abs().mean().item() / 255
            for k in range(9):
                own, partner = targets[i, k].item(), targets[1 - i, k].item()
                union = mixed["union"][1][i, k].item()
                assert union == pytest.approx(union_of(targets[visible, k].tolist(), smoothing))

                weighted = mixed["weighted"][1][i, k].item()
                if -1 in targets[visible, k]:
                    assert weighted == -1
                    continue
                mean = share * max(own, 0) + (1 - share) * max(partner, 0)
                expected = mean * (1 - smoothing) + smoothing / 2
                # Pixels are rounded to 1 / 255.
                tolerance = 1e-6 + 0.5 / 255 * (kind == "mixup")
                assert weighted == pytest.approx(expected, abs=tolerance)
    assert visible_pairs == {(0,), (1,), (0, 1)}


@pytest.mark.parametrize("labels", KINDS_OF_LABELS)
@every_mode
@every_kind
def test_middle_image_of_odd_batch_is_not_mixed(kind, mode, labels):
    for size in (1, 5):
        images, targets = batch(size)
        targets[:, 0] = -1
        mix = mixing(kind, mode=mode, labels=labels, smoothing=0.0, prob=1.0)
        with seeded(6):
            mixed, soft = mix(images, targets)
        middle = size // 2
        assert mixed.shape == images.shape
        assert torch.equal(mixed[middle], images[middle])
        torch.testing.assert_close(soft[middle], targets[middle].float(), rtol=0, atol=1e-7)
        for i in range(size):
            outside = (targets[i] == 0) & (targets[size - 1 - i] == 0)
            assert (soft[i][outside] == 0).all()
            assert soft[i, 0] == -1
        assert size == 1 or not torch.equal(mixed, images)


def test_smoothing_changes_only_labels():
    images, targets = batch(4)
    mixed, soft = Mixing(ONE, smoothing=0.1)(images, targets)
    assert torch.equal(mixed, images)
    torch.testing.assert_close(soft, targets * 0.9 + 0.1 / K)
    # Multi-label targets move towards 1/2.
    targets = torch.tensor([[1, 0, -1, 0, 1, 0]] * 4, dtype=torch.int8)
    _, soft = Mixing(SEVERAL, smoothing=0.2)(images, targets)
    torch.testing.assert_close(soft, torch.tensor([[0.9, 0.1, -1, 0.1, 0.9, 0.1]] * 4))


# In the loader


class Colored:
    """Random images. The label is the index."""

    def __init__(self, broken=None):
        self.broken = broken

    def __len__(self):
        return 22

    def load(self, index, rng):
        if index == self.broken:
            raise DataError("broken")
        generator = torch.Generator().manual_seed(rng.initial_seed)
        image = torch.randint(256, (3, 8, 8), dtype=torch.uint8, generator=generator)
        return image, one_hot(torch.tensor(index % K), K).to(torch.int8)

    def name(self, index):
        return str(index)


def epoch(mix, classes=ONE, *, workers=0, start=0, number=1, broken=None, **more):
    split = Split(Colored(broken), classes)
    evaluator = MultiLabelEvaluator
    data = DataModule(lambda: split, lambda: split, evaluator, EvalTransform(image_size=8), "skip")
    batches = TrainBatches(22, batch_size=8, seed=5, **more)
    batches.epoch, batches.start = number, start
    mixing = build.mixing(mix, classes)
    return list(train_loader(data, batches, workers=workers, pin=False, mixing=mixing))


def equal(some, others):
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets)
        for a, b in itertools.zip_longest(some, others)
    )


PAIRED = {"mixup": 0.5, "cutmix": 1.0, "mode": MixMode.pair}
BOTH, UNION = Mix(**PAIRED), Mix(**PAIRED, labels=MixLabels.union)


@pytest.mark.parametrize(("mix", "classes"), [(BOTH, ONE), (BOTH, SEVERAL), (UNION, SEVERAL)])
def test_mixed_epoch_resumes_from_any_step_with_any_workers(mix, classes):
    load = partial(epoch, mix, classes, repeats=2)
    whole = load()
    assert equal(whole, load(start=0, workers=2))
    for start in (1, 2):
        assert equal(whole[start:], load(start=start))
    assert not equal(whole, load(number=2))

    # A batch with a skipped image is mixed too.
    (short,) = [batch for batch in epoch(mix, classes, broken=3) if batch.bad]
    assert len(short.images) == len(short.targets) in (5, 7)


def test_disabled_mixing_changes_nothing():
    plain = epoch(Mix())
    assert plain[0].targets.dtype == torch.int8
    assert equal(plain, epoch(Mix(mixup=0.5, prob=0.0, labels=MixLabels.union), SEVERAL))
    soft = epoch(Mix(smoothing=0.1))
    assert all(torch.equal(a.images, b.images) for a, b in zip(plain, soft, strict=True))


def test_batches_and_ranks_draw_different_shares():
    shares = set()
    for rank in range(2):
        for one in epoch(Mix(mixup=0.5), rank=rank, world_size=2):
            shares |= {round(one.targets.max(1).values.min().item(), 5)}
    assert len(shares) == 6
