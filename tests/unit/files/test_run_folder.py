"""The folder of a run: its checkpoint, the facts in run.json, the log, and the lock."""

import dataclasses
import errno
import fcntl
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import QUICK

from mldec.errors import CheckpointError, RunInUseError
from mldec.files import run_folder
from mldec.files.run_folder import (
    LOG_FILE,
    RUN_FILE,
    RunFacts,
    RunLock,
    command_line,
    find_checkpoint,
    read_facts,
    read_log,
)

FACTS = RunFacts(
    name="日本",
    command="mldec train",
    versions={"mldec": "1"},
    commit=None,
    epochs=2,
    image_size=64,
    parameters=100,
    multiply_accumulates=10**12,
    best={"metric": "mAP", "value": 1.5, "epoch": 2},
)


def test_the_best_checkpoint_comes_before_the_last(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "last.1.pt").touch()
    with pytest.raises(CheckpointError, match=r"is no folder of a run: .*best.pt nor .*last.pt;"):
        find_checkpoint(tmp_path)
    (folder / "last.pt").touch()
    assert find_checkpoint(tmp_path) == folder / "last.pt"
    (folder / "best.pt").touch()
    assert find_checkpoint(tmp_path) == folder / "best.pt"


def test_facts_and_lines_are_read_as_they_were_written(tmp_path):
    assert read_facts(tmp_path) is None
    (tmp_path / RUN_FILE).write_text(FACTS.to_json())
    assert read_facts(tmp_path) == FACTS
    fields = {field.name for field in dataclasses.fields(RunFacts)}
    assert json.loads(FACTS.to_json()).keys() == fields

    path = tmp_path / LOG_FILE
    assert read_log(path) == []
    path.write_text('{"step": 1, "val/mAP": null}\n{"step": 2}\n')
    assert read_log(path) == [{"step": 1, "val/mAP": None}, {"step": 2}]


@pytest.mark.parametrize("content", [b"{", b"7\n", b'"text"', b'{"nom": 1', b"[" * 100_000])
def test_what_no_run_writes_is_one_line(tmp_path, content):
    for name in (RUN_FILE, LOG_FILE):
        (tmp_path / name).write_bytes(content)
    for read, path in ((read_facts, tmp_path), (read_log, tmp_path / LOG_FILE)):
        with pytest.raises(CheckpointError, match="; it is not what a run writes") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_the_command_line_can_be_pasted_into_a_shell(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text("from mldec.files.run_folder import command_line\nprint(command_line())\n")
    words = [sys.executable, str(script), "data.root=/a b", "name='x'", "$HOME", "[1,2]"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shlex.split(printed) == words
    assert shlex.split(command_line()) == sys.orig_argv


def test_the_second_one_is_told_who_has_the_folder(tmp_path):
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.take()
        record = json.loads((tmp_path / "run.lock").read_text())
        holder = rf"another run is using this folder \(process {os.getpid()} on {record['host']}, "
        with pytest.raises(
            RunInUseError, match=rf"{holder}started {record['started'][:10]}.*name="
        ):
            second.take()
        second.release()
        assert (tmp_path / "run.lock").exists(), "who has no lock takes away none"
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path) as third:
        third.take()


@pytest.mark.parametrize("content", ["", "[1]", "[" * 5000])
def test_a_lock_file_without_a_holder_is_free(tmp_path, content):
    (tmp_path / "run.lock").write_text(content)
    with RunLock(tmp_path) as lock, RunLock(tmp_path) as second:
        lock.take()
        assert json.loads((tmp_path / "run.lock").read_text())["process"] == os.getpid()
        (tmp_path / "run.lock").write_text(content)
        with pytest.raises(RunInUseError, match="is using this folder; wait"):
            second.take()


def test_a_forked_process_takes_no_lock_away(tmp_path):
    with RunLock(tmp_path) as lock, RunLock(tmp_path) as second:
        lock.take()
        child = os.fork()
        if not child:
            lock.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(RunInUseError):
            second.take()


def test_a_restart_by_torchrun_waits_for_the_process_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    before, other = RunLock(tmp_path), RunLock(tmp_path)
    before.take()
    monkeypatch.setattr(run_folder, "PAUSE", 0.01)
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


def test_a_file_system_without_locks_is_said_to_have_none(tmp_path, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock(tmp_path) as lock:
        lock.take()
    assert caplog.text.count("this file system has no locks") == 1


# Found by the check of the parts, and by the reader of the data in the locked folder.
@pytest.mark.parametrize("word", ["loss.bta=2", "data.threshold=2"])
def test_a_start_that_fails_leaves_no_empty_folder(cli, here, word):
    assert cli("train", *QUICK, word).status == 1
    assert not Path("outputs/digits").exists()
