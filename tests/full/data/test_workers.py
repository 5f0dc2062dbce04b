"""Loader processes that die, hang or cannot hand over what they loaded."""

import multiprocessing
import os
import resource
import signal
import time

import pytest
from numbered import Numbers, as_data
from support import process_state, wait_until

from mldec.data.loader import end_workers, eval_loader
from mldec.errors import DataError


class Faulty(Numbers):
    """Numbers of which the fourth does something to the process that loads it."""

    def __init__(self, fault):
        super().__init__(9)
        self.fault = fault

    def load(self, index, rng):
        if index == 4:
            self.fault()
        return super().load(index, rng)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lose_shared_memory():
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))


def fail():
    raise RuntimeError("a bug")


def be_unreadable():
    raise DataError("number 4 is broken; mend it")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (die, DataError, r"^a loader process died .* lower train.workers"),
        (
            lose_shared_memory,
            DataError,
            r"cannot hand over a batch \(.*File too large.*\), .*train.workers .*--shm-size",
        ),
        (fail, RuntimeError, "a bug"),
        (be_unreadable, DataError, "^number 4 is broken; mend it$"),
    ],
)
def test_a_fault_of_a_loader_process_is_one_line_and_a_bug_stays_one(fault, kind, message):
    loader = eval_loader(as_data(Faulty(fault)), batch_size=3, workers=1, pin=False)
    with pytest.raises(kind, match=message):
        list(loader)


def loader_process(count):
    """Start a loader with one process; return its other batches, and the process."""
    loader = eval_loader(as_data(Numbers(count)), batch_size=3, workers=1, pin=False)
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    return batches, worker


def test_a_worker_killed_between_two_batches_is_noticed_at_the_next_wait():
    batches, worker = loader_process(40)
    # In a step or a save, which must not be interrupted.
    worker.kill()
    wait_until(lambda: process_state(worker.pid) == "Z")
    with pytest.raises(DataError, match=r"a loader process died"):
        list(batches)


def test_loader_processes_can_be_ended_though_they_do_not_answer():
    _batches, worker = loader_process(40)
    # A signal to the group of this process does not reach them.
    assert os.getpgid(worker.pid) != os.getpgrp()
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
