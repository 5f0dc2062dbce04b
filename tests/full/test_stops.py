"""Runs that are stopped or killed, or lose files, end like uninterrupted runs."""

import multiprocessing
import shutil
import signal

import patches
import pytest
from forked import mldec_command
from forked import run as run_process
from support import QUICK, assert_equal, numbers, wait_until

from mldec.files.torch_files import read_torch

# Signal and forward pass. In each epoch, passes 1 to 4 train, 5 and 6 evaluate.
# tests/test_smoke.py stops a run by SIGTERM in the first epoch.
MOMENTS = [("SIGTERM", 5), ("SIGUSR1", 8), ("SIGINT", 4), ("SIGINT", 10)]


def same_end(one, other):
    """Compare checkpoints and logs of two runs to the last bit, except for settings."""
    for name in ("last.pt", "best.pt"):
        states = [read_torch(run / "checkpoints" / name) for run in (one, other)]
        for state in states:
            del state["config"]
            del state["git"]  # the checkout may change
        assert_equal(*states)
    assert numbers(one) == numbers(other)


@pytest.mark.parametrize(("name", "forward"), MOMENTS)
def test_signal_saves_and_exits_with_its_status(name, forward, cli, digits_run, here, monkeypatch):
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:{forward}")
    before = signal.getsignal(signal.SIGTERM)
    # An evaluation stops before its second batch.
    words = ["train.eval_batch_size=20"] if forward == 5 else []
    assert cli("train", *QUICK, *words).status == (130 if name == "SIGINT" else 143)
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.delenv("PATCHES_SIGNAL")
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, here / "outputs" / "digits")


@pytest.mark.parametrize("forward", [2, 6])
def test_killed_run_resumes_exactly(forward, cli, digits_run, here):
    words = ["train", *QUICK, "train.save_every_steps=1"]
    killed = run_process(mldec_command, *words, env={"PATCHES_SIGNAL": f"SIGKILL:{forward}"})
    assert killed.status == -signal.SIGKILL
    assert cli("train", *QUICK, "resume=auto", "train.workers=1").status == 0
    same_end(digits_run, here / "outputs" / "digits")


def loader_processes():
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.mark.parametrize("forward", [3, 5], ids=["training", "evaluation"])
def test_killed_loader_process_loses_no_step(forward, cli, digits_run, here, monkeypatch):
    forwards = iter(range(1, 100))

    def kill_workers():
        if next(forwards) == forward:
            for worker in loader_processes():
                worker.kill()
            wait_until(lambda: not loader_processes())

    with monkeypatch.context() as patch:
        patch.setattr(patches, "interrupt", kill_workers)
        assert cli("train", *QUICK, "train.workers=1", "train.eval_batch_size=8").status == 1
    last = here / "outputs" / "digits" / "checkpoints" / "last.pt"
    assert read_torch(last)["step"] == min(forward, 4)
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, here / "outputs" / "digits")


@pytest.fixture
def run(digits_run, here):
    """Copy of a finished run in the working folder."""
    shutil.copytree(digits_run, here / "outputs" / "digits")
    return here / "outputs" / "digits"


def test_resume_skips_damaged_checkpoint(run, cli, digits_run):
    last = run / "checkpoints" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    assert "last.1.pt" in cli.out("train", *QUICK, "resume=auto")
    same_end(digits_run, run)


def test_resume_without_last_checkpoint_truncates_log(run, cli, digits_run):
    (run / "checkpoints" / "last.pt").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tra')
    cli.out("train", *QUICK, "resume=auto")
    same_end(digits_run, run)
