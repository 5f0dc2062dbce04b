"""A run that is stopped, killed or loses files ends like one that was not interrupted."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import patches
import pytest
from support import QUICK, assert_equal, numbers, one_line, process_state, wait_until

from mldec.files import torch_files
from mldec.files.torch_files import read_torch
from mldec.runtime import signals

Cli = Callable[..., Any]
ROOT = Path(__file__).parents[2]
# Forward passes of an epoch: 1 to 4 train; 5 and 6 evaluate the average and the weights on a batch,
# and with batches of 20 images 7 and 8 on another one.
MOMENTS = [("SIGTERM", 3), ("SIGTERM", 5), ("SIGUSR1", 8), ("SIGINT", 4), ("SIGINT", 10)]


def same_end(one: Path, other: Path) -> None:
    """Compare what two runs left, to the last bit, but for settings that change no number."""
    for name in ("last.pt", "best.pt"):
        states = [read_torch(run / "checkpoints" / name) for run in (one, other)]
        for state in states:
            del state["config"]
            del state["git"]  # of the checkout, which may be worked on meanwhile
        assert_equal(*states)
    assert numbers(one) == numbers(other)


@pytest.mark.parametrize(("name", "forward"), MOMENTS)
def test_a_signal_saves_and_ends_with_its_status(
    name: str,
    forward: int,
    cli: Cli,
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:{forward}")
    before = signal.getsignal(signal.SIGTERM)
    # An evaluation ends before its next batch: there must be one.
    status, _, err = cli("train", *QUICK, *(["train.eval_batch_size=20"] if forward == 5 else []))
    assert status == (130 if name == "SIGINT" else 143)
    one_line(err, f"stopped by {name} ", "resume=auto goes on")
    assert ("in the evaluation" in err) == (forward == 5)
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.delenv("PATCHES_SIGNAL")
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, tmp_path / "outputs" / "digits")


@pytest.mark.parametrize("forward", [2, 6])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    forward: int, cli: Cli, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "mldec.train", *QUICK, "train.save_every_steps=1"]
    env = {**os.environ, "PATCHES_SIGNAL": f"SIGKILL:{forward}"}
    assert subprocess.run(command, env=env, capture_output=True).returncode == -signal.SIGKILL
    assert cli("train", *QUICK, "resume=auto", "train.workers=1").status == 0
    same_end(digits_run, tmp_path / "outputs" / "digits")


def loader_processes() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.mark.parametrize("forward", [3, 5], ids=["training", "evaluation"])
def test_a_killed_loader_process_is_one_line_and_nothing_is_lost(
    forward: int, cli: Cli, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forwards = iter(range(1, 100))

    def kill_workers() -> None:
        if next(forwards) == forward:
            # The signal of their death comes in the middle of this step.
            for worker in loader_processes():
                worker.kill()
            wait_until(lambda: not loader_processes())

    with monkeypatch.context() as patch:
        patch.setattr(patches, "interrupt", kill_workers)
        status, _, err = cli("train", *QUICK, "train.workers=1", "train.eval_batch_size=8")
    assert status == 1
    one_line(
        err, "a loader process died", "lower train.workers", "saved in ", "resume=auto goes on"
    )
    assert read_torch(tmp_path / "outputs" / "digits" / "checkpoints" / "last.pt")["step"] == min(
        forward, 4
    )
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, tmp_path / "outputs" / "digits")


@pytest.mark.parametrize("forward", [3, 5], ids=["training", "evaluation"])
def test_a_stop_ends_a_wait_for_data_that_does_not_come(
    forward: int, cli: Cli, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "PATIENCE", 0.5)
    forwards = iter(range(1, 100))

    def halt_workers() -> None:
        if next(forwards) == forward:
            processes = [worker.pid for worker in loader_processes()]
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            wait_until(lambda: all(process_state(process) == "T" for process in processes))
            threading.Thread(target=stop_in_a_wait).start()

    def stop_in_a_wait() -> None:
        request = signal.getsignal(signal.SIGTERM).__self__  # type: ignore[union-attr]
        wait_until(lambda: request._waiting)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(patches, "interrupt", halt_workers)
        status, _, err = cli("train", *QUICK, "train.workers=1", "train.eval_batch_size=8")
    assert status == 143
    one_line(err, "stopped by SIGTERM ", ", waiting for data; saved in ", "resume=auto goes on")
    assert ("in the evaluation" in err) == (forward == 5)
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, tmp_path / "outputs" / "digits")


def test_a_process_whose_loader_hangs_ends_when_asked(tmp_path: Path) -> None:
    log = tmp_path / "outputs" / "digits" / "metrics.jsonl"
    words = [*QUICK, "train.epochs=1000", "train.workers=2", "train.log_every=1"]
    words += ["train.eval_every=1000"]  # whose loader processes would come and go
    process = subprocess.Popen(
        [sys.executable, "-m", "mldec.train", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: process.poll() is not None or (log.exists() and log.read_text()))
    assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    for child in children:
        os.kill(int(child), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    one_line(err, "stopped by SIGTERM ", "saved in ")


@pytest.fixture
def run(digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run that a test may spoil, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(digits_run, tmp_path / "outputs" / "digits")
    return tmp_path / "outputs" / "digits"


def test_a_damaged_checkpoint_falls_back_on_the_one_before(
    run: Path, cli: Cli, digits_run: Path
) -> None:
    last = run / "checkpoints" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    status, out, _ = cli("train", *QUICK, "resume=auto")
    assert status == 0
    assert f"{last.relative_to(Path.cwd())} is damaged" in out.replace(f"{Path.cwd()}/", "")
    assert "last.1.pt" in out
    same_end(digits_run, run)


def test_two_damaged_checkpoints_are_one_line(run: Path, cli: Cli) -> None:
    for name in ("last.pt", "last.1.pt"):
        (run / "checkpoints" / name).write_bytes(b"damaged")
    status, _, err = cli("train", *QUICK, "resume=auto")
    assert status == 1
    one_line(err, "last.1.pt is damaged")


def test_an_older_checkpoint_alone_is_a_run_too(run: Path, cli: Cli, digits_run: Path) -> None:
    (run / "checkpoints" / "last.pt").unlink()
    status, _, err = cli("train", *QUICK)
    assert status == 1
    one_line(err, "holds a run: pass resume=auto")
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, run)


def test_a_half_written_log_is_cut_back(run: Path, cli: Cli, digits_run: Path) -> None:
    (run / "checkpoints" / "last.pt").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tra')
    assert cli("train", *QUICK, "resume=auto").status == 0
    same_end(digits_run, run)


def test_a_folder_deleted_in_mid_run_is_made_again(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Files are written before training goes on: rmtree fails if a file disappears under its hands.
    monkeypatch.setattr(torch_files.Writer, "submit", lambda _, job: job())
    forwards = iter(range(1, 100))
    monkeypatch.setattr(
        patches,
        "interrupt",
        lambda: shutil.rmtree(tmp_path / "outputs") if next(forwards) == 8 else None,
    )
    assert cli("train", *QUICK).status == 0
    assert read_torch(tmp_path / "outputs" / "digits" / "checkpoints" / "last.pt")["epoch"] == 2


def test_a_folder_that_cannot_be_written_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").write_text("a file where the folder should be")
    status, _, err = cli("train", *QUICK)
    assert status == 1
    one_line(err, "cannot use ", "outputs")


def test_out_of_memory_names_what_lowers_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "loss").mkdir(parents=True)
    (tmp_path / "own" / "loss" / "hungry.yaml").write_text("_target_: patches.Hungry\n")
    words = [
        word for word in QUICK if not word.startswith("--config-dir") and word != "backbone=patches"
    ]
    status, _, err = cli("train", f"--config-dir={tmp_path / 'own'}", *words, "loss=hungry")
    assert status == 1
    one_line(
        err,
        "out of memory on cpu: 16 training images at a time",
        "train.accumulate=2",
        "data.image_size",
    )
