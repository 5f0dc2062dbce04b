import random

import numpy as np
import pytest
import torch
from numbered import Numbers, as_data
from torch import Tensor

from mldec.data.loader import TrainBatches, collate, eval_loader, train_loader, unwrap
from mldec.errors import ConfigError, DataError


def epoch(
    count: int, number: int, *, workers: int = 0, seed: int = 0, start: int = 0, **arguments: int
) -> Tensor:
    batches = TrainBatches(count, seed=seed, **arguments)
    batches.epoch, batches.start = number, start
    loader = train_loader(as_data(Numbers(count)), batches, workers=workers, pin=False)
    return torch.cat([batch.images for batch in unwrap(loader)])


def test_an_epoch_holds_every_image_once() -> None:
    assert sorted(epoch(23, 0, batch_size=4)[:, 0].tolist()) == list(range(23))


def test_order_and_random_numbers_are_a_function_of_seed_and_epoch() -> None:
    first = epoch(20, 3, batch_size=5, seed=1)
    random.seed(5), torch.manual_seed(7), np.random.seed(8)
    assert torch.equal(first, epoch(20, 3, batch_size=5, seed=1))
    assert not torch.equal(first, epoch(20, 4, batch_size=5, seed=1))
    assert not torch.equal(first, epoch(20, 3, batch_size=5, seed=2))


def test_workers_change_nothing() -> None:
    assert torch.equal(epoch(20, 1, batch_size=5), epoch(20, 1, batch_size=5, workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_any_step(workers: int) -> None:
    whole = epoch(23, 1, batch_size=4, accumulate=2)
    for start in range(5):
        rest = epoch(
            23, 1, batch_size=4, accumulate=2, start=start, workers=workers if start == 3 else 0
        )
        assert torch.equal(rest, whole[4 * start :])


def test_random_numbers_of_an_image_differ_between_epochs_and_images() -> None:
    rows = {row[0].item(): row[1:] for row in epoch(20, 0, batch_size=5)}
    later = {row[0].item(): row[1:] for row in epoch(20, 1, batch_size=5)}
    assert all((rows[i] != later[i]).all() for i in rows)
    assert len({tuple(row.tolist()) for row in rows.values()}) == 20


def test_loading_leaves_the_random_states_of_the_process_alone() -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    epoch(10, 0, batch_size=5)
    after = (torch.rand(()), random.random(), np.random.rand())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert after == (torch.rand(()), random.random(), np.random.rand())


FACTORS = np.array([1, 1, 2.5, 1, 1.2, 3, 1, 1])


def test_an_epoch_with_repeat_factors_goes_on_from_any_step() -> None:
    whole = list(TrainBatches(8, batch_size=4, factors=FACTORS, repeats=2))
    assert len(whole) == 3  # 12 images per epoch, in batches of 4
    for start in range(3):
        batches = TrainBatches(8, batch_size=4, factors=FACTORS, repeats=2)
        batches.start = start
        assert list(batches) == whole[start:]


def test_every_appearance_of_an_image_in_an_epoch_has_other_random_numbers() -> None:
    batches = TrainBatches(8, batch_size=12, factors=FACTORS)
    for batches.epoch in range(5):
        (keys,) = batches
        assert len(set(keys)) == len(keys) == 12
        repetitions = [repetition for _, index, repetition in keys if index == 5]
        assert sorted(repetitions) == [0, 1, 2]


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 4), (2, 2), (4, 1)])
def test_processes_and_accumulation_share_the_same_global_batches(
    world_size: int, accumulate: int
) -> None:
    whole = list(TrainBatches(61, batch_size=8, seed=4))
    ranks = [
        list(
            TrainBatches(
                61, batch_size=8, accumulate=accumulate, seed=4, rank=rank, world_size=world_size
            )
        )
        for rank in range(world_size)
    ]
    for step, batch in enumerate(whole[:7]):
        parts = [
            part for rank in ranks for part in rank[step * accumulate : (step + 1) * accumulate]
        ]
        assert sorted(key for part in parts for key in part) == sorted(batch)


@pytest.mark.parametrize(
    ("count", "accumulate", "steps", "last"),
    [(16, 1, 2, 8), (18, 1, 3, 2), (17, 1, 2, 8), (20, 2, 3, 4), (19, 2, 2, 8)],
)
def test_the_last_batch_is_kept_unless_batch_norm_could_not_train_on_it(
    count: int, accumulate: int, steps: int, last: int
) -> None:
    batches = TrainBatches(count, batch_size=8, accumulate=accumulate)
    assert batches.steps == steps
    assert len(batches) == steps * accumulate == len(list(batches))
    assert batches.images_in_step(steps - 1) == last
    assert all(len(keys) >= 2 for keys in batches)


def test_too_few_images_for_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="too large for 1 training images"):
        TrainBatches(1, batch_size=10)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 4, 11])
def test_evaluation_never_pads_or_drops(count: int, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        loader = eval_loader(
            as_data(Numbers(count)),
            batch_size=2,
            workers=0,
            pin=False,
            rank=rank,
            world_size=world_size,
        )
        seen += [int(index) for batch in unwrap(loader) for index in batch.indices]
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_reaches_the_main_process_as_one_line(workers: int) -> None:
    loader = eval_loader(as_data(Numbers(10, broken=7)), batch_size=3, workers=workers, pin=False)
    with pytest.raises(DataError, match=r"^number 7 is broken; mend it$"):
        list(unwrap(loader))


def test_evaluation_batches_do_not_depend_on_the_number_of_processes() -> None:
    batches = []
    for world_size in (1, 2, 3, 5):
        found = []
        for rank in range(world_size):
            loader = eval_loader(
                as_data(Numbers(11)),
                batch_size=2,
                workers=0,
                pin=False,
                rank=rank,
                world_size=world_size,
            )
            found += [batch.indices.tolist() for batch in unwrap(loader)]
        batches.append(sorted(found))
    assert (
        batches[0]
        == batches[1]
        == batches[2]
        == batches[3]
        == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_are_named_and_nothing_takes_their_place(workers: int) -> None:
    loader = eval_loader(
        as_data(Numbers(7, broken=6), "skip"), batch_size=3, workers=workers, pin=False
    )
    batches = list(unwrap(loader))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], []]
    assert [list(batch.bad) for batch in batches] == [[], [], ["number 6 is broken; mend it"]]


def test_a_batch_keeps_uint8_and_int8() -> None:
    sample = (torch.zeros(3, 4, 4, dtype=torch.uint8), torch.zeros(5, dtype=torch.int8), (0, 3, 0))
    batch = collate([sample, sample])
    assert batch.images.dtype == torch.uint8
    assert batch.targets.dtype == torch.int8
    assert batch.indices.tolist() == [3, 3]
