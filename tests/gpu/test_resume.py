"""Resume equality of a real network with train.deterministic=true, on CUDA and on the CPU.

The tests on CUDA need `pytest -m gpu`. Convolutions, batch norm, dropout, the attention of the
head, the moving average and a loader with workers may differ between two runs on a GPU. Each run is
a new process.
"""

import os
import subprocess
import sys

import pytest
import torch
from support import assert_equal, numbers

from mldec.files.torch_files import read_torch

CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CASES = [
    ("cpu", "fp32"),
    *[pytest.param("cuda", precision, marks=CUDA_MARKS) for precision in ("fp32", "fp16", "bf16")],
]

# Two epochs of 8 steps. Each evaluation has two forward passes.
WORDS = [
    "+experiment=digits",
    "plugins=[patches]",
    "backbone._target_=patches.Interruptible",
    "data.train_images=128",
    "data.val_images=64",
    "train.batch_size=16",
    "train.eval_batch_size=64",
    "train.epochs=2",
    "train.workers=2",
    "train.log_every=1",
    "train.deterministic=true",
]


def train(folder, *words, stop_at_forward=0):
    """Run `mldec train`, stop it by SIGTERM in a forward pass, and return its status."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PATCHES_SIGNAL": f"SIGTERM:{stop_at_forward}"}
    command = [sys.executable, "-m", "mldec.train", *WORDS, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 143), done.stdout + done.stderr
    return done.returncode


def assert_same_run(one, other):
    """Compare checkpoints and metrics.jsonl of two runs to the last bit, except for times."""
    for name in ("last.pt", "best.pt"):
        assert_equal(
            read_torch(one / "checkpoints" / name), read_torch(other / "checkpoints" / name)
        )
    assert numbers(one) == numbers(other)


@pytest.mark.parametrize(("device", "precision"), CASES)
def test_resumed_run_equals_uninterrupted_run(tmp_path, device, precision):
    words = [f"device={device}", f"train.precision={precision}"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"

    assert train(whole, *words) == 0
    assert train(stopped, *words, stop_at_forward=5) == 143  # in the first epoch
    assert train(stopped, *words, "resume=auto", stop_at_forward=7) == 143  # in the second
    assert train(stopped, *words, "resume=auto") == 0

    assert_same_run(whole / "outputs" / "digits", stopped / "outputs" / "digits")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_runs_with_same_seed_are_equal(tmp_path, precision):
    words = ["device=cuda", f"train.precision={precision}"]
    for name in ("one", "other"):
        assert train(tmp_path / name, *words) == 0

    assert_same_run(
        tmp_path / "one" / "outputs" / "digits", tmp_path / "other" / "outputs" / "digits"
    )
