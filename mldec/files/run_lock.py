"""The lock on a folder, so that only one process at a time writes there."""

import json
import logging
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from mldec.errors import DataError, RunInUseError, writing

log = logging.getLogger("mldec")

PATIENCE = 210.0  # seconds that a process waits which torchrun has started anew
PAUSE = 1.0  # seconds between two attempts


class RunLock:
    """The lock file `run.lock` in a folder; a context manager that releases it.

    The lock of a process that was killed is free at once. `of_run` tells the folder of a training
    run, which has a name and can be resumed, from that of another command.
    """

    def __init__(self, folder: Path, *, of_run: bool = True) -> None:
        self.path = folder / "run.lock"
        self._of_run = of_run
        self._lock = FileLock(self.path, thread_local=False)
        self._owner: int | None = None  # the process that holds it

    def take(self) -> None:
        """Lock the folder until `release`; a lock of another process is a `RunInUseError`.

        A process that torchrun has restarted waits until the one before it has ended.
        """
        with writing(self.path.parent, of_run=self._of_run):
            self.path.parent.mkdir(parents=True, exist_ok=True)

        patience = PATIENCE if _is_earlier_start(self._holder()) else 0.0
        try:
            self._lock.acquire(timeout=patience, poll_interval=PAUSE)
        except Timeout as error:
            elsewhere = "pass name=... for a new run" if self._of_run else "name another file"
            raise RunInUseError(
                f"{self.path.parent}: another run is using this folder{_describe(self._holder())}; "
                f"wait for its end or stop it, or {elsewhere}"
            ) from error
        except PermissionError:
            with writing(self.path, of_run=self._of_run):
                raise
        except (OSError, NotImplementedError) as error:
            log.warning(
                f"{self.path.parent}: this file system has no locks ({error}): nothing keeps a "
                f"second run from writing here"
            )
            return

        self._owner = os.getpid()
        try:
            record = {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "started": datetime.now().astimezone().isoformat(" ", "seconds"),
                "job": os.environ.get("TORCHELASTIC_RUN_ID"),
            }
            with writing(self.path, of_run=self._of_run):
                self.path.write_text(json.dumps(record) + "\n", encoding="utf-8")
        except DataError:
            self.release()
            raise

    def release(self) -> None:
        """Free the folder, if this process holds it."""
        if self._owner == os.getpid():
            self._owner = None
            # While the lock is held: a process that has opened the file meanwhile takes a new one.
            self.path.unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _holder(self) -> dict[str, object]:
        """Return what the lock file says of its process; nothing if it cannot be read."""
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}


def _describe(holder: dict[str, object]) -> str:
    if not holder:
        return ""

    host, process, started = (holder.get(key) for key in ("host", "process", "started"))
    return f" (process {process} on {host}, started {started})"


def _is_earlier_start(holder: dict[str, object]) -> bool:
    """Tell whether a lock is of the processes that this torchrun ended before it restarted us."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return restarted and holder.get("job") == os.environ.get("TORCHELASTIC_RUN_ID")
