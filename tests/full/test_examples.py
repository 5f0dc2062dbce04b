"""The programs in examples/ run as processes."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import timm
import torch
import yaml
from pictures import picture
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn

from mldec.data.readers import csv_table
from mldec.heads import MLDecoder

TOP = Path(__file__).parents[2]
EXAMPLES = TOP / "examples"
BILINEAR = Image.Resampling.BILINEAR


def run(*words, job=forked.script, status=0):
    done = forked.run(job, *map(str, words))
    assert done.status == status, done.out + done.err
    return done.out + done.err


def run_plugin(*words, status=0):
    """Run a command of mldec. It can import the plugin from the folder `site`."""
    return run(*words, job=command_of_plugin, status=status)


def command_of_plugin(*words):
    sys.path.insert(0, str(Path("site").absolute()))
    forked.mldec_command(*words)


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


@pytest.fixture
def plugin(here):
    """The plugin, installed in the folder `site`, and its data set."""
    # The build leaves files next to the sources.
    shutil.copytree(EXAMPLES / "plugin", "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", "site"]
    pip = [sys.executable, "-m", "pip", "install", "-q", *options, "./source"]
    subprocess.run(pip, check=True)

    run(TOP / "scripts/make_digits.py", "--layout", "csv", "digits", "--train", 96, "--val", 32)
    readme = (EXAMPLES / "plugin" / "README.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    Path("program.py").write_text(program)
    run("program.py")


def test_plugin_trains_all_four_parts(plugin):
    search = "hydra.searchpath=[pkg://mldec_plugin.configs]"
    words = [search, "+experiment=sidecars", "data.root=sidecars", "device=cpu", "train.workers=0"]
    run_plugin("train", *words, "train.epochs=2", "backbone.width=24")
    folder = Path("outputs/sidecars")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    targets = {part: config[part]["_target_"] for part in ("data", "backbone", "head", "loss")}
    assert targets == {
        "data": "mldec_plugin.sidecars",
        "backbone": "mldec_plugin.ConvNet",
        "head": "mldec_plugin.SmoothMax",
        "loss": "mldec_plugin.SquaredHinge",
    }

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    losses = [row["train/loss"] for row in values if "train/loss" in row]
    assert losses[-1] < losses[0]

    # A checkpoint must not import the plugin by itself.
    image = "sidecars/val/000096.jpg"
    predict = ["predict", folder, image, "--jsonl", "answers.jsonl"]
    assert "mldec_plugin" in run_plugin(*predict, status=1)
    run_plugin(*predict, "--plugin", "mldec_plugin", "--device", "cpu")
    [line] = Path("answers.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["image"] == image

    broken = run_plugin("train", *words, "head.sharpness=0", "name=broken", status=1)
    assert broken.splitlines()[-1].startswith("mldec: head.sharpness")


@pytest.mark.parametrize("kind", ["numbers", "names"])
def test_export_writes_a_hugging_face_dataset_as_csv(here, monkeypatch, kind):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(here / "hf"))

    labels = datasets.Value("string")
    if kind == "numbers":
        labels = datasets.ClassLabel(names=["cat", "dog; big"])
    features = {"image": datasets.Image(), "labels": datasets.List(labels)}
    contents = {}
    for split in ("train", "validation"):
        rows = {"image": [], "labels": [["cat", "dog; big"], ["dog; big"], []]}
        for number in range(3):
            path = f"{split}{number}.png"
            picture(20, 30, seed=len(contents)).save(path)
            contents[path] = Path(path).read_bytes()
            rows["image"].append({"bytes": contents[path], "path": path})
        if kind == "numbers":
            rows["labels"] = [[0, 1], [1], []]
        table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
        table.to_parquet(f"source/{split}-00000-of-00001.parquet")
    run(EXAMPLES / "hf_dataset.py", "export", "source", "own")

    source = csv_table(root="own")
    for name, split in (("train", "train"), ("validation", "val")):
        images = source.load(split, None)
        assert images.classes == ("cat", "dog; big")
        assert images.labels.dense().tolist() == [[1, 1], [0, 1], [0, 0]]
        exported = [Path(images.name(index)).read_bytes() for index in range(3)]
        assert exported == [contents[f"{name}{index}.png"] for index in range(3)]
