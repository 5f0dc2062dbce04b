import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import wait_until

from mldec.errors import DataError, RunInUseError
from mldec.files import run_lock
from mldec.files.run_lock import RunLock

# Holds the lock, starts a process that outlives it, and says when both are there.
HOLDER = """
import os, sys, time
from pathlib import Path
from mldec.files.run_lock import RunLock
RunLock(Path(sys.argv[1])).take()
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def age(folder: Path, seconds: float) -> None:
    """Move the last heartbeat of a lock into the past."""
    moment = time.time() - seconds
    os.utime(folder / "run.lock", (moment, moment))


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, and a quick clock."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(run_lock, "SETTLE", 0.05)
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.05)


def test_the_second_one_is_told_who_has_the_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.take()
        record = json.loads((tmp_path / "run.lock").read_text())
        expected = (
            rf"another run is using this folder \(process {os.getpid()} on {record['host']}, "
        )
        with pytest.raises(
            RunInUseError, match=expected + rf"started {record['started'][:10]}.*name="
        ):
            second.take()
        second.release()
        assert (tmp_path / "run.lock").exists(), "who has no lock takes away none"
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path) as third:
        third.take()


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff" * 5000, "[" * 5000])
def test_a_lock_file_without_a_holder_is_free(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.lock").write_text(content, encoding="latin-1")
    with RunLock(tmp_path) as lock, RunLock(tmp_path) as second:
        lock.take()
        assert json.loads((tmp_path / "run.lock").read_text())["process"] == os.getpid()
        (tmp_path / "run.lock").write_text(content, encoding="latin-1")
        with pytest.raises(RunInUseError, match="is using this folder; wait"):
            second.take()


def test_a_killed_run_frees_its_folder_although_a_worker_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    try:
        with RunLock(tmp_path) as lock:
            with pytest.raises(RunInUseError, match=f"process {holder.pid} "):
                lock.take()
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # is there
            lock.take()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_forked_process_takes_no_lock_away(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock, RunLock(tmp_path) as second:
        lock.take()
        child = os.fork()
        if not child:
            lock.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(RunInUseError):
            second.take()


def test_a_file_that_is_removed_while_it_is_opened_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            (tmp_path / "run.lock").unlink()
            removed.append(True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunLock(tmp_path) as lock, RunLock(tmp_path) as second:
        lock.take()
        with pytest.raises(RunInUseError):
            second.take()


def test_a_restart_by_torchrun_waits_for_the_process_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    before, other = RunLock(tmp_path), RunLock(tmp_path)
    before.take()
    monkeypatch.setattr(run_lock, "PAUSE", 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: before.release())
    with pytest.raises(RunInUseError):
        other.take()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with RunLock(tmp_path) as restarted:
        restarted.take()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
        with pytest.raises(RunInUseError):
            other.take()


@pytest.mark.parametrize("number", run_lock.NO_LOCKS)
def test_a_heartbeat_decides_where_there_are_no_locks(
    tmp_path: Path, no_flock: None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.take()
        age(tmp_path, 1000)
        wait_until(lambda: (tmp_path / "run.lock").stat().st_mtime > time.time() - 100)
        with pytest.raises(RunInUseError, match=f"process {os.getpid()} on "):
            second.take()
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path) as third:
        third.take()


def test_a_folder_without_heartbeats_for_three_minutes_is_free(
    tmp_path: Path, no_flock: None
) -> None:
    record = {"host": "elsewhere", "process": 1, "started": "yesterday"}
    (tmp_path / "run.lock").write_text(json.dumps(record))
    with RunLock(tmp_path) as lock:
        age(tmp_path, 120)
        with pytest.raises(RunInUseError, match="process 1 on elsewhere, started yesterday"):
            lock.take()
        age(tmp_path, 181)
        lock.take()


def test_of_two_that_find_a_folder_free_at_once_one_has_it(
    tmp_path: Path, no_flock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, second = time.sleep, RunLock(tmp_path)
    late: list[Any] = []

    def meanwhile(seconds: float) -> None:
        """Let the second one write its name, as if it had looked before the first one wrote."""
        if not late:
            late.append(True)
            (tmp_path / "run.lock").unlink()
            second.take()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", meanwhile)
    with second, RunLock(tmp_path) as first, pytest.raises(RunInUseError):
        first.take()


def test_a_run_that_stood_still_says_that_its_folder_was_taken(
    tmp_path: Path, no_flock: None, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLock(tmp_path) as lock:
        lock.take()
        taken = json.dumps({"host": "elsewhere", "process": 1, "started": "now"})
        (tmp_path / "run.lock").write_text(taken)
        assert lock._heart is not None
        lock._heart.join(60)
    assert "another run has taken this folder (process 1 on elsewhere" in caplog.text
    assert (tmp_path / "run.lock").read_text() == taken


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        DataError, match=r"cannot write .*/run.lock: No space left on device; free space"
    ):
        RunLock(tmp_path).take()
    monkeypatch.undo()
    with RunLock(tmp_path) as lock:
        lock.take()
