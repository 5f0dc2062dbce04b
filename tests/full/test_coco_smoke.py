"""The smoke run on image files: train, then evaluate on the training images themselves."""

import json
from pathlib import Path

import pytest
from support import one_line, write_coco

from mldec import checkpoint

LAST = Path("outputs/coco_smoke/checkpoints/last.pt")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_map(cli, root, *words):
    """Train on a COCO tree and return the report of an evaluation on its training images."""
    settings = [f"data.root={root}", "data.cache_dir=cache", "train.workers=1", "device=cpu"]
    cli.out("train", "+experiment=coco_smoke", *settings, *words)
    cli.out("evaluate", LAST, "data.val=train2014", "--json", "results.json")
    return json.loads(Path("results.json").read_text())


def test_a_small_tree_is_learnt_by_heart(cli, folder):
    write_coco(folder / "coco", classes=3, images=18)
    words = ["data.image_size=64", "train.epochs=25", "train.batch_size=6", "train.eval_every=25"]
    report = own_map(cli, folder / "coco", *words)
    assert report["images"] == 18
    assert list(report["per_class"]) == ["thing 0", "thing 1", "thing 2"]
    assert report["metrics"]["mAP"] > 95


def test_an_image_that_breaks_in_training_is_one_line_and_the_checkpoint_stays(cli, folder):
    root = folder / "coco"
    write_coco(root, classes=3, images=12)
    words = ["+experiment=coco_smoke", "data.root=coco", "data.cache_dir=cache", "device=cpu"]
    words += ["data.image_size=64", "train.batch_size=6", "train.epochs=1", "train.workers=1"]
    assert cli("train", *words).status == 0
    before = checkpoint.load(LAST).step

    broken = root / "train2014" / "COCO_train2014_000000000004.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:200])
    words += ["resume=auto", "train.epochs=2"]
    status, _, err = cli("train", *words)
    assert status == 1
    one_line(err, broken.name)
    assert checkpoint.load(LAST).step >= before

    broken.write_bytes(whole)
    assert cli("train", *words).status == 0
