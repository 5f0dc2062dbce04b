"""The folder of a run: its checkpoints, run.json, the log, and the lock."""

import errno
import fcntl
import json
import os
import shlex
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
    check_source,
    command_line,
    find_checkpoint,
    read_facts,
    read_log,
    set_aside,
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


def test_best_checkpoint_has_precedence(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "last.pt").touch()
    assert find_checkpoint(tmp_path) == folder / "last.pt"
    (folder / "best.pt").touch()
    assert find_checkpoint(tmp_path) == folder / "best.pt"


def test_facts_and_log_round_trip(tmp_path):
    assert read_facts(tmp_path) is None
    (tmp_path / RUN_FILE).write_text(FACTS.to_json())
    assert read_facts(tmp_path) == FACTS
    path = tmp_path / LOG_FILE
    assert read_log(path) == []
    path.write_text('{"step": 1, "val/mAP": null}\n{"step": 2}\n')
    assert read_log(path) == [{"step": 1, "val/mAP": None}, {"step": 2}]


@pytest.mark.parametrize("content", [b"{", b"7\n", b'"text"', b'{"nom": 1', b"[" * 100_000])
def test_invalid_or_missing_files_are_named(tmp_path, content):
    for name in (RUN_FILE, LOG_FILE):
        (tmp_path / name).write_bytes(content)
    for read, path, name in (
        (find_checkpoint, tmp_path, "best.pt"),
        (read_facts, tmp_path, RUN_FILE),
        (read_log, tmp_path / LOG_FILE, LOG_FILE),
    ):
        with pytest.raises(CheckpointError, match=name):
            read(path)


def test_command_line_is_quoted_for_a_shell(monkeypatch):
    words = [sys.executable, "a script.py", "data.root=/a b", "name='x'", "$HOME", "[1,2]"]
    monkeypatch.setattr(sys, "orig_argv", words)
    assert shlex.split(command_line()) == [Path(sys.executable).name, *words[1:]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/opt/bin/python3", "/opt/bin/mldec", "train", "name=a"], "mldec train name=a"),
        (["C:/py/python.exe", "C:/py/Scripts/mldec.exe", "train"], "mldec train"),
        (["/opt/bin/python3", "-m", "mldec.train", "name=a"], "python3 -m mldec.train name=a"),
        (["/opt/bin/python3", "/home/me/train.py"], "python3 /home/me/train.py"),
        (["/opt/bin/python3"], "python3"),
    ],
)
def test_command_line_has_no_folders_of_programs(monkeypatch, words, expected):
    monkeypatch.setattr(sys, "orig_argv", words)
    assert command_line() == expected


def test_missing_sources_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "mine" / "checkpoints").mkdir(parents=True)
    for name, hint in (("nothing", "nothing: file not found"), ("mine", "outputs/mine")):
        with pytest.raises(CheckpointError, match=hint):
            check_source(name)
    for name in ("outputs/mine", tmp_path, "zoo:x", "hf:me/x", "clip:x"):
        check_source(name)


@pytest.mark.parametrize("content", [None, "", "[1"])
def test_folder_has_one_lock(tmp_path, content):
    file = tmp_path / "run.lock"
    if content is not None:
        file.write_text(content)  # left by a killed process
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.take()
        record = json.loads(file.read_text())
        assert record["process"] == os.getpid()
        if content is not None:
            file.write_text(content)
        owner = record["host"] if content is None else str(tmp_path)
        with pytest.raises(RunInUseError, match=owner):
            second.take()
        second.release()
        assert file.exists()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path) as third:
        third.take()


def test_restart_by_torchrun_waits_for_the_previous_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    before = RunLock(tmp_path)
    before.take()
    monkeypatch.setattr(run_folder, "PAUSE", 0.01)
    with pytest.raises(RunInUseError):
        RunLock(tmp_path).take()

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ended = threading.Timer(0.3, before.release)
    ended.start()
    with RunLock(tmp_path) as restarted:
        restarted.take()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
        with pytest.raises(RunInUseError):
            RunLock(tmp_path).take()
    ended.join()


def test_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def fail(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with RunLock(tmp_path) as lock:
        lock.take()


# The first error is found by the check of the parts, the second by the data in the locked folder.
@pytest.mark.parametrize("word", ["loss.bta=2", "data.threshold=2"])
def test_failed_start_leaves_no_empty_folder(cli, here, word):
    assert cli("train", *QUICK, word).status == 1
    assert not Path("outputs/digits").exists()


def test_set_aside_replaces_the_older_run_only(tmp_path):
    folder, old = tmp_path / "mine", tmp_path / "mine.old"
    for content in ("first", "second"):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "last.pt").write_text(content)
        set_aside(folder)
    set_aside(folder)  # does not exist
    assert not folder.exists()
    assert (old / "checkpoints" / "last.pt").read_text() == "second"

    # A failed start may leave a folder without a checkpoint.
    folder.mkdir()
    set_aside(folder)
    assert folder.exists()
    assert (old / "checkpoints" / "last.pt").read_text() == "second"

    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.1.pt").touch()
    with RunLock(folder) as lock:
        lock.take()
        with pytest.raises(RunInUseError, match="mine"):
            set_aside(folder)
    assert old.exists()
