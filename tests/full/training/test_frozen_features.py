"""Runs on cached tokens."""

import json
import shutil
import time
from pathlib import Path

import patches
import pytest
import torch
from photos import write_photos
from pictures import picture
from support import QUICK, assert_equal

from mldec.tools.report.examples import HEAT_BATCH
from mldec.tools.summary import find_runs

CACHED = ["train.freeze=[backbone]", "train.cache_features=true"]
WORDS = [word for word in QUICK if not word.startswith("data.")]
WORDS += ["data=csv", "data.root=own", "data.cache_dir=cache", "data.augment=none"]
WORDS += ["data.cutout=0", "data.image_size=32", "train.batch_size=8", "train.epochs=3"]
WORDS += ["train.ema_decay=null", "train.channels_last=false", "optim.name=adamw", "optim.lr=2e-3"]
# auto depends on the processor.
WORDS += ["train.precision=fp32"]


@pytest.fixture
def train(cli, here):
    """Return a function that trains on 24 images, and returns the checkpoint."""
    write_photos(Path("own"))

    def run(name, *words):
        cli.out("train", *WORDS, f"name={name}", *words)
        return torch.load(Path("outputs", name, "checkpoints", "last.pt"), weights_only=True)

    return run


def test_run_on_tokens_equals_run_of_frozen_backbone(train, cli):
    with_cache, without = train("cached", *CACHED), train("frozen", CACHED[0])
    lines = Path("outputs/cached/train.log").read_text().splitlines()
    assert any("tokens of 0 of 16 training images are cached" in line for line in lines)
    assert with_cache["model"].keys() == without["model"].keys()
    for key, value in without["model"].items():
        # Tokens are computed in other batches. Where gradients are near 0, AdamW amplifies their
        # rounding, which depends on the processor and the number of threads.
        torch.testing.assert_close(with_cache["model"][key], value, atol=1e-3, rtol=1e-3)
    assert with_cache["metrics"] == pytest.approx(without["metrics"], abs=0.5)

    # The checkpoint holds the whole network, and needs no tokens.
    shutil.rmtree("cache")
    out = cli.out("evaluate", "outputs/cached/checkpoints/last.pt", "--plugin", "patches")
    assert f"{with_cache['metrics']['val/mAP']:.3f}" in out


def test_commands_use_cached_tokens(train, cli, monkeypatch):
    with Path("own", "data.csv").open("a") as table:
        for number in range(24, 30):
            picture(seed=number).save(f"own/{number}.png")
            table.write(f"{number}.png,cat,test\n")
    train("cached", *CACHED)
    run = ["outputs/cached", "--plugin=patches"]
    best = ["outputs/cached/checkpoints/best.pt", "--plugin=patches"]

    def metrics(*words):
        cli.out("evaluate", *best, "--json=metrics.json", *words)
        return json.loads(Path("metrics.json").read_text())["metrics"]

    expected = metrics("train.cache_features=false")
    other = metrics("train.cache_features=false", "data.val=test")
    files = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*.npy")}
    assert len(files) == 24

    def not_called(self, images):
        raise AssertionError("the network runs again")

    def few_images(self, images):
        assert len(images) <= HEAT_BATCH
        return forward(self, images)

    forward = patches.Patches.forward
    monkeypatch.setattr(patches.Patches, "forward", not_called)
    assert metrics() == expected
    cli.out("calibrate", *run)
    # Heat maps run the network on a few images.
    monkeypatch.setattr(patches.Patches, "forward", few_images)
    cli.out("report", *run, f"--compare={best[0]}", "--out=report.html")
    assert all(path.stat().st_mtime_ns == files[path] for path in Path("cache").rglob("*.npy"))

    # Tokens of another split and of another precision are added.
    monkeypatch.setattr(patches.Patches, "forward", forward)
    assert metrics("data.val=test") == other
    assert len(list(Path("cache").rglob("*.npy"))) == 30
    cli.out("evaluate", *best, "train.precision=bf16")
    assert len(list(Path("cache").rglob("*.npy"))) == 38

    shutil.rmtree("cache")
    assert metrics() == expected


def test_run_time_includes_tokens(train, monkeypatch):
    forward = patches.Patches.forward

    def slow(self, images):
        time.sleep(2)
        return forward(self, images)

    # Two batches: training images and validation images.
    monkeypatch.setattr(patches.Patches, "forward", slow)
    train("slow", *CACHED)
    [run] = find_runs(Path("outputs"))
    assert run.row["time"] >= "0:00:04"


def test_resumed_run_equals_uninterrupted_run(train):
    whole = train("whole", *CACHED)
    train("parts", *CACHED, "train.stop_epoch=1")
    # The tokens are computed again with the weights of the checkpoint.
    shutil.rmtree("cache")
    assert_equal(train("parts", *CACHED, "resume=auto")["model"], whole["model"])
