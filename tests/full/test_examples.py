"""The programs in examples/ run as processes."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn

from mldec.heads import MLDecoder

TOP = Path(__file__).parents[2]
EXAMPLES = TOP / "examples"
BILINEAR = Image.Resampling.BILINEAR


def run(*words):
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_minimal_training_saves_the_weights_of_its_best_map(here):
    run(TOP / "scripts/make_digits.py", "--layout", "csv", "own", "--train", 96, "--val", 64)
    words = ["--data", "own/data.csv", "--backbone", "test_resnet", "--no-pretrained"]
    words += ["--image-size", 64, "--batch-size", 16, "--epochs", 3, "--lr", 1e-3]
    words += ["--ema-decay", 0.8, "--workers", 1]
    out = run(EXAMPLES / "train_minimal.py", *words)
    epochs = re.findall(r"^epoch ./3 loss (\S+) val mAP ema (\S+) raw (\S+)$", out, re.MULTILINE)
    assert len(epochs) == 3
    assert float(epochs[0][0]) > float(epochs[2][0])

    # Compute the mAP of the saved weights without mldec's evaluator and torchvision's transforms.
    saved = torch.load("minimal.pt", weights_only=True)
    model = nn.Module()
    model.backbone = timm.create_model("test_resnet", num_classes=0)
    model.head = MLDecoder(model.backbone.num_features, 10)
    model.load_state_dict(saved["model"])
    model.eval()

    images = []
    targets = []
    with Path("own/data.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["split"] == "val":
                image = Image.open(Path("own", row["path"])).resize((64, 64), BILINEAR)
                images.append(np.asarray(image, dtype=np.float32) / 255)
                targets.append([name in row["labels"].split(";") for name in saved["classes"]])
    cfg = model.backbone.pretrained_cfg
    pixels = (np.stack(images) - np.array(cfg["mean"])) / np.array(cfg["std"])
    with torch.no_grad():
        batch = torch.from_numpy(pixels).float().permute(0, 3, 1, 2)
        logits = model.head(model.backbone.forward_features(batch))
    score = 100 * average_precision_score(np.array(targets), logits, average="macro")
    printed = [float(value) for _, *scores in epochs for value in scores]
    assert score == pytest.approx(max(printed), abs=1e-3)
