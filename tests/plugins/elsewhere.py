"""Hides what Windows does not have, and starts loader processes as Windows and macOS do.

`pytest -p elsewhere ...` and `import elsewhere` before a command. torch comes first: it asks the
platform itself.
"""

import os
import signal
import sys

import torch
import torch.utils.data  # noqa: F401

for module in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[module] = None  # type: ignore[assignment]
for owner, names in {
    # torch needs SIGCHLD on this system.
    signal: ("SIGUSR1", "SIGALRM", "setitimer"),
    os: ("fork", "sched_getaffinity", "setpgrp", "getpgid"),
}.items():
    for name in names:
        delattr(owner, name)

from mldec.data import loader  # noqa: E402

loader.START = "spawn"  # before other modules take it
