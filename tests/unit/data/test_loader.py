"""Batches: images, order and random numbers."""

import random

import numpy as np
import pytest
import torch
from numbered import Numbers, as_data

from mldec.data.loader import TrainBatches, eval_loader, train_loader
from mldec.data.sampling import sample_seed
from mldec.errors import ConfigError, DataError

FACTORS = np.array([1, 1, 2.5, 1, 1.2, 3, 1, 1])
RARE = np.array([0.4, 0.4, 0, 0.4, 0.4, 5.4, 0.5, 0.5])  # of class-aware sampling


def epoch(number, *, workers=0, start=0, count=23, **arguments):
    batches = TrainBatches(count, batch_size=4, **arguments)
    batches.epoch, batches.start = number, start
    loader = train_loader(as_data(Numbers(count)), batches, workers=workers, pin=False)
    return torch.cat([batch.images for batch in loader])


def keys(number=0, start=0, count=8, **arguments):
    batches = TrainBatches(count, **arguments)
    batches.epoch, batches.start = number, start
    return list(batches)


def test_epoch_is_a_function_of_seed_and_number():
    first = epoch(3, seed=1)
    assert sorted(first[:, 0].tolist()) == list(range(23))
    random.seed(5), torch.manual_seed(7), np.random.seed(8)
    assert torch.equal(first, epoch(3, seed=1))
    assert torch.equal(first, epoch(3, seed=1, workers=2))
    assert not torch.equal(first, epoch(3, seed=2))

    # The order and the random numbers of each image differ between epochs.
    later = epoch(4, seed=1)
    assert not torch.equal(first[:, 0], later[:, 0])
    rows = {row[0].item(): row[1:] for row in first}
    assert all((rows[row[0].item()] != row[1:]).all() for row in later)
    assert len({tuple(row.tolist()) for row in rows.values()}) == 23


def test_epoch_resumes_from_any_step():
    whole = epoch(1, accumulate=2)
    for start in range(5):
        rest = epoch(1, accumulate=2, start=start, workers=2 * (start == 3))
        assert torch.equal(rest, whole[4 * start :])

    drawn = {"batch_size": 4, "factors": FACTORS, "repeats": 2}
    assert len(keys(**drawn)) == 3  # 12 images per epoch, in batches of 4
    for start in range(3):
        assert keys(start=start, **drawn) == keys(**drawn)[start:]


def test_ranks_share_the_images_of_class_aware_sampling():
    (whole,) = keys(batch_size=8, factors=RARE)
    ranks = [keys(batch_size=8, factors=RARE, rank=rank, world_size=2)[0] for rank in (0, 1)]
    assert sorted(ranks[0] + ranks[1]) == sorted(whole)
    assert len(set(whole)) == 8  # each appearance of an image has its own random numbers
    assert keys(1, batch_size=8, factors=RARE) != keys(batch_size=8, factors=RARE)


def test_appearances_of_an_image_have_different_random_numbers():
    for number in range(5):
        (batch,) = keys(number, batch_size=12, factors=FACTORS)
        assert len(set(batch)) == len(batch) == 12
        assert sorted(repetition for _, index, repetition in batch if index == 5) == [0, 1, 2]

    repeated = [key for batch in keys(count=30, batch_size=8, repeats=3) for key in batch]
    assert len(set(repeated)) == len(repeated) == 30
    assert len({index for _, index, _ in repeated}) == 10


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("repeats", [1, 3])
def test_ranks_and_accumulation_share_global_batches(world_size, accumulate, repeats):
    settings = {"count": 61, "batch_size": 12, "repeats": repeats, "seed": 4}
    shares = {"world_size": world_size, "accumulate": accumulate}
    ranks = [keys(rank=rank, **shares, **settings) for rank in range(world_size)]
    for step, batch in enumerate(keys(**settings)[:5]):
        steps = slice(step * accumulate, (step + 1) * accumulate)
        parts = [part for rank in ranks for part in rank[steps]]
        assert sorted(key for part in parts for key in part) == sorted(batch)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_repeats_equal_timm_on_every_rank(world_size):
    from timm.data.distributed_sampler import RepeatAugSampler

    # The number of images is a multiple of 256, so that the end of the epoch is equal too.
    images = range(1024)
    settings = {"batch_size": 64, "repeats": 3, "seed": 7, "world_size": world_size}
    for rank in range(world_size):
        theirs = RepeatAugSampler(images, num_replicas=world_size, rank=rank, num_repeats=3)
        for number in (0, 3):
            theirs.set_epoch(sample_seed(7, number, 0))  # the seed of our order
            ours = keys(number, count=1024, rank=rank, **settings)
            assert [index for part in ours for _, index, _ in part] == list(theirs)


@pytest.mark.parametrize(
    ("count", "accumulate", "steps", "last"),
    [(16, 1, 2, 8), (18, 1, 3, 2), (17, 1, 2, 8), (20, 2, 3, 4), (19, 2, 2, 8)],
)
def test_last_batch_is_dropped_if_too_small_for_batch_norm(count, accumulate, steps, last):
    batches = TrainBatches(count, batch_size=8, accumulate=accumulate)
    assert batches.steps == steps
    assert len(batches) == steps * accumulate == len(list(batches))
    assert batches.images_in_step(steps - 1) == last
    assert all(len(batch) >= 2 for batch in batches)


def test_batch_needs_enough_images():
    for arguments, key in (((1, 10, 1), "train.batch_size"), ((50, 64, 3), "train.repeats")):
        count, batch_size, repeats = arguments
        with pytest.raises(ConfigError, match=f"^{key}"):
            TrainBatches(count, batch_size=batch_size, repeats=repeats)
    assert TrainBatches(50, batch_size=64).steps == 1


# Evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_evaluation_never_pads_or_drops(world_size):
    for count in (1, 4, 11):
        found = []
        options = {"batch_size": 2, "workers": 0, "pin": False, "world_size": world_size}
        for rank in range(world_size):
            loader = eval_loader(as_data(Numbers(count)), rank=rank, **options)
            found += [batch.indices.tolist() for batch in loader]
        assert sorted(found) == [list(range(i, min(i + 2, count))) for i in range(0, count, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_image_raises_or_is_skipped(workers):
    data = as_data(Numbers(7, broken=6), "skip")
    batches = list(eval_loader(data, batch_size=3, workers=workers, pin=False))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], []]
    assert [list(batch.bad) for batch in batches] == [[], [], ["number 6 is broken; restore it"]]

    data = as_data(Numbers(7, broken=6))
    with pytest.raises(DataError, match="number 6"):
        list(eval_loader(data, batch_size=3, workers=workers, pin=False))
