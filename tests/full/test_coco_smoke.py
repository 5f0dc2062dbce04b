"""The smoke run on image files: train, then evaluate on the training images themselves."""

import json
from pathlib import Path

from support import one_line, write_coco

from mldec.checkpoint import loading

LAST = Path("outputs/coco_smoke/checkpoints/last.pt")


def test_a_small_tree_is_learnt_by_heart(cli, here):
    write_coco(here / "coco", classes=3, images=18)
    words = ["+experiment=coco_smoke", "data.root=coco", "data.cache_dir=cache", "device=cpu"]
    words += ["data.image_size=64", "train.epochs=25", "train.batch_size=6", "train.eval_every=25"]
    cli.out("train", *words, "train.workers=1")
    cli.out("evaluate", LAST, "data.val=train2014", "--json", "results.json")
    report = json.loads(Path("results.json").read_text())
    assert report["images"] == 18
    assert list(report["per_class"]) == ["thing 0", "thing 1", "thing 2"]
    assert report["metrics"]["mAP"] > 95


def test_an_image_that_breaks_in_training_is_one_line_and_the_checkpoint_stays(cli, here):
    root = here / "coco"
    write_coco(root, classes=3, images=12)
    words = ["+experiment=coco_smoke", "data.root=coco", "data.cache_dir=cache", "device=cpu"]
    words += ["data.image_size=64", "train.batch_size=6", "train.epochs=1", "train.workers=1"]
    assert cli("train", *words).status == 0
    before = loading.load(LAST).step

    broken = root / "train2014" / "COCO_train2014_000000000004.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:200])
    words += ["resume=auto", "train.epochs=2"]
    one_line(cli.fault("train", *words), broken.name)
    assert loading.load(LAST).step >= before

    broken.write_bytes(whole)
    assert cli("train", *words).status == 0
