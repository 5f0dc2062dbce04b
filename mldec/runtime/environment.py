"""Hardware and versions, access to the Hub, and the message after an out-of-memory error."""

import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import mldec
from mldec.errors import UserError
from mldec.runtime.devices import processors


def installed() -> dict[str, str]:
    """Return the installed versions of mldec, torch and timm."""
    import timm  # slow to import, and only needed here

    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def environment() -> dict[str, Any]:
    """Return the hardware, versions, date and commit of a measurement."""
    gpu: dict[str, Any] = {"device": "none", "gpus": 0, "cuda": None, "cudnn": None, "nccl": None}
    if torch.cuda.is_available():
        gpu = {
            "device": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git_commit(),
        "processor": platform.machine(),
        "cpu": names[0] if names else None,
        "cores": os.cpu_count(),
        "usable_cores": processors(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    return machine | gpu | installed()


def git_commit() -> str | None:
    """Return the commit of the git checkout of this package, or None without a checkout.

    "+dirty" is appended if tracked files are modified.
    """
    # Git takes no locks, because a killed run would leave a lock that blocks later git commands.
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
