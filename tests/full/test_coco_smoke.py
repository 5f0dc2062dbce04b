"""The experiment coco_smoke, which trains and evaluates on image files."""

import json
from pathlib import Path

import pytest
from support import one_line, write_coco

from mldec.checkpoint import loading

LAST = Path("outputs/coco_smoke/checkpoints/last.pt")
TRAIN = ["+experiment=coco_smoke", "data.root=coco", "data.cache_dir=cache", "device=cpu"]
TRAIN += ["data.image_size=64", "train.batch_size=6", "train.workers=1"]
IMAGES = 18


@pytest.fixture
def root(here):
    write_coco(here / "coco", classes=3, images=IMAGES)
    return here / "coco"


def test_model_fits_training_images(cli, root):
    cli.out("train", *TRAIN, "train.epochs=25", "train.eval_every=25")
    cli.out("evaluate", LAST, "data.val=train2014", "--json", "results.json")
    report = json.loads(Path("results.json").read_text())
    assert report["images"] == IMAGES
    assert list(report["per_class"]) == ["thing 0", "thing 1", "thing 2"]
    assert report["metrics"]["mAP"] > 95


def test_damaged_image_keeps_checkpoint(cli, root):
    cli.out("train", *TRAIN, "train.epochs=1")
    step = loading.load(LAST).step

    damaged = root / "train2014" / "COCO_train2014_000000000004.jpg"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:200])
    resume = [*TRAIN, "resume=auto", "train.epochs=2"]
    one_line(cli.fault("train", *resume), damaged.name)
    assert loading.load(LAST).step >= step

    damaged.write_bytes(content)
    cli.out("train", *resume)
