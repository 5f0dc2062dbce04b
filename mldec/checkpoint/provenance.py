"""What a run was made with: versions and commit."""

import subprocess
from pathlib import Path

import timm
import torch

import mldec


def installed() -> dict[str, str]:
    """Return the versions of the program and of what computes for it."""
    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, with "+dirty" if it was changed; else None."""
    git = ["git", "-C", str(Path(mldec.__file__).parent)]
    describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+dirty"]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", mldec.__file__], capture_output=True
        )
        described = subprocess.run(describe, capture_output=True, text=True)
    except OSError:
        return None
    return described.stdout.strip() if tracked.returncode == described.returncode == 0 else None
