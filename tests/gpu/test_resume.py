"""Resume equality of a real network with train.deterministic=true, on CUDA and on the CPU.

The tests on CUDA need `pytest -m gpu`. Convolutions, batch norm, dropout, the attention of the
head, the moving average and a loader with workers may differ between two runs on a GPU. Each run is
a new process.
"""

import os
import subprocess
import sys

import pytest
from support import CUDA_MARKS, assert_equal, numbers

from mldec.files.torch_files import read_torch

PRECISIONS = ("fp32", "fp16", "bf16")
ON_CUDA = [pytest.param("cuda", precision, marks=CUDA_MARKS) for precision in PRECISIONS]

# Two epochs of 8 steps. Each evaluation has two forward passes.
TRAIN = ["+experiment=digits", "plugins=[patches]", "backbone._target_=patches.Interruptible"]
TRAIN += ["data.train_images=128", "data.val_images=64", "train.batch_size=16"]
TRAIN += ["train.eval_batch_size=64", "train.epochs=2", "train.workers=2", "train.log_every=1"]
TRAIN += ["train.deterministic=true"]


def train(folder, *words, stop_at_forward=0):
    """Run `mldec train`, stop it by SIGTERM in a forward pass, and return its status."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PATCHES_SIGNAL": f"SIGTERM:{stop_at_forward}"}
    command = [sys.executable, "-m", "mldec.train"] + TRAIN + list(words)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 143), done.stdout + done.stderr
    return done.returncode


def assert_same_run(folder, other_folder):
    """Compare checkpoints and metrics.jsonl of two runs to the last bit, except for times."""
    run = folder / "outputs" / "digits"
    other = other_folder / "outputs" / "digits"
    for name in ("last.pt", "best.pt"):
        expected = read_torch(other / "checkpoints" / name)
        assert_equal(read_torch(run / "checkpoints" / name), expected)
    assert numbers(run) == numbers(other)


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32")] + ON_CUDA)
def test_resumed_run_equals_uninterrupted_run(tmp_path, device, precision):
    words = [f"device={device}", f"train.precision={precision}"]
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    assert train(whole, *words) == 0
    assert train(stopped, *words, stop_at_forward=5) == 143  # in the first epoch
    assert train(stopped, *words, "resume=auto", stop_at_forward=7) == 143  # in the second
    assert train(stopped, *words, "resume=auto") == 0

    assert_same_run(whole, stopped)


@pytest.mark.parametrize(("device", "precision"), ON_CUDA)
def test_runs_with_same_seed_are_equal(tmp_path, device, precision):
    words = [f"device={device}", f"train.precision={precision}"]
    one = tmp_path / "one"
    other = tmp_path / "other"
    assert train(one, *words) == 0
    assert train(other, *words) == 0
    assert_same_run(one, other)
