"""Errors that a user can cause, and how a command reports them: one line and exit status 1."""

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

# No space on the disk, in the user's quota, or within the file size limit of the process.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """An error that the user can mend; its message is one line with key, value and remedy."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or conflicts with another one."""


class DataError(UserError):
    """A data file or folder is missing, damaged, or of another format."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, refused, or does not fit its use."""


class RunInUseError(UserError):
    """Another process is using the folder of the run."""


class NonFiniteError(UserError):
    """The loss or its gradients became infinite or NaN."""


class OutOfMemoryError(UserError):
    """The device or the machine has not enough memory."""


class Stopped(Exception):
    """The run stopped in order, at a request.

    Args:
        message: where it stopped and how to go on; empty if another process prints it.
        status: exit status of the process: 130 after Ctrl-C, else 143.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def suggest(word: str, known: list[str]) -> str:
    """Return a hint for an unknown word: `; did you mean 'x'?`, or the list of known words."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def visible(text: str) -> str:
    """Replace each control character by `?`, line breaks included, in names of files and classes.

    A name from outside must neither control the terminal nor look like a line of ours.
    """
    return "".join(
        letter if letter.isprintable() or unicodedata.category(letter) == "Zs" else "?"
        for letter in text
    )


def printable(text: str) -> str:
    """Return a message as one line: line breaks become spaces, other control characters `?`."""
    return visible(" ".join(text.split()))


def brief(error: BaseException) -> str:
    """Return the type and the first line of the message of an error, at most 160 characters."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror

    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return " ".join(text.split())[:160]


@contextmanager
def refusing(
    path: str | Path, error: type[UserError] = CheckpointError, *, remedy: str = "use another copy"
) -> Iterator[None]:
    """Turn whatever is raised while a file is read into one line that names the file.

    It stands once around reading, parsing and building. Libraries raise almost anything on damaged
    bytes. Errors of the class `error` pass, since they name a file already, and so does a
    `MemoryError`.

    Args:
        path: of the file.
        error: the class of the error to raise.
        remedy: what the user can do, for the message.

    Raises:
        UserError: of the class `error`, in place of any other `Exception`.
    """
    try:
        yield
    except (error, MemoryError):
        raise
    except UserError as cause:
        raise error(f"{path} cannot be used: {cause}") from cause
    except Exception as cause:
        raise error(f"{path} cannot be used ({brief(cause)}); {remedy}") from cause


@contextmanager
def writing(target: str | Path, *, of_run: bool = False) -> Iterator[None]:
    """Name the target of a write that fails; the `OSError` of a full disk does not name it.

    Args:
        target: a file, or a description such as "standard output".
        of_run: the file belongs to a training run, which can be resumed once it can be written.

    Raises:
        DataError: instead of an `OSError`, except for a closed pipe.
    """
    try:
        yield
    except BrokenPipeError:
        # The reader has ended, as `| head` does; see `one_line`.
        raise
    except OSError as error:
        mend = "free space" if error.errno in FULL else "make it writable"
        then = ", then pass resume=auto" if of_run else ", or write to another place"
        raise DataError(
            f"cannot write {target}: {error.strerror or error}; {mend}{then}"
        ) from error


def say(*lines: str) -> None:
    """Print lines on standard output, with `?` for each control character.

    Raises:
        DataError: if they cannot be written.
    """
    with writing("standard output"):
        for line in lines:
            print(visible(line))


def complain(message: str) -> None:
    """Print one line on standard error; the work goes on if it cannot be written."""
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
    With the environment variable MLDEC_TRACEBACK=1 a `UserError` is raised as it is, so that its
    whole traceback is shown.

    Args:
        said_once: takes a message that several processes may have, and returns what this one should
            print of it.
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
        if os.environ.get("MLDEC_TRACEBACK") == "1":
            raise
        _end(1, said_once(printable(str(error))))
    except BrokenPipeError:
        # The reader has ended, as `| head` does.
        _end(141)
    except OSError as error:
        # A disk that is full, read-only or gone names a file. Without a name it is a bug.
        if error.filename is None:
            raise
        _end(1, said_once(printable(f"cannot use {error.filename}: {error.strerror}")))
    except Stopped as stop:
        _end(stop.status, str(stop))
    except KeyboardInterrupt:
        _end(130, "interrupted")


def _mend_streams() -> None:
    """Replace closed standard streams, and let the others print every character."""
    # Under cron and in daemons the streams may be closed, and are None here. In this order each new
    # file gets the descriptor of the stream that it replaces. No other file can then get that
    # descriptor and be written into by a library.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115

    # A character that an ASCII or Latin-1 terminal lacks is written as its code point.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Write the buffered output while an error can still be reported.

    Python would write it at its exit, and report an error there in its own way.
    """
    with writing("standard output"):
        sys.stdout.flush()


def _end(status: int, message: str = "") -> NoReturn:
    """End the process after at most one line; output that cannot be written is dropped."""
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
    """Send the buffer of a stream, and later output, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
