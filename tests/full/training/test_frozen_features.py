"""Runs on cached tokens."""

import shutil
from pathlib import Path

import pytest
import torch
from photos import write_photos
from support import QUICK, assert_equal

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
        torch.testing.assert_close(with_cache["model"][key], value, atol=1e-5, rtol=1e-4)
    assert with_cache["metrics"] == pytest.approx(without["metrics"], abs=0.5)

    # The checkpoint holds the whole network, and needs no tokens.
    shutil.rmtree("cache")
    out = cli.out("evaluate", "outputs/cached/checkpoints/last.pt", "--plugin", "patches")
    assert f"{with_cache['metrics']['val/mAP']:.3f}" in out


def test_resumed_run_equals_uninterrupted_run(train):
    whole = train("whole", *CACHED)
    train("parts", *CACHED, "train.stop_epoch=1")
    # The tokens are computed again with the weights of the checkpoint.
    shutil.rmtree("cache")
    assert_equal(train("parts", *CACHED, "resume=auto")["model"], whole["model"])
