"""A run that is stopped, killed or loses files ends like one that was not interrupted."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import patches
import pytest
from support import QUICK, assert_equal, numbers, one_line, process_state, wait_until

from mldec.files.torch_files import read_torch
from mldec.runtime import signals

# Forward passes of an epoch: 1 to 4 train; 5 and 6 evaluate the average and the weights on a batch,
# and with batches of 20 images 7 and 8 on another one.
MOMENTS = [("SIGTERM", 3), ("SIGTERM", 5), ("SIGUSR1", 8), ("SIGINT", 4), ("SIGINT", 10)]


def same_end(one, other):
    """Compare what two runs left, to the last bit, but for settings that change no number."""
    for name in ("last.pt", "best.pt"):
        states = [read_torch(run / "checkpoints" / name) for run in (one, other)]
        for state in states:
            del state["config"]
            del state["git"]  # of the checkout, which may be worked on meanwhile
        assert_equal(*states)
    assert numbers(one) == numbers(other)


@pytest.mark.parametrize(("name", "forward"), MOMENTS)
def test_a_signal_saves_and_ends_with_its_status(name, forward, cli, digits_run, here, monkeypatch):
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:{forward}")
    before = signal.getsignal(signal.SIGTERM)
    # An evaluation ends before its next batch: there must be one.
    status, _, err = cli("train", *QUICK, *(["train.eval_batch_size=20"] if forward == 5 else []))
    assert status == (130 if name == "SIGINT" else 143)
    one_line(err, f"stopped by {name} ", "resume=auto")
    assert ("in the evaluation" in err) == (forward == 5)
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.delenv("PATCHES_SIGNAL")
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, here / "outputs" / "digits")


@pytest.mark.parametrize("forward", [2, 6])
def test_a_killed_run_goes_on_as_if_it_had_not_been(forward, cli, digits_run, here):
    command = [sys.executable, "-m", "mldec.train", *QUICK, "train.save_every_steps=1"]
    env = {**os.environ, "PATCHES_SIGNAL": f"SIGKILL:{forward}"}
    assert subprocess.run(command, env=env, capture_output=True).returncode == -signal.SIGKILL
    assert cli("train", *QUICK, "resume=auto", "train.workers=1").status == 0
    same_end(digits_run, here / "outputs" / "digits")


def loader_processes():
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.mark.parametrize("forward", [3, 5], ids=["training", "evaluation"])
def test_a_killed_loader_process_is_one_line_and_nothing_is_lost(
    forward, cli, digits_run, here, monkeypatch
):
    forwards = iter(range(1, 100))

    def kill_workers():
        if next(forwards) == forward:
            # The signal of their death comes in the middle of this step.
            for worker in loader_processes():
                worker.kill()
            wait_until(lambda: not loader_processes())

    with monkeypatch.context() as patch:
        patch.setattr(patches, "interrupt", kill_workers)
        status, _, err = cli("train", *QUICK, "train.workers=1", "train.eval_batch_size=8")
    assert status == 1
    one_line(err, "a loader process died", "lower train.workers", "saved in ", "resume=auto")
    last = here / "outputs" / "digits" / "checkpoints" / "last.pt"
    assert read_torch(last)["step"] == min(forward, 4)
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, here / "outputs" / "digits")


@pytest.mark.parametrize("forward", [3, 5], ids=["training", "evaluation"])
def test_a_stop_ends_a_wait_for_data_that_does_not_come(
    forward, cli, digits_run, here, monkeypatch
):
    monkeypatch.setattr(signals, "PATIENCE", 0.5)
    forwards = iter(range(1, 100))

    def halt_workers():
        if next(forwards) == forward:
            processes = [worker.pid for worker in loader_processes()]
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            wait_until(lambda: all(process_state(process) == "T" for process in processes))
            threading.Thread(target=stop_in_a_wait).start()

    def stop_in_a_wait():
        request = signal.getsignal(signal.SIGTERM).__self__
        wait_until(lambda: request._waiting)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(patches, "interrupt", halt_workers)
        status, _, err = cli("train", *QUICK, "train.workers=1", "train.eval_batch_size=8")
    assert status == 143
    one_line(err, "stopped by SIGTERM ", ", waiting for data; saved in ", "resume=auto")
    assert ("in the evaluation" in err) == (forward == 5)
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, here / "outputs" / "digits")


@pytest.fixture
def run(digits_run, here):
    """A finished run that a test may spoil, in the working folder."""
    shutil.copytree(digits_run, here / "outputs" / "digits")
    return here / "outputs" / "digits"


def test_a_damaged_checkpoint_falls_back_on_the_one_before(run, cli, digits_run):
    last = run / "checkpoints" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    status, out, _ = cli("train", *QUICK, "resume=auto")
    assert status == 0
    assert f"{last.relative_to(Path.cwd())} is damaged" in out.replace(f"{Path.cwd()}/", "")
    assert "last.1.pt" in out
    same_end(digits_run, run)


def test_an_older_checkpoint_alone_is_a_run_too(run, cli, digits_run):
    (run / "checkpoints" / "last.pt").unlink()
    status, _, err = cli("train", *QUICK)
    assert status == 1
    one_line(err, "holds a run: pass resume=auto")
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, run)


def test_a_half_written_log_is_cut_back(run, cli, digits_run):
    (run / "checkpoints" / "last.pt").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tra')
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, run)


def test_a_folder_that_cannot_be_written_is_one_line(cli, here):
    (here / "outputs").write_text("a file where the folder should be")
    one_line(cli.fault("train", *QUICK), "cannot use ", "outputs")


def test_out_of_memory_names_what_lowers_it(cli, here):
    err = cli.fault("train", *QUICK, "loss._target_=patches.Hungry")
    one_line(err, "out of memory on cpu: 16 training images at a time", "train.accumulate=2")
