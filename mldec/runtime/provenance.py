"""Which software wrote a checkpoint: package versions and the git commit."""

import subprocess
from pathlib import Path

import timm
import torch

import mldec


def installed() -> dict[str, str]:
    """Return the installed versions of mldec, torch and timm."""
    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, or None if there is none.

    "+dirty" is appended if tracked files of the checkout have changes.
    """
    # Without the lock that git takes to refresh its index: of a run that is killed it would stay,
    # and block the user's own commands. Of the commands that tell whether files have changed,
    # `status` can do without it, `describe --dirty` cannot.
    git = ["git", "--no-optional-locks", "-C", str(Path(mldec.__file__).parent)]
    status = [*git, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]

    # An installed package may lie inside somebody else's repository, whose commit says nothing
    # about it: git must track this very file.
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", mldec.__file__], capture_output=True
        )
        state = subprocess.run(status, capture_output=True, text=True)
    except OSError:
        return None
    if tracked.returncode or state.returncode:
        return None

    # Headings begin with "#", and the other lines name one changed file each.
    lines = state.stdout.splitlines()
    heading = "# branch.oid "
    commit = next(line.removeprefix(heading) for line in lines if line.startswith(heading))
    if commit == "(initial)":
        return None
    is_changed = any(not line.startswith("#") for line in lines)
    return commit + ("+dirty" if is_changed else "")
