"""Real processes under torchrun, on the CPU with gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import QUICK

from mldec.checkpoint import load


def torchrun(folder: Path, processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, "-m", "mldec.train", *QUICK, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def test_two_processes_train_as_one(tmp_path: Path, digits_run: Path) -> None:
    words = ["head.dropout=0.0", "optim.name=sgd", "train.epochs=1"]  # adam would turn rounding noise into steps
    states, metrics = [], []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        done = torchrun(folder, processes, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("best mAP") == 1
        run = folder / "outputs" / "digits"
        states.append(load(run / "checkpoints" / "last.pt"))
        metrics.append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    torch.testing.assert_close(states[0]["model"], states[1]["model"], rtol=1e-4, atol=1e-5)
    for one, two in zip(*metrics, strict=True):
        assert one.keys() == two.keys()
        for key in {"train/loss", "val/mAP", "val_raw/mAP"} & one.keys():
            assert one[key] == pytest.approx(two[key], rel=1e-3)


def test_a_user_fault_is_one_line_a_process(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, "train.batch_size=15")
    assert done.returncode != 0
    assert "mldec: train.batch_size 15 is not divisible by 2 processes x train.accumulate 1" in done.stderr
