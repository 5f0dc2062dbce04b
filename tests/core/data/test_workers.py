import errno
import multiprocessing
import os
import resource
import signal
import time
from typing import Any

import pytest
from numbered import Numbers, as_data
from support import wait_until
from torch import Tensor

from mldec.data import loader as workers
from mldec.data.loader import end_workers, eval_loader, unwrap
from mldec.data.randomness import SampleRandom
from mldec.errors import DataError


class Dying(Numbers):
    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(index, rng)


def test_a_dead_worker_is_one_line() -> None:
    loader = eval_loader(as_data(Dying(7, broken=4)), batch_size=3, workers=1, pin=False)
    with pytest.raises(DataError, match=r"a loader process died .* lower train.workers"):
        list(unwrap(loader))


def loader_process(loader: Any) -> Any:
    """Start a loader with one process; return its first batch, the others, and the process."""
    before = set(multiprocessing.active_children())
    batches = unwrap(loader)
    first = next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    return first, batches, worker


def test_a_worker_killed_between_two_batches_is_noticed_at_the_next_wait() -> None:
    loader = eval_loader(as_data(Numbers(40)), batch_size=3, workers=1, pin=False)
    _, batches, worker = loader_process(loader)
    worker.kill()
    # In a step or a save, which must not be interrupted.
    wait_until(lambda: workers._deaths.error)
    with pytest.raises(DataError, match=r"a loader process died .*Killed"):
        list(batches)


class Unsendable(Numbers):
    """From sample 4 on, a worker gets no more shared memory."""

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        if index == 4:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        return super().load(index, rng)


def test_a_batch_that_cannot_be_handed_over_is_one_line() -> None:
    loader = eval_loader(as_data(Unsendable(9)), batch_size=3, workers=1, pin=False)
    message = r"cannot hand over a batch \(.*File too large.*\), .*train.workers .*--shm-size"
    with pytest.raises(DataError, match=message):
        list(unwrap(loader))


def test_workers_that_cannot_be_started_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as for semaphores, in /dev/shm

    monkeypatch.setattr(multiprocessing.Process, "start", full)
    loader = eval_loader(as_data(Numbers(4)), batch_size=1, workers=1, pin=False)
    with pytest.raises(
        DataError, match=r"a loader process cannot be used .*No space left.*--shm-size"
    ):
        list(unwrap(loader))


class Buggy(Numbers):
    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        raise RuntimeError("a bug")


@pytest.mark.parametrize("count", [0, 1])
def test_a_bug_of_the_dataset_stays_what_it_is(count: int) -> None:
    loader = eval_loader(as_data(Buggy(4)), batch_size=1, workers=count, pin=False)
    with pytest.raises(RuntimeError, match="a bug"):
        list(unwrap(loader))


def test_loader_processes_can_be_ended_though_they_do_not_answer() -> None:
    loader = eval_loader(as_data(Numbers(40)), batch_size=3, workers=1, pin=False)
    _, _batches, worker = loader_process(loader)
    bystander = multiprocessing.get_context("fork").Process(
        target=time.sleep, args=(60,), daemon=True
    )
    bystander.start()
    os.kill(worker.pid, signal.SIGSTOP)
    end_workers()
    worker.join(timeout=60)
    assert worker.exitcode == -signal.SIGKILL
    assert bystander.is_alive()
    bystander.kill()


def test_a_signal_to_the_group_does_not_reach_the_workers() -> None:
    loader = eval_loader(as_data(Numbers(4)), batch_size=1, workers=1, pin=False)
    _, _batches, worker = loader_process(loader)
    assert os.getpgid(worker.pid) != os.getpgrp()
