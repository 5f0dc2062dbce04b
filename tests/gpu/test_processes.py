"""Two processes with NCCL, and batch norms over both; on the CPU with gloo where that is possible.

The cases on CUDA need `pytest -m gpu`. With one GPU both processes use it, if NCCL lets them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import QUICK, numbers
from synchronised import BATCH, reference

from mldec.files.torch_files import read_torch

CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
TRAIN = ["-m", "mldec.train", *QUICK[:-1], "head.dropout=0.0", "optim.name=sgd", "train.epochs=1"]
TRAIN += ["train.precision=fp32"]
# Messages of NCCL about two processes on one device.
REFUSED = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")


def start(folder, processes, *words, **environment):
    """Run Python under torchrun. Skip the test if NCCL does not support two processes per GPU."""
    folder.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # newer versions support one GPU
        **environment,
    }
    done = subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    for refusal in REFUSED:
        if refusal in done.stdout + done.stderr:
            pytest.skip(f"NCCL refuses two processes on one GPU: {refusal}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def cuda_device():
    """Return the device for two processes."""
    return "cuda" if torch.cuda.device_count() > 1 else "cuda:0"


@pytest.mark.parametrize(
    "kind",
    ["cpu", pytest.param("cuda", marks=CUDA_MARKS)],
)
def test_two_processes_train_like_one(tmp_path, kind):
    device = "cpu" if kind == "cpu" else cuda_device()
    runs = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        start(folder, processes, *TRAIN, f"device={device}")
        runs.append(folder / "outputs" / "digits")

    states = [read_torch(run / "checkpoints" / "last.pt")["model"] for run in runs]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)
    for one, two in zip(*map(numbers, runs), strict=True):
        assert one == pytest.approx(two, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_micro_batches_on_two_processes_train_like_one(tmp_path):
    runs = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        words = [*TRAIN, f"device={cuda_device()}", "train.accumulate=2"]
        start(folder, processes, *words)
        runs.append(folder / "outputs" / "digits")

    states = [read_torch(run / "checkpoints" / "last.pt")["model"] for run in runs]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


# Training uses the last one.
@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_sync_batch_norm_uses_whole_batch(tmp_path, backend):
    import synchronised

    file = tmp_path / "results.pt"
    words = [str(Path(synchronised.__file__)), backend, str(file)]
    start(tmp_path / "run", 2, *words)
    for found, expected in zip(read_torch(file), reference(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_reference_batch_norm_equals_formula():
    outputs, gradient, mean, variance = reference()
    flat = BATCH.transpose(0, 1).flatten(1)
    torch.testing.assert_close(mean, 0.1 * flat.mean(1))
    torch.testing.assert_close(variance, 0.9 + 0.1 * flat.var(1))

    centred = (BATCH - flat.mean(1).view(1, -1, 1, 1)) / (
        flat.var(1, correction=0).view(1, -1, 1, 1) + 1e-5
    ).sqrt()
    torch.testing.assert_close(outputs, centred)
    torch.testing.assert_close(gradient, (3 * centred**3).sum((0, 2, 3)))
