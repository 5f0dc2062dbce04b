"""When checkpoints are due, and what a save leaves on the disk."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mldec.config.schema import Train
from mldec.errors import CheckpointError
from mldec.files import torch_files
from mldec.files.torch_files import read_torch
from mldec.runtime import distributed
from mldec.training.trainer import CheckpointFiles


def checkpoint(step: int, weight: torch.Tensor | None = None) -> Callable[[], Any]:
    """Return what builds a checkpoint of a step."""
    state = {
        "format": 2,
        "step": step,
        "model": {"a": torch.zeros(2) if weight is None else weight},
    }
    return lambda: SimpleNamespace(to_state=lambda: state)


@pytest.mark.parametrize(
    ("every", "due"), [(None, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (10, [])]
)
def test_steps_after_which_a_save_is_due(tmp_path: Path, every: int | None, due: list[int]) -> None:
    files = CheckpointFiles(tmp_path, Train(save_every_steps=every, save_every_minutes=None))
    assert [step for step in range(1, 7) if files.is_due(step)] == due


def test_minutes_after_which_a_save_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    files = CheckpointFiles(tmp_path, Train(save_every_minutes=2.0))
    now += 119
    assert not files.is_due(1)
    now += 1
    assert files.is_due(2)
    files.save(checkpoint(2), best=False)
    assert not files.is_due(3), "a save begins a new interval"
    now += 120
    assert files.is_due(4)
    files.wait()


def test_a_file_holds_the_moment_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on to change the tensors while the file is written."""
    written, changed = torch_files.save, threading.Event()

    def slow(*arguments: Any, **named: Any) -> None:
        changed.wait(60)
        written(*arguments, **named)

    monkeypatch.setattr(torch_files, "save", slow)
    weight = torch.ones(2)
    files = CheckpointFiles(tmp_path, Train())
    files.save(checkpoint(3, weight), best=False)
    weight += 5
    assert not files.last.exists(), "it is written in the background"
    changed.set()
    files.wait()
    assert read_torch(files.last)["model"]["a"].tolist() == [1, 1]
    assert not files.best.exists()


@pytest.mark.parametrize("keep", [1, 3])
def test_versions_are_kept_and_the_best_one_has_a_name_of_its_own(
    tmp_path: Path, keep: int
) -> None:
    files = CheckpointFiles(tmp_path, Train(keep_last=keep))
    for step in range(5):
        files.save(checkpoint(step), best=step == 1)
    files.wait()
    names = ["last.pt", "last.1.pt", "last.2.pt"][:keep]
    assert [read_torch(tmp_path / name)["step"] for name in names] == [4, 3, 2][:keep]
    assert read_torch(files.best)["step"] == 1
    assert {path.name for path in tmp_path.glob("*.pt")} == {*names, "best.pt"}


def test_a_save_that_failed_is_told_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise CheckpointError("the disk is full")

    files = CheckpointFiles(tmp_path, Train())
    with monkeypatch.context() as patch:
        patch.setattr(torch_files, "save", full)
        files.save(checkpoint(1), best=False)
        with pytest.raises(CheckpointError, match="the disk is full"):
            files.save(checkpoint(2), best=False)
    files.wait()
    files.save(checkpoint(3), best=False)
    files.wait()
    assert read_torch(files.last)["step"] == 3


def test_other_processes_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    files = CheckpointFiles(tmp_path / "run", Train())
    files.save(lambda: pytest.fail("it was built"), best=True)
    files.restore_best(tmp_path / "run" / "last.pt")
    files.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointFiles:
    """Files as a run leaves them that was killed before best.pt had its new content."""
    files = CheckpointFiles(tmp_path, Train())
    files.save(checkpoint(1), best=True)
    files.save(checkpoint(2), best=False)
    files.wait()
    return files


def test_a_best_that_was_left_behind_is_mended(saved: CheckpointFiles) -> None:
    saved.restore_best(saved.last)
    assert read_torch(saved.best)["step"] == 2
    inode = saved.best.stat().st_ino
    saved.restore_best(saved.last)
    assert saved.best.stat().st_ino == inode, "nothing is to be done"


def test_the_best_of_another_run_is_its_own(saved: CheckpointFiles, tmp_path: Path) -> None:
    other = tmp_path / "other" / "last.pt"
    torch_files.save(other, checkpoint(9)().to_state())
    saved.restore_best(other)
    assert read_torch(saved.best)["step"] == 1
    assert not (other.parent / "best.pt").exists()
