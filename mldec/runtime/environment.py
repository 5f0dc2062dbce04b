"""Installed versions, the git commit, access to the Hub, and errors of full memory."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import mldec
from mldec.errors import UserError


def installed() -> dict[str, str]:
    """Return the installed versions of mldec, torch and timm."""
    import timm  # slow to import, and only needed here

    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def git_commit() -> str | None:
    """Return the commit of the git checkout of this package, or None without a checkout.

    "+dirty" is appended if tracked files are modified.
    """
    # Without locks, because a killed run would leave a lock that blocks later git commands.
    git = ["git", "--no-optional-locks", "-C", str(Path(mldec.__file__).parent)]

    def run(*words: str) -> str:
        done = subprocess.run(git + list(words), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # The package may be installed inside another repository. Check that git tracks this file.
        run("ls-files", "--error-unmatch", mldec.__file__)
        commit = run("rev-parse", "HEAD")
        changes = run("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+dirty" if changes else commit


@contextmanager
def quick_hub() -> Iterator[None]:
    """Use only the cache if the hub is not reachable. Each download would be retried otherwise."""
    import huggingface_hub  # slow to import, and only needed here

    constants = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    try:
        if not before:
            huggingface_hub.get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:
        constants.HF_HUB_OFFLINE = True

    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


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
