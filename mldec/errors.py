"""The faults a user can cause, and how a command reports them: one line, status 1, no traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(ValueError):
    """Something the user can mend: the message is one line with the thing, its value and the fix."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type, out of range, or clashes with another one."""


class DataError(UserError):
    """A data file or folder is missing, broken or not what it should be."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, refused, or does not fit what it is used for."""


class NonFiniteError(UserError):
    """The loss became infinite or not a number."""


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
def one_line() -> Iterator[None]:
    """Turn a `UserError` into `mldec: <message>` and status 1, Ctrl-C into status 130, a closed pipe into 141."""
    try:
        yield
    except UserError as error:
        print(f"mldec: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("mldec: interrupted", file=sys.stderr)
        sys.exit(130)
