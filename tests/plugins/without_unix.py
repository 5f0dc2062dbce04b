"""Hide what Windows lacks, and start loader processes as on Windows and macOS.

Import this module before a command. torch is imported first, because it checks the platform.
"""

import os
import signal
import sys

import torch
import torch.utils.data  # noqa: F401

for module in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[module] = None  # type: ignore[assignment]
# torch needs SIGCHLD on Linux.
for name in ("SIGUSR1", "SIGALRM", "setitimer"):
    delattr(signal, name)
for name in ("fork", "sched_getaffinity", "setpgrp", "getpgid"):
    delattr(os, name)

from mldec.data import loader  # noqa: E402

loader.START = "spawn"  # before other modules import it
