"""Run one case of a property-based test in this process, and hold it to what a user was promised.

Any exception that a user would see as a traceback comes out as it is, so that Hypothesis tells
different faults apart by their place.
"""

import gc
import io
import logging
import multiprocessing.process
import os
import resource
import signal
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
from hydra.core.global_hydra import GlobalHydra

from mldec.errors import one_line
from mldec.runtime.console import to_console

SECONDS = 20  # of processor time that a case may use
LONGEST = 120  # seconds after which a case is ended: it waits for something
MEMORY = 2**30  # bytes that a case may use beyond what the process had before
CEILING = (
    3 * 2**30
)  # bytes after which the kernel gives a case no more: for the sake of the machine
PROCESSES = 4  # loader workers that a case may start

STEERING = ("Cc", "Zl", "Zp")  # categories of Unicode: controls, and ends of lines and paragraphs
STATUS = {0: "done", 1: "one line", 2: "usage", 143: "stopped"}


class TookTooLong(BaseException):
    """The alarm rang; not an `Exception`, so that nothing swallows it."""


class TooManyProcesses(BaseException):
    """A case starts loader processes without end."""


class Ended(NamedTuple):
    """How a case ended, as a user sees it."""

    status: int
    out: str
    err: str


def guarded(call: Callable[[], object]) -> Ended:
    """Run a command, or a piece of one, and check how it ends.

    Args:
        call: it ends as commands do, by returning, `SystemExit` or a `UserError`.

    Raises:
        AssertionError: if it needs more than `SECONDS` or `MEMORY`, does not end, starts too many
            processes, or ends in anything but success, one line with status 1, a usage message with
            status 2, or an orderly stop.
        Exception: any other exception of the call, which a user would see as a traceback.
    """
    with ExitStack() as stack:
        out, err = stack.enter_context(_captured())
        shown = stack.enter_context(warnings.catch_warnings(record=True))
        for category in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        stack.enter_context(_restored())
        to_console()

        gc.collect(1)
        before = _reset_peak()
        start = time.process_time()
        try:
            with _limited(), one_line():
                call()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except TookTooLong as hang:
            raise AssertionError(f"no end after {LONGEST} s") from hang
        except TooManyProcesses as crowd:
            raise AssertionError(f"more than {PROCESSES} loader processes") from crowd
        seconds, used = time.process_time() - start, _status("VmHWM") - before

    ended = Ended(status, out.getvalue(), err.getvalue())
    lines = ended.err.splitlines() + [f"warning: {warning.message}" for warning in shown]
    assert seconds < SECONDS, f"it took {seconds:.0f} s of processor time"
    assert used < MEMORY, f"it used {used / 2**20:.0f} MiB"
    assert status in STATUS, ended
    assert "Traceback" not in ended.err, ended.err
    assert not (status == 1 and (len(lines) != 1 or not lines[0].startswith("mldec: "))), (
        f"not one line: {lines}"
    )

    if status != 2:  # where argparse repeats what was typed
        odd = {
            letter for letter in ended.out + ended.err if unicodedata.category(letter) in STEERING
        } - {"\n"}
        assert not odd, f"would steer a terminal: {sorted(odd)} in {ended.out + ended.err!r}"
    return ended


class _Stream(io.TextIOWrapper):
    """A stream that is as strict as a terminal's."""

    def getvalue(self) -> str:
        """Return what was written."""
        self.flush()
        content = self.buffer
        assert isinstance(content, io.BytesIO)
        return content.getvalue().decode()


@contextmanager
def _captured() -> Iterator[tuple[_Stream, _Stream]]:
    out = _Stream(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    err = _Stream(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err


@contextmanager
def _restored() -> Iterator[None]:
    """Put back what a command changes in its process, which ends with it otherwise."""
    folder, words, variables = Path.cwd(), sys.argv, dict(os.environ)
    random_state, deterministic = (
        torch.get_rng_state(),
        torch.are_deterministic_algorithms_enabled(),
    )
    log = logging.getLogger("mldec")
    handlers = list(log.handlers)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv = words
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        torch.set_rng_state(random_state)
        torch.use_deterministic_algorithms(deterministic)
        for handler in set(log.handlers) - set(handlers):
            if isinstance(handler, logging.FileHandler):
                log.removeHandler(handler)
                handler.close()
        GlobalHydra.instance().clear()


@contextmanager
def _limited() -> Iterator[None]:
    """Let the kernel end what takes too long, and give no memory beyond a ceiling."""

    def ring(number: int, frame: object) -> None:
        raise TookTooLong

    def start(process: multiprocessing.process.BaseProcess) -> None:
        nonlocal processes
        processes += 1
        if processes > PROCESSES:
            raise TooManyProcesses
        really_start(process)

    processes, really_start = 0, multiprocessing.process.BaseProcess.start
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGALRM, ring)
    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + CEILING, hard))
    # Again after a second, should the first one be lost in a callback.
    signal.setitimer(signal.ITIMER_REAL, LONGEST, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        multiprocessing.process.BaseProcess.start = really_start  # type: ignore[method-assign]


def _reset_peak() -> int:
    """Reset the peak of the resident memory, and return what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """Return one of the kernel's figures on this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel says no {name}")
