"""The faults a user can cause, and how a command reports them: one line, status 1, no traceback."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, the user's quota, the process's limit


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


def printable(text: str) -> str:
    """Return text as one line without control characters: what a file holds must not steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file of a run that cannot be written: the `OSError` of a full disk has no file name.

    Raises:
        DataError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        fix = "free space on its disk" if error.errno in FULL else "make it writable"
        what = error.strerror or str(error)
        raise DataError(f"cannot write {path}: {what}; {fix}, then pass resume=auto") from error


@contextmanager
def one_line(said_once: Callable[[str], str] = str) -> Iterator[None]:
    """Turn a `UserError`, or a file that cannot be used, into `mldec: <message>` and status 1.

    An orderly stop ends with its own status, Ctrl-C elsewhere with 130, a closed pipe with 141.

    Args:
        said_once: of several processes with the same message: returns what this one should print.
    """

    def say(message: str) -> None:
        words = said_once(printable(message))
        if words:
            print(f"mldec: {words}", file=sys.stderr)

    try:
        yield
    except UserError as error:
        say(str(error))
        sys.exit(1)
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a disk that is full, read-only or gone; a bug would name no file
        if error.filename is None:
            raise
        say(f"cannot use {error.filename}: {error.strerror}")
        sys.exit(1)
    except Stopped as stop:
        if str(stop):  # else another process speaks for this one
            print(f"mldec: {stop}", file=sys.stderr)
        sys.exit(stop.status)
    except KeyboardInterrupt:
        print("mldec: interrupted", file=sys.stderr)
        sys.exit(130)
