"""Facts about a model and the software that runs it, and what is done about memory."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Documented, though the module has an underscore.
import mldec
from mldec.errors import UserError

# Options of glibc's mallopt, from malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# Larger blocks go back to the system one by one. Older versions of glibc take at most the second.
LARGEST_KEPT = (2**30, 2**25)  # bytes
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def installed() -> dict[str, str]:
    """Return the installed versions of mldec, torch and timm."""
    import timm  # slow to import, and of no use to most who import this module

    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, or None if there is none.

    "+dirty" is appended if tracked files of the checkout have changes.
    """
    # Without the lock that git takes to refresh its index: of a run that is killed it would stay,
    # and block the user's own commands.
    git = ["git", "--no-optional-locks", "-C", str(Path(mldec.__file__).parent)]
    # An installed package may lie inside somebody else's repository, whose commit says nothing
    # about it: git must track this very file.
    commands = (
        ["ls-files", "--error-unmatch", mldec.__file__],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    )
    try:
        tracked, commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True) for command in commands
        )
    except OSError:
        return None
    if tracked.returncode or commit.returncode:
        return None
    mark = "+dirty" if changes.stdout else ""
    return commit.stdout.strip() + mark


@contextmanager
def explain_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Raise a `UserError` with this advice in place of those of torch and Python."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # On a CPU torch raises a plain RuntimeError.
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_known and "can't allocate memory" not in str(error):
            raise

        raise UserError(advice()) from error


def keep_freed_memory() -> bool:
    """Keep what torch frees for the tensors of the next step; tell whether it is so now.

    By default glibc returns large blocks to the system, which clears each page again when the next
    step touches it: 2 to 18 percent of a training step on a CPU. Settings of the user stay.
    """
    # Windows has no library of the process itself.
    mallopt = None if os.name == "nt" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in OF_THE_USER):
        return False

    takes_threshold = any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT)
    return bool(takes_threshold and mallopt(TRIM_THRESHOLD, 2**31 - 1))
