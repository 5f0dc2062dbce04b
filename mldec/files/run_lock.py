"""The lock on a folder, so that only one run at a time writes there.

The kernel frees a `flock` when its process ends, for whatever reason. Where a file system has no
such locks, the process that holds the folder touches the lock file every 30 seconds, and a file
that was not touched for 3 minutes is free.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Self
from uuid import uuid4

from mldec.errors import RunInUseError, writing

log = logging.getLogger("mldec")

HEARTBEAT = 30.0  # seconds
TIMEOUT = 180.0  # seconds without a heartbeat, after which a folder is free
# Seconds; longer than it takes to find a folder free and to write a record into it.
SETTLE = 2.0
PAUSE = 1.0  # seconds between two attempts of a process that torchrun has restarted
MAX_RECORD = 1000  # bytes that are read of a lock file

# What the kernel answers where another process holds the lock; EACCES comes from NFS.
HELD = (errno.EWOULDBLOCK, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

# Of the locks that this process holds.
_descriptors: set[int] = set()


def _close_in_child() -> None:
    """Close the locks in a forked process.

    A worker of a loader would otherwise hold the lock of a run that was killed.
    """
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """The lock file `run.lock` in a folder; a context manager that releases it.

    The file names the host, the process and its start, and is removed when the lock is released.

    Args:
        folder: that one process at a time may write to.
        of_run: it is the folder of a training run, which has a name and can be resumed.
    """

    def __init__(self, folder: Path, *, of_run: bool = True) -> None:
        self.path = folder / "run.lock"
        self._of_run = of_run
        self._owner: int | None = None  # the process that holds it
        self._descriptor: int | None = None
        self._record = ""
        self._heart: threading.Thread | None = None
        self._released = threading.Event()

    def take(self) -> None:
        """Lock the folder until `release`, or until this process ends.

        A process that torchrun has restarted waits until the one before it has ended.

        Raises:
            RunInUseError: if another process holds it.
            DataError: if the file cannot be written.
        """
        holder = self._try()
        deadline = time.monotonic() + TIMEOUT + HEARTBEAT
        while holder is not None and _is_earlier_start(holder) and time.monotonic() < deadline:
            time.sleep(PAUSE)
            holder = self._try()

        if holder is not None:
            elsewhere = "pass name=... for a new run" if self._of_run else "name another file"
            raise RunInUseError(
                f"{self.path.parent}: another run is using this folder{_describe(holder)}; "
                f"wait for its end or stop it, or {elsewhere}"
            )
        self._owner = os.getpid()

    def release(self) -> None:
        """Free the folder, if this process holds it."""
        if self._owner != os.getpid():
            return

        self._owner = None
        if self._heart is not None:
            self._released.set()
            self._heart.join()

        # Without flock another run may have taken the folder over: its file stays.
        if self._read() == self._record:
            self.path.unlink(missing_ok=True)
        if self._descriptor is not None:
            _descriptors.discard(self._descriptor)
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try(self) -> str | None:
        """Lock the folder, or return the record of the process that holds it."""
        while True:
            with writing(self.path, of_run=self._of_run):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if error.errno in HELD:
                    return self._read()
                if error.errno in NO_LOCKS:
                    return self._try_heartbeat()
                raise OSError(error.errno, error.strerror, str(self.path)) from error

            # Its last holder may have removed the file since it was opened.
            if self._is_at_path(descriptor):
                break
            os.close(descriptor)

        # From here on the lock is ours; a record that cannot be written gives it back.
        self._record = _record()
        try:
            with writing(self.path, of_run=self._of_run):
                os.pwrite(descriptor, self._record.encode(), 0)
                os.ftruncate(descriptor, len(self._record))
        except BaseException:
            self.path.unlink(missing_ok=True)
            os.close(descriptor)
            raise

        self._descriptor = descriptor
        _descriptors.add(descriptor)
        return None

    def _try_heartbeat(self) -> str | None:
        """Do what `_try` does where the file system has no `flock`."""
        self._record = _record()
        beside = self.path.with_name(f"{self.path.name}.{uuid4().hex}")
        try:
            with writing(beside, of_run=self._of_run):
                beside.write_text(self._record)
                # The clock of the file system, which may be a server's, as for heartbeats.
                now = beside.stat().st_mtime

            holder = self._read()
            if holder and now - self._last_heartbeat() < TIMEOUT:
                return holder

            with writing(self.path, of_run=self._of_run):
                beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)

        # If several processes found the folder free at the same moment, the last one to write its
        # record has it.
        time.sleep(SETTLE)
        holder = self._read()
        if holder != self._record:
            return holder

        self._released.clear()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()
        return None

    def _beat(self) -> None:
        """Touch the lock file until the lock is released, or another run has taken it."""
        while not self._released.wait(HEARTBEAT):
            holder = self._read()
            if holder and holder != self._record:
                log.error(
                    f"{self.path.parent}: another run has taken this folder"
                    f"{_describe(holder)}, because this one "
                    f"stood still for {TIMEOUT / 60:.0f} minutes; stop one of them"
                )
                return

            try:
                os.utime(self.path)
            except OSError:
                # A server that is away for a moment: the next heartbeat may reach it.
                continue

    def _is_at_path(self, descriptor: int) -> bool:
        """Tell whether an open file is still the one at the path."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _last_heartbeat(self) -> float:
        """Return the time of the last heartbeat in seconds; 0 if there is no lock file."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _read(self) -> str:
        """Return the record in the lock file; empty if there is none."""
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_RECORD).decode(errors="replace")
        except OSError:
            return ""


def _record() -> str:
    """Return a record of this process: one line of JSON."""
    record = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        "id": uuid4().hex,
    }
    return json.dumps(record) + "\n"


def _parse(record: str) -> dict[str, object]:
    """Return the entries of a record; none for another kind of file, or an incomplete one."""
    try:
        values = json.loads(record)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _describe(record: str) -> str:
    """Describe the holder of a lock in messages; empty if its record cannot be read."""
    values = _parse(record)
    if not values:
        return ""

    host, process, started = (values.get(key) for key in ("host", "process", "started"))
    return f" (process {process} on {host}, started {started})"


def _is_earlier_start(record: str) -> bool:
    """Tell whether a lock is of the processes that this torchrun ended before it restarted us."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return restarted and _parse(record).get("job") == os.environ.get("TORCHELASTIC_RUN_ID")
