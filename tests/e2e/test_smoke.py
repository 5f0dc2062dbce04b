"""The smoke run on image files: train, then evaluate on the training images themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import write_coco

from mldec import checkpoint


def own_map(folder: Path, root: Path, *words: str) -> dict:
    """Train on a COCO tree and return the report of an evaluation on its training images."""
    settings = [
        f"data.root={root}",
        f"data.cache_dir={folder / 'cache'}",
        "train.workers=1",
        "device=cpu",
    ]
    train = [sys.executable, "-m", "mldec.train", "+experiment=coco_smoke", *settings, *words]
    done = subprocess.run(train, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = "outputs/coco_smoke/checkpoints/last.pt"
    evaluate = [
        sys.executable,
        "-m",
        "mldec.evaluate",
        last,
        "data.val=train2014",
        "--json",
        "results.json",
    ]
    done = subprocess.run(evaluate, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def test_a_small_tree_is_learnt_by_heart(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco", classes=3, images=18)
    words = ["data.image_size=64", "train.epochs=25", "train.batch_size=6", "train.eval_every=25"]
    report = own_map(tmp_path, tmp_path / "coco", *words)
    assert report["images"] == 18
    assert list(report["per_class"]) == ["thing 0", "thing 1", "thing 2"]
    assert report["metrics"]["mAP"] > 95


@pytest.mark.slow
def test_real_photos_are_learnt_by_heart(tmp_path: Path, sample_data: Path) -> None:
    report = own_map(tmp_path, sample_data / "coco2014_mini")
    assert report["images"] == 59
    assert report["metrics"]["mAP"] >= 95


def test_an_image_that_breaks_in_training_is_one_line_and_the_checkpoint_stays(
    tmp_path: Path,
) -> None:
    root = tmp_path / "coco"
    write_coco(root, classes=3, images=12)
    settings = [
        "+experiment=coco_smoke",
        "data.root=coco",
        "data.cache_dir=cache",
        "data.image_size=64",
        "device=cpu",
    ]
    settings += ["train.batch_size=6", "train.epochs=1", "train.workers=1"]
    command = [sys.executable, "-m", "mldec.train", *settings]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    last = tmp_path / "outputs/coco_smoke/checkpoints/last.pt"
    before = checkpoint.load(last).step
    broken = root / "train2014" / "COCO_train2014_000000000004.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:200])
    command += ["resume=auto", "train.epochs=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("mldec: ")
    assert str(broken.name) in lines[0]
    assert checkpoint.load(last).step >= before
    broken.write_bytes(whole)
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
