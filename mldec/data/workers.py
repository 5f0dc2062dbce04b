"""Loader processes: their start, their faults, and their end."""

import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from mldec.errors import DataError

Loaded = TypeVar("Loaded")  # what a loader yields

# What to do about loader processes that died or cannot hand over what they loaded.
ADVICE = (
    "as happens when memory or /dev/shm is full: lower train.workers (predict: --workers), "
    "or enlarge /dev/shm (docker run --shm-size=8g)"
)


def unwrap(loader: DataLoader[Loaded]) -> Iterator[Loaded]:
    """Iterate over a loader and raise the errors of its workers in this process.

    Raises:
        DataError: if an image cannot be read, or a worker died or cannot hand over a batch.
    """
    # Workers keep sockets in a temporary folder. If this process makes it first, they share it, and
    # it is removed with this process even if they are killed.
    if loader.num_workers:
        multiprocessing.util.get_temp_dir()

    # What is noted here belongs to an earlier loader, which is no longer in use.
    _deaths.error = None
    try:
        with _deaths.reported():
            iterator = iter(loader)
        _deaths.watch()

        while True:
            with _deaths.reported():
                batch = next(iterator, None)

            if batch is None:
                return
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        # An error of the dataset itself stays what it is: from a worker it begins with "Caught".
        if not loader.num_workers or str(error).startswith("Caught "):
            raise

        detail = " ".join(str(error).split()) or type(error).__name__
        problem = "cannot be used" if isinstance(error, OSError) else "died"
        raise DataError(f"a loader process {problem} ({detail}), {ADVICE}") from error


def end_workers() -> None:
    """Kill the loader processes of this process, so that a hanging one cannot keep it from ending.

    SIGTERM would not end them: they have inherited the handlers of this process, which only take
    note of a signal.
    """
    # Loader processes are recognised by the process group of their own, see `start_worker`.
    for child in multiprocessing.active_children():
        if child.daemon and child.pid and os.getpgid(child.pid) == child.pid:
            child.kill()


class _Deaths:
    """Report the deaths of loader processes where a batch is waited for, and only there.

    torch raises an error in its handler of SIGCHLD, wherever the main thread is at that moment: in
    the middle of an optimiser step, or while a checkpoint is written. This handler calls that of
    torch and keeps its error until the next batch is waited for.
    """

    def __init__(self) -> None:
        self.handler: Callable[[int, FrameType | None], Any] | None = None  # that of torch
        self.waiting = False  # for a batch
        self.error: RuntimeError | None = None  # noted while no batch was waited for

    def watch(self) -> None:
        """Replace the handler of torch, which torch installs with its first workers."""
        handler = signal.getsignal(signal.SIGCHLD)

        # Python sets signal handlers in the main thread only.
        in_main_thread = threading.current_thread() is threading.main_thread()
        if callable(handler) and handler != self.note and in_main_thread:
            self.handler = handler
            signal.signal(signal.SIGCHLD, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGCHLD, which announces that a child process has ended."""
        assert self.handler
        try:
            self.handler(number, frame)
        except RuntimeError as error:
            if self.waiting:
                raise
            self.error = error

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Raise an error in this context if a loader process has died or dies now."""
        self.waiting = True
        try:
            if self.error:
                raise self.error
            yield
        finally:
            self.waiting = False


_deaths = _Deaths()


def start_worker(worker: int) -> None:
    """Prepare a loader process; torch calls this inside it, before its first sample."""
    # Ctrl-C, torchrun and schedulers signal whole process groups. The main process still needs
    # batches to stop in order, so that its workers are in groups of their own. A worker whose
    # parent is gone ends by itself.
    os.setpgrp()

    # The thread that sends batches silently drops one that it cannot send, and the main process
    # would wait for it for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = _send_fault  # type: ignore[attr-defined]


def _send_fault(results: Any, error: Exception, lost: Any) -> None:
    """Send a `DataError` instead of a batch that could not be sent, as happens without memory.

    Args:
        results: the queue to the main process.
        error: why the batch could not be sent.
        lost: number of the batch, and the batch; already serialised bytes if sending them failed.
    """
    if not isinstance(lost, tuple) or isinstance(lost[1], DataError):
        os._exit(1)  # not even an error can be sent, but the main process notices this death

    number, detail = lost[0], " ".join(str(error).split())
    fault = DataError(f"a loader process cannot hand over a batch ({detail}), {ADVICE}")
    results.put((number, fault))
