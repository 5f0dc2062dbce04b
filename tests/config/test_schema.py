"""Settings of a run that depend on one another or on the number of processes."""

import pytest

from mldec.config.schema import Train
from mldec.errors import ConfigError


@pytest.mark.parametrize(
    ("batch_size", "processes", "accumulate", "nearest"),
    [(56, 3, 1, "54 or 57"), (56, 16, 1, "48 or 64"), (10, 2, 2, "8 or 12"), (2, 3, 1, "3")],
)
def test_a_batch_that_processes_cannot_share_is_answered_with_the_nearest_that_they_can(
    batch_size: int, processes: int, accumulate: int, nearest: str
) -> None:
    train = Train(batch_size=batch_size, accumulate=accumulate)
    with pytest.raises(ConfigError) as caught:
        train.on(processes)
    assert str(caught.value) == (
        f"train.batch_size {batch_size} is not divisible by {processes} processes x "
        f"train.accumulate {accumulate}; use {nearest}, the nearest that is"
    )


def test_a_batch_that_processes_can_share_stays() -> None:
    train = Train(batch_size=56, accumulate=2)
    assert train.on(4) == train
    assert train.micro_batch(4) == 7


def test_the_batch_per_gpu_is_of_a_micro_batch_on_each_process() -> None:
    train = Train(batch_size=56, batch_per_gpu=5, accumulate=2).on(3)
    assert train.batch_size == 30
    assert train.micro_batch(3) == 5
    assert train.on(3) == train


def test_the_last_epoch_is_the_planned_one_or_the_one_to_stop_after() -> None:
    assert Train(epochs=80).last_epoch == 80
    assert Train(epochs=80, stop_epoch=41).last_epoch == 41
    assert Train(epochs=80, stop_epoch=80).last_epoch == 80
