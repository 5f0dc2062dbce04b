"""The folder of a run: its checkpoints, the facts in run.json, and the lock of its one process."""

import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from mldec.errors import CheckpointError, RunInUseError, refusing, writing

log = logging.getLogger("mldec")

RUN_FILE = "run.json"
LOG_FILE = "metrics.jsonl"
CHECKPOINTS = ("best.pt", "last.pt")  # last.pt alone before the first evaluation
CALIBRATED = "calibrated.pt"  # beside them; written by mldec calibrate
LOCK_FILE = "run.lock"
PATIENCE = 210.0  # seconds that a process waits which torchrun has started anew
PAUSE = 1.0  # seconds between two attempts
NOT_OURS = "it is not what a run writes"


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that represents a run: the best one, else the last one."""
    paths = [folder / "checkpoints" / name for name in CHECKPOINTS]
    for path in paths:
        if path.exists():
            return path

    looked_for = " nor ".join(str(path) for path in paths)
    raise CheckpointError(
        f"{folder} is no folder of a run: there is neither {looked_for}; check the path"
    )


def is_best_of_run(checkpoint: Path) -> bool:
    """Whether this is the checkpoint that `find_checkpoint` returns for the folder of its run."""
    folder = checkpoint.absolute().parent
    try:
        return folder.name == "checkpoints" and find_checkpoint(folder.parent).samefile(checkpoint)
    except (OSError, CheckpointError):
        return False


def folder_of_run(checkpoint: Path) -> Path | None:
    """Return the folder of the run whose checkpoint this is; None if there is none."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        if (folder / LOG_FILE).is_file() or (folder / RUN_FILE).is_file():
            return folder
    return None


def command_line() -> str:
    """Return the command that started this process, quoted for a shell."""
    return shlex.join(sys.orig_argv)


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that `mldec summary` shows beside its log: the content of run.json."""

    name: str
    command: str
    versions: dict[str, str]  # of mldec, torch and timm
    commit: str | None
    epochs: int  # planned
    image_size: int  # pixels per side
    parameters: int  # trainable
    multiply_accumulates: int | None  # per image; None if the model cannot be counted
    start_epoch: int = 0  # epochs finished before this start
    # The best result before this start, as in a checkpoint: metric, value, weights and so on.
    best: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None  # why the run has ended; None while it goes on

    def to_json(self) -> str:
        """Return the content of run.json."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_facts(folder: Path) -> RunFacts | None:
    """Read run.json; None if there is none."""
    path = folder / RUN_FILE
    with refusing(path, remedy=NOT_OURS):
        return RunFacts(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl, each a number or null by name; none without the file."""
    with refusing(path, remedy=NOT_OURS):
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [dict(json.loads(text)) for text in texts]


class RunLock:
    """The lock file `run.lock` in a folder; a context manager that releases it.

    The lock of a process that was killed is free at once. `of_run` tells the folder of a training
    run, which has a name and can be resumed, from that of another command.
    """

    def __init__(self, folder: Path, *, of_run: bool = True) -> None:
        self.path = folder / LOCK_FILE
        self._of_run = of_run
        self._lock = FileLock(self.path, thread_local=False)
        self._owner: int | None = None  # the process that holds it

    def take(self) -> None:
        """Lock the folder until `release`; a lock of another process is a `RunInUseError`.

        A process that torchrun has restarted waits until the one before it has ended.
        """
        with writing(self.path.parent, of_run=self._of_run):
            self.path.parent.mkdir(parents=True, exist_ok=True)

        # Whether the lock is of the processes that this torchrun ended before it restarted us.
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        same_job = self._holder().get("job") == os.environ.get("TORCHELASTIC_RUN_ID")
        patience = PATIENCE if is_restart and same_job else 0.0
        try:
            self._lock.acquire(timeout=patience, poll_interval=PAUSE)
        except Timeout as error:
            holder, owner = self._holder(), ""
            if holder:
                owner = " (process {process} on {host}, started {started})".format(**holder)
            elsewhere = "pass name=... for a new run" if self._of_run else "name another file"
            raise RunInUseError(
                f"{self.path.parent}: another run is using this folder{owner}; "
                f"wait for its end or stop it, or {elsewhere}"
            ) from error
        except PermissionError:
            with writing(self.path, of_run=self._of_run):
                raise
        except (OSError, NotImplementedError) as error:
            log.warning(
                f"{self.path.parent}: this file system has no locks ({error}): start no second run"
            )
            return

        self._owner = os.getpid()
        record = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": datetime.now().astimezone().isoformat(" ", "seconds"),
            "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        }
        with writing(self.path, of_run=self._of_run):
            self.path.write_text(json.dumps(record) + "\n", encoding="utf-8")

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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes away from a folder, which is removed at the end if it is empty."""
    try:
        with RunLock(folder, of_run=False) as lock:
            lock.take()
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()
