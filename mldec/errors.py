"""The faults a user can cause, and how a command reports them: one line, status 1, no traceback."""

import errno
import io
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TextIO

FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # of the disk, the user's quota, the process's limit


class UserError(ValueError):
    """Something the user can mend: the message is one line with the thing, its value and the fix."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or clashes with another one."""


class DataError(UserError):
    """A data file or folder is missing, broken or not what it should be."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, refused, or does not fit what it is used for."""


class RunInUseError(UserError):
    """Another process is using the folder of the run."""


class NonFiniteError(UserError):
    """The loss or its gradients became infinite or not a number."""


class OutOfMemoryError(UserError):
    """The device or the machine has not enough memory."""


class Stopped(Exception):
    """The run was asked to stop, and did in order.

    Args:
        message: where it stopped and how to go on; empty on a process for which another one speaks.
        status: of the process: 130 after Ctrl-C, else 143.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def suggest(word: str, known: list[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest of the known words, else the known words."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def visible(text: str) -> str:
    """Return text with `?` for each control character, line breaks included: for names of files and classes.

    A name from outside must neither steer the terminal nor look like a line of ours.
    """
    return "".join(
        letter if letter.isprintable() or unicodedata.category(letter) == "Zs" else "?"
        for letter in text
    )


def printable(text: str) -> str:
    """Return a message as one line: a line break in it becomes a space, any other control character `?`."""
    return visible(" ".join(text.split()))


@contextmanager
def writing(target: str | Path, *, of_run: bool = False) -> Iterator[None]:
    """Name the target of a write that fails: where a disk is full, the `OSError` itself names none.

    Args:
        target: a file, or words such as "standard output".
        of_run: it belongs to a training run, which can go on once it can be written.

    Raises:
        DataError: instead of an `OSError`, but for a closed pipe.
    """
    try:
        yield
    except BrokenPipeError:  # the reader has seen enough, as `| head` does; see `one_line`
        raise
    except OSError as error:
        mend = "free space" if error.errno in FULL else "make it writable"
        then = ", then pass resume=auto" if of_run else ", or write to another place"
        raise DataError(
            f"cannot write {target}: {error.strerror or error}; {mend}{then}"
        ) from error


def say(*lines: str) -> None:
    """Print lines on standard output, each of them without control characters.

    Raises:
        DataError: if they cannot be written.
    """
    with writing("standard output"):
        for line in lines:
            print(visible(line))


def complain(message: str) -> None:
    """Print one line on standard error; if it cannot be written, nobody reads it, and the work goes on."""
    try:
        print(f"mldec: {printable(message)}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError:
        _discard(sys.stderr)


@contextmanager
def one_line(said_once: Callable[[str], str] = str) -> Iterator[None]:
    """Turn a `UserError`, or a file that cannot be used, into `mldec: <message>` and status 1.

    An orderly stop ends with its own status, Ctrl-C elsewhere with 130, a closed pipe with 141.

    Args:
        said_once: of several processes with the same message: returns what this one should print, if anything.
    """
    _mend_streams()
    try:
        try:
            yield
        except SystemExit:
            _flush()
            raise
        _flush()
    except UserError as error:
        _end(1, said_once(printable(str(error))))
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        _end(141)
    except OSError as error:  # a disk that is full, read-only or gone; a bug would name no file
        if error.filename is None:
            raise
        _end(1, said_once(printable(f"cannot use {error.filename}: {error.strerror}")))
    except Stopped as stop:
        _end(stop.status, str(stop))
    except KeyboardInterrupt:
        _end(130, "interrupted")


def _mend_streams() -> None:
    """Make the standard streams fit to be written to, whatever the terminal is and whoever closed them."""
    # Under cron and in daemons they may be closed, and are None here. In this order each new file gets the number of
    # the stream that it stands for, so that nothing else gets it, to be written into by a library.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115

    # A letter that an ASCII or Latin-1 terminal lacks is written as its number.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Write what is still in memory while a failure can be told of: later Python would do it, in lines of its own."""
    with writing("standard output"):
        sys.stdout.flush()


def _end(status: int, message: str = "") -> NoReturn:
    """End the process after at most one line; what the standard streams do not take is dropped."""
    try:
        if message:
            complain(message)
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    sys.exit(status)


def _discard(stream: TextIO) -> None:
    """Send to nowhere what a stream still holds and what comes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
