"""Tests that need a CUDA device: run with `pytest -m gpu`; skipped where there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import QUICK

from mldec.checkpoint import load_model
from mldec.files.torch_files import read_torch
from mldec.heads.ml_decoder import MLDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

# The real network of the digits experiment, on few scenes: batch norm, dropout and a
# convolutional backbone.
SHORT = [
    "+experiment=digits",
    "data.train_images=512",
    "data.val_images=256",
    "train.epochs=2",
    "device=cuda",
]


def train(folder: Path, *words: str) -> Path:
    """Train in a process of its own and return the folder of the run."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mldec.train", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs" / "digits"


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_every_precision_trains(tmp_path: Path, precision: str, compiled: str) -> None:
    run = train(
        tmp_path,
        *SHORT,
        f"train.precision={precision}",
        f"train.compile={compiled}",
        "train.log_every=2",
    )
    found = losses(run)
    assert found[-1] < found[0]
    state = read_torch(run / "checkpoints" / "last.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_the_device_does_not_change_the_numbers(tmp_path: Path) -> None:
    run = train(tmp_path, *QUICK[:-1], "device=cuda")
    best = run / "checkpoints" / "best.pt"
    images = torch.randint(256, (8, 3, 64, 64), dtype=torch.uint8)
    outputs = []
    for device in ("cpu", "cuda"):
        model = load_model(best, plugins=["patches"], device=device).model
        with torch.no_grad():
            outputs.append(model(images.to(device)).cpu())
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("classes", [80, 9605])
def test_the_head_gives_the_same_logits_and_gradients_on_the_device(classes: int) -> None:
    torch.manual_seed(0)
    head = MLDecoder(256, classes, num_groups=200, dropout=0.0)
    tokens = torch.randn(2, 49, 256)
    found = []
    for device in ("cpu", "cuda"):
        head.to(device).zero_grad()
        logits = head(tokens.to(device))
        logits.sum().backward()
        found.append((logits.cpu(), head.pool_weight.grad.cpu()))
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-3)


def test_logits_of_a_half_precision_run_do_not_tie() -> None:
    torch.manual_seed(0)
    head = MLDecoder(256, 80).cuda().eval()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        logits = head(torch.randn(512, 49, 256, device="cuda"))
    assert logits.dtype == torch.float32
    assert len(logits[:, 0].unique()) > 500
