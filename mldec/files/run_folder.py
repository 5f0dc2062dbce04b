"""The folder of a run: checkpoints, run.json, and the lock file."""

import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from mldec.errors import CheckpointError, RunInUseError, log, naming_errors, writing
from mldec.runtime.console import in_notebook

RUN_FILE = "run.json"
LOG_FILE = "metrics.jsonl"
CHECKPOINTS = ("best.pt", "last.pt")  # only last.pt before the first evaluation
CALIBRATED = "calibrated.pt"  # in the same folder, written by mldec calibrate
LEFT_OUT = "leave_one_out.npz"  # scores of the training images; see `evaluation.left_out`
LOCK_FILE = "run.lock"
PATIENCE = 210.0  # maximum seconds to wait for the lock after a restart by torchrun
PAUSE = 1.0  # seconds between two attempts
RESTORE = "restore it from a backup"


def find_checkpoint(folder: Path) -> Path:
    """Return the path of the best checkpoint of a run, or else of the last one."""
    paths = [folder / "checkpoints" / name for name in CHECKPOINTS]
    for path in paths:
        if path.exists():
            return path

    names = " or ".join(map(str, paths))
    raise CheckpointError(f"{folder}: not a run's folder, it has no {names}; check the path")


def check_source(path: str | Path) -> None:
    """Raise CheckpointError if a source of weights is a path that does not exist.

    This needs no slow import. The sources "zoo:", "hf:" and "clip:" are not checked.
    """
    if Path(path).exists() or str(path).startswith(("zoo:", "hf:", "clip:")):
        return
    run = Path("outputs", path)
    remedy = f"did you mean {run}?" if (run / "checkpoints").is_dir() else "check the path"
    raise CheckpointError(f"{path}: file not found; {remedy}")


def holds_run(folder: Path) -> bool:
    """Return True if a folder has the checkpoint of a run, which may be damaged."""
    return any(folder.glob("checkpoints/last*.pt"))


def set_aside(folder: Path) -> None:
    """Rename the folder of a run to NAME.old, which replaces an older one. Other folders stay."""
    if not holds_run(folder):
        return

    with RunLock(folder) as lock:
        lock.take()
    old = folder.with_name(f"{folder.name}.old")
    with writing(old):
        if old.exists():
            shutil.rmtree(old)
        folder.rename(old)


def is_best_of_run(checkpoint: Path) -> bool:
    """Return True if `find_checkpoint` returns this checkpoint for its run."""
    folder = checkpoint.absolute().parent
    try:
        return folder.name == "checkpoints" and find_checkpoint(folder.parent).samefile(checkpoint)
    except (OSError, CheckpointError):
        return False


def folder_of_run(checkpoint: Path) -> Path | None:
    """Return the run folder of a checkpoint, or None if it is not in one."""
    # The parents of a relative path end at the working folder.
    for folder in checkpoint.absolute().parents[:2]:
        if (folder / LOG_FILE).is_file() or (folder / RUN_FILE).is_file():
            return folder
    return None


def command_line() -> str:
    """Return the command line of this process, quoted for a shell, without folders of programs."""
    # The command line of a kernel contains only temporary files.
    if in_notebook():
        return "mldec.fit in a notebook"
    words = [Path(sys.orig_argv[0]).name] + sys.orig_argv[1:]
    # Python runs the installed script of the command.
    if Path(words[1] if len(words) > 1 else "").stem == "mldec":
        words = ["mldec"] + words[2:]
    return shlex.join(words)


@dataclass(frozen=True)
class RunFacts:
    """The content of run.json: facts about a run for `mldec summary`."""

    name: str
    command: str
    versions: dict[str, str]  # of mldec, torch and timm
    commit: str | None
    epochs: int  # planned
    image_size: int  # pixels per side
    parameters: int  # trainable
    multiply_accumulates: int | None  # per image; None if unknown
    start_epoch: int = 0  # epochs finished before this start
    # The best result before this start, with the fields of `Best` in a checkpoint.
    best: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None  # why the run has ended; None if it has not

    def to_json(self) -> str:
        """Return the content of run.json."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_facts(folder: Path) -> RunFacts | None:
    """Read run.json of a run folder. Returns None if it does not exist."""
    path = folder / RUN_FILE
    with naming_errors(path, remedy=RESTORE):
        if not path.exists():
            return None
        return RunFacts(**json.loads(path.read_text(encoding="utf-8")))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl, one dictionary each. Empty if the file does not exist."""
    with naming_errors(path, remedy=RESTORE):
        if not path.exists():
            return []
        texts = path.read_text(encoding="utf-8").splitlines()
        return [dict(json.loads(text)) for text in texts]


class RunLock:
    """The lock file `run.lock` of a folder. Leaving the context manager releases the lock.

    The operating system releases the lock of a killed process. `of_run` is True for the folder of a
    training run, for error messages.
    """

    def __init__(self, folder: Path, *, of_run: bool = True) -> None:
        self.path = folder / LOCK_FILE
        self._of_run = of_run
        self._lock = FileLock(self.path, thread_local=False)

    def take(self) -> None:
        """Lock the folder until `release`. Raises RunInUseError if another process holds the lock.

        After a restart by torchrun, this waits for the end of the previous process.
        """
        with writing(self.path.parent, of_run=self._of_run):
            self.path.parent.mkdir(parents=True, exist_ok=True)

        # The lock may belong to a previous process of the same torchrun job.
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        same_job = self._holder().get("job") == os.environ.get("TORCHELASTIC_RUN_ID")
        patience = PATIENCE if is_restart and same_job else 0.0
        try:
            self._lock.acquire(timeout=patience, poll_interval=PAUSE)
        except Timeout as error:
            holder = self._holder()
            owner = ""
            if holder:
                owner = " (process {process} on {host}, started {started})".format(**holder)
            remedy = "pass name=... for a new run" if self._of_run else "name another file"
            raise RunInUseError(
                f"{self.path.parent}: another run is using this folder{owner}; wait for its end, "
                f"or {remedy}"
            ) from error
        except PermissionError:
            with writing(self.path, of_run=self._of_run):
                raise
        except (OSError, NotImplementedError) as error:
            log.warning(
                f"{self.path.parent}: this file system does not support locks ({error}); do not "
                f"start a second run in this folder"
            )
            return

        record = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": datetime.now().astimezone().isoformat(" ", "seconds"),
            "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        }
        with writing(self.path, of_run=self._of_run):
            self.path.write_text(json.dumps(record) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._lock.is_locked:
            # Remove the file before the release. A waiting process then creates a new one.
            self.path.unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _holder(self) -> dict[str, object]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return dict(values)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder. It is removed at the end if it is empty."""
    try:
        with RunLock(folder, of_run=False) as lock:
            lock.take()
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()
