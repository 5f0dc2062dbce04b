"""The experiment coco_smoke fits its training images."""

import json
from pathlib import Path

from support import write_coco


def test_model_fits_training_images(cli, here):
    write_coco(here / "coco", classes=3, images=18)
    words = ["+experiment=coco_smoke", "data.root=coco", "data.cache_dir=cache", "device=cpu"]
    words += ["data.image_size=64", "train.epochs=25", "train.batch_size=6", "train.eval_every=25"]
    cli.out("train", *words, "train.workers=1")

    last = "outputs/coco_smoke/checkpoints/last.pt"
    cli.out("evaluate", last, "data.val=train2014", "--json", "results.json")
    report = json.loads(Path("results.json").read_text())
    assert report["images"] == 18
    assert list(report["per_class"]) == ["thing 0", "thing 1", "thing 2"]
    assert report["metrics"]["mAP"] > 95
