"""Loader processes that die, hang or cannot share a batch."""

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
    """Numbers whose fifth sample runs a function in the loader process."""

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
    raise DataError("number 4 is broken; restore it")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (die, DataError, "train.workers"),
        (lose_shared_memory, DataError, "File too large.*--shm-size"),
        (fail, RuntimeError, "a bug"),
        (be_unreadable, DataError, "^number 4 is broken; restore it$"),
    ],
)
def test_fault_of_loader_process_is_data_error_and_bug_is_not(fault, kind, message):
    loader = eval_loader(as_data(Faulty(fault)), batch_size=3, workers=1, pin=False)
    with pytest.raises(kind, match=message):
        list(loader)


def loader_process(count):
    """Start a loader with one process. Return its remaining batches and the process."""
    loader = eval_loader(as_data(Numbers(count)), batch_size=3, workers=1, pin=False)
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    return batches, worker


def test_worker_killed_between_batches_is_detected_at_next_batch():
    batches, worker = loader_process(40)
    worker.kill()
    wait_until(lambda: process_state(worker.pid) == "Z")
    with pytest.raises(DataError, match=r"train\.workers"):
        list(batches)


def test_hanging_loader_process_is_killed():
    _batches, worker = loader_process(40)
    # Signals to the process group do not reach the worker.
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
