"""The logger, and errors that users can cause, reported in one line with exit status 1."""

import errno
import io
import logging
import os
import sys
import time
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

log = logging.getLogger("mldec")  # the logger of all modules

# Errors of a full disk, an exceeded quota and the file size limit of the process.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PYTHON = ("values to unpack", "dictionary update sequence", "invalid literal for")
MAIN_PRINTS_FIRST = 10.0  # seconds that other ranks wait before they print an error


class UserError(ValueError):
    """An error that the user can fix. Its message is one line with key, value and remedy."""

    shared = False  # True on other ranks for an error that rank 0 prints


class ConfigError(UserError):
    """A setting is unknown, has the wrong type, is out of range, or conflicts with another one."""


class OptionError(ConfigError):
    """An invalid option. The command line names it `--name`, and Python `name`."""

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(name, fault)

    def __str__(self) -> str:
        return ": ".join(self.args)


class DataError(UserError):
    """A data file or folder is missing, is damaged, or has another format."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, unsafe, or incompatible."""


class RunInUseError(UserError):
    """Another process is using the folder of the run."""


class Stopped(Exception):
    """The run was stopped by a request. The message is empty if another rank prints it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def suggest(word: str, known: list[str], most: int = 40) -> str:
    """Return a hint for an unknown word: the closest known word, else the first `most` of them."""
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    if not known:
        return ""
    others = f" and {len(known) - most} more" if len(known) > most else ""
    return f"; known: {', '.join(sorted(known[:most]))}{others}"


def visible(text: str) -> str:
    """Replace control characters, which could control the terminal, by `?`."""
    visible_letters = []
    for letter in text:
        is_visible = letter.isprintable() or unicodedata.category(letter) == "Zs"
        visible_letters.append(letter if is_visible else "?")
    return "".join(visible_letters)


def printable(text: str) -> str:
    """Return a message as one line. Line breaks become spaces, other control characters `?`."""
    return visible(" ".join(text.split()))


def brief(error: BaseException) -> str:
    """Return the reason of an error, at most 160 characters: its first line, if it has one."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding} text (byte {error.start})"

    # The first line of an error of PyYAML is its context, such as "while scanning".
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', '')}"

    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, KeyError):
        lines[0] += " is missing"
    return " ".join(lines[0].split())[:160]


def raised(error: BaseException, package: str) -> str:
    """Return type, reason and line of an error in the code of a package, such as a plugin."""
    text = f"{type(error).__name__}: {brief(error)}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if package in Path(frame.filename).with_suffix("").parts:
            return f"{text} ({frame.filename}, line {frame.lineno})"
    return text


@contextmanager
def naming_errors(
    path: str | Path, error: type[UserError] = CheckpointError, *, remedy: str = "use another copy"
) -> Iterator[None]:
    """Convert exceptions of reading a file to an error of class `error` with its path.

    `path` is the path of the file, or a setting. Errors of class `error` are not converted.
    """
    try:
        yield
    except (error, MemoryError):
        raise
    except UserError as cause:
        # The message may contain the path already.
        message = str(cause)
        if not message.startswith(str(path)):
            message = f"{path} cannot be used: {cause}"
        raise error(message) from cause
    except Exception as cause:
        reason = brief(cause)
        # Python's text, such as "'list' object has no attribute", does not explain a data file.
        # In a checkpoint it names the part that another version has written.
        is_python = isinstance(cause, AttributeError | IndexError | TypeError)
        is_python |= any(text in reason for text in _PYTHON)
        if is_python and issubclass(error, DataError):
            reason = "it has another structure than expected"
        raise error(f"{path} cannot be used ({reason}); {remedy}") from cause


@contextmanager
def documented(section: str) -> Iterator[None]:
    """Append a hint, such as "DATASETS.md, section MS-COCO", to a DataError that has none."""
    try:
        yield
    except DataError as error:
        if section and "; see " not in str(error):
            error.args = (f"{error}; see {section}",)
        raise


@contextmanager
def writing(target: str | Path, *, of_run: bool = False) -> Iterator[None]:
    """Convert OSError of a failed write to DataError. `of_run` suggests to resume the run."""
    try:
        yield
    except BrokenPipeError:
        # The reader has closed the pipe, as in `| head`; see `one_line`.
        raise
    except OSError as error:
        fix = "free space" if error.errno in FULL else "make it writable"
        if error.errno == errno.ENAMETOOLONG:
            fix = "shorten its name"
        fix += ", then pass resume=auto" if of_run else ", or write to another place"
        raise DataError(f"cannot write {target}: {error.strerror or error}; {fix}") from error


def say(*lines: str) -> None:
    """Print lines on standard output, with `?` for control characters."""
    with writing("standard output"):
        for line in lines:
            print(visible(line))


def print_error(message: str) -> None:
    """Print one line on standard error."""
    print(f"mldec: {printable(message)}", file=sys.stderr)


@contextmanager
def one_line() -> Iterator[None]:
    """Print UserError and OSError as one line, and exit with status 1.

    `Stopped` exits with its status, Ctrl-C with 130 and a closed pipe with 141. With
    MLDEC_TRACEBACK=1 a UserError has a traceback.
    """
    # Escape characters that the encoding of the terminal does not have.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

    try:
        try:
            yield
        finally:
            with writing("standard output"):
                sys.stdout.flush()
    except UserError as error:
        if os.environ.get("MLDEC_TRACEBACK") == "1":
            raise
        _end(1, _of_this_rank(str(error), shared=error.shared))
    except BrokenPipeError:
        # The reader has closed the pipe, as in `| head`.
        _end(141)
    except OSError as error:
        # Errors of files have a file name. Others are bugs and need a traceback.
        if error.filename is None:
            raise
        shared = getattr(error, "shared", False)
        _end(1, _of_this_rank(f"cannot use {error.filename}: {error.strerror}", shared=shared))
    except Stopped as stop:
        _end(stop.status, str(stop))
    except KeyboardInterrupt:
        _end(130, "interrupted")


def _of_this_rank(message: str, *, shared: bool = False) -> str:
    """Return the message of an error on this rank, or "" if rank 0 prints it."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and shared:
        return ""
    if rank != "0":
        # All ranks may have the same error. Rank 0 prints it, and torchrun ends the others.
        time.sleep(MAIN_PRINTS_FIRST)
        message = f"rank {rank}: {message}"
    return message


def _end(status: int, message: str = "") -> NoReturn:
    """Print a message, if any, and exit. Output that cannot be written is dropped."""
    if message:
        print_error(message)
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
