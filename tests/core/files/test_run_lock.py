import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mldec.errors import DataError, RunInUseError
from mldec.files import run_lock
from mldec.files.run_lock import RunLock

# Holds the lock, starts a process that outlives it, and says when both are there.
HOLDER = """
import os, sys, time
from pathlib import Path
from mldec.files.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.take()
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


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


def test_a_restart_by_torchrun_waits_for_the_process_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    before, other = RunLock(tmp_path), RunLock(tmp_path)
    before.take()
    monkeypatch.setattr(run_lock, "PAUSE", 0.01)
    with pytest.raises(RunInUseError):
        other.take()

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ended = threading.Timer(0.3, before.release)
    ended.start()
    with RunLock(tmp_path) as restarted:
        restarted.take()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
        with pytest.raises(RunInUseError):
            other.take()
    ended.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock(tmp_path) as lock:
        lock.take()
    assert caplog.text.count("this file system has no locks") == 1


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(
        DataError, match=r"cannot write .*/run.lock: No space left on device; free space"
    ):
        RunLock(tmp_path).take()
    monkeypatch.undo()
    with RunLock(tmp_path) as lock:
        lock.take()
