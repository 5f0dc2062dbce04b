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
    # Without the lock that `describe` takes to refresh the index: of a run that is killed it would
    # stay, and block the user's own commands.
    git = ["git", "--no-optional-locks", "-C", str(Path(mldec.__file__).parent)]
    describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+dirty"]

    # An installed package may lie inside somebody else's repository, whose commit says nothing
    # about it: git must track this very file.
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", mldec.__file__], capture_output=True
        )
        described = subprocess.run(describe, capture_output=True, text=True)
    except OSError:
        return None

    return described.stdout.strip() if tracked.returncode == described.returncode == 0 else None
