"""Two processes train like one, and synchronized batch norms, with gloo and NCCL.

The cases on CUDA need `pytest -m gpu`. Both processes use the same GPU if there is only one and
NCCL supports that.
"""

import os
import subprocess
import sys

import pytest
import synchronized
import torch
from support import CUDA_MARKS, QUICK, numbers

from mldec.files.torch_files import read_torch

TRAIN = ["-m", "mldec.train"] + QUICK[:-1]
TRAIN += ["head.dropout=0.0", "optim.name=sgd", "train.epochs=1", "train.precision=fp32"]
# Messages of NCCL about two processes on one device.
UNSUPPORTED = ("Duplicate GPU detected", "Multiple Ranks are using the same GPU")
# Training uses the last one.
BACKENDS = ("nccl", "gloo", "cpu:gloo,cuda:nccl")


def start(folder, processes, *words):
    """Run Python under torchrun. Skip the test if NCCL does not support two processes per GPU."""
    folder.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # newer versions support one GPU
    }
    command = [sys.executable, *launcher, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    for message in UNSUPPORTED:
        if message in done.stdout + done.stderr:
            pytest.skip(f"NCCL does not support two processes on one GPU: {message}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("device", "accumulate"),
    [
        ("cpu", 1),
        pytest.param("cuda", 1, marks=CUDA_MARKS),
        pytest.param("cuda", 2, marks=CUDA_MARKS),
    ],
)
def test_two_processes_train_like_one(tmp_path, device, accumulate):
    if device == "cuda" and torch.cuda.device_count() == 1:
        device = "cuda:0"
    runs = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        start(folder, processes, *TRAIN, f"device={device}", f"train.accumulate={accumulate}")
        runs.append(folder / "outputs" / "digits")

    states = [read_torch(run / "checkpoints" / "last.pt")["model"] for run in runs]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)
    if accumulate == 1:
        for one, two in zip(*map(numbers, runs), strict=True):
            assert one == pytest.approx(two, rel=1e-2)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu")] + [pytest.param(name, "cuda", marks=CUDA_MARKS) for name in BACKENDS],
)
def test_sync_batch_norm_uses_whole_batch(tmp_path, backend, device):
    file = tmp_path / "results.pt"
    start(tmp_path / "run", 2, synchronized.__file__, backend, device, str(file))
    for found, expected in zip(read_torch(file), synchronized.reference(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
