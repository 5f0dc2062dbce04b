"""Errors that a user can cause, and how a command reports them: one line and exit status 1."""

import errno
import io
import os
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

# No space on the disk, in the user's quota, or within the file size limit of the process.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAIN_PRINTS_FIRST = 10.0  # seconds; see `_of_this_rank`


class UserError(ValueError):
    """An error that the user can mend; its message is one line with key, value and remedy."""

    shared = False  # true on the other ranks for a fault that the main process found and prints


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or conflicts with another one."""


class DataError(UserError):
    """A data file or folder is missing, damaged, or of another format."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, refused, or does not fit its use."""


class RunInUseError(UserError):
    """Another process is using the folder of the run."""


class Stopped(Exception):
    """The run stopped in order, at a request; the message is empty if another process prints it."""

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

    It stands once around reading, parsing and building. Errors of the class `error` name a file
    already and pass, and so does a `MemoryError`.
    """
    try:
        yield
    except (error, MemoryError):
        raise
    except UserError as cause:
        # A reader of another kind of file may have named this one.
        is_named = str(cause).startswith(str(path))
        raise error(str(cause) if is_named else f"{path} cannot be used: {cause}") from cause
    except Exception as cause:
        raise error(f"{path} cannot be used ({brief(cause)}); {remedy}") from cause


@contextmanager
def writing(target: str | Path, *, of_run: bool = False) -> Iterator[None]:
    """Name the target of a write that fails; the `OSError` of a full disk does not name it.

    `of_run` says that it belongs to a training run, which can be resumed once it can be written.
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
    """Print lines on standard output, with `?` for each control character."""
    with writing("standard output"):
        for line in lines:
            print(visible(line))


def complain(message: str) -> None:
    """Print one line on standard error."""
    print(f"mldec: {printable(message)}", file=sys.stderr)


@contextmanager
def one_line() -> Iterator[None]:
    """Turn a `UserError`, or a file that cannot be used, into `mldec: <message>` and status 1.

    An orderly stop ends with its own status, Ctrl-C elsewhere with 130, a closed pipe with 141.
    With the environment variable MLDEC_TRACEBACK=1 a `UserError` is raised as it is.
    """
    # A character that an ASCII or Latin-1 terminal lacks is written as its code point.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

    try:
        try:
            yield
        finally:
            # Python would write what is buffered at its exit, and report an error in its own way.
            with writing("standard output"):
                sys.stdout.flush()
    except UserError as error:
        if os.environ.get("MLDEC_TRACEBACK") == "1":
            raise
        _end(1, _of_this_rank(str(error), shared=error.shared))
    except BrokenPipeError:
        # The reader has ended, as `| head` does.
        _end(141)
    except OSError as error:
        # A disk that is full, read-only or gone names a file. Without a name it is a bug.
        if error.filename is None:
            raise
        shared = getattr(error, "shared", False)
        _end(1, _of_this_rank(f"cannot use {error.filename}: {error.strerror}", shared=shared))
    except Stopped as stop:
        _end(stop.status, str(stop))
    except KeyboardInterrupt:
        _end(130, "interrupted")


def _of_this_rank(message: str, *, shared: bool = False) -> str:
    """Return what this process prints of a fault: rank 0 alone prints one that all ranks share."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        return message
    if shared:
        return ""

    # Each may have found the same fault. Once rank 0 has ended, torchrun ends the others.
    time.sleep(MAIN_PRINTS_FIRST)
    return f"rank {rank}: {message}"


def _end(status: int, message: str = "") -> NoReturn:
    """End the process after at most one line; output that cannot be written is dropped."""
    if message:
        complain(message)
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
