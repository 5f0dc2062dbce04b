"""Installed versions, the git commit, and memory management."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import mldec
from mldec.errors import UserError

# Options of glibc's mallopt, from malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# Maximum size of blocks that are kept, in bytes. Older versions of glibc only accept the second.
LARGEST_KEPT = (2**30, 2**25)
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def installed() -> dict[str, str]:
    """Return the installed versions of mldec, torch and timm."""
    import timm  # slow to import, and only needed here

    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def git_commit() -> str | None:
    """Return the commit of the git checkout of this package, or None without a checkout.

    "+dirty" is appended if tracked files are modified.
    """
    # A killed run would leave git's index lock behind, which blocks later git commands.
    git = ["git", "--no-optional-locks", "-C", str(Path(mldec.__file__).parent)]
    # The package may be installed inside another repository. Check that git tracks this file.
    commands = (
        ["ls-files", "--error-unmatch", mldec.__file__],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    )
    try:
        tracked, commit, changes = (
            subprocess.run(git + command, capture_output=True, text=True) for command in commands
        )
    except OSError:
        return None
    if tracked.returncode or commit.returncode:
        return None
    mark = "+dirty" if changes.stdout else ""
    return commit.stdout.strip() + mark


@contextmanager
def explain_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Replace out-of-memory errors of torch and Python by a UserError with this advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch raises a plain RuntimeError on the CPU.
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_known and "can't allocate memory" not in str(error):
            raise

        raise UserError(advice()) from error


def keep_freed_memory() -> bool:
    """Configure glibc to reuse freed memory instead of returning it to the system.

    The system clears each returned page when the next step touches it. That takes 2 to 18 percent
    of a training step on a CPU. Environment variables of the user have precedence.

    Returns:
        True if the setting was applied.
    """
    # `CDLL(None)` does not work on Windows.
    if os.name == "nt":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in OF_THE_USER):
        return False

    takes_threshold = any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT)
    return bool(takes_threshold and mallopt(TRIM_THRESHOLD, 2**31 - 1))
