"""Digits in each on-disk layout: check_data, training and evaluation."""

import json
import runpy
import sys
from pathlib import Path

import patches
import pytest
from support import QUICK, assert_equal

from mldec.files.torch_files import read_torch
from mldec.losses.partial import read_prior

SCRIPTS = Path(__file__).parents[2] / "scripts"
DATA = {
    "coco": "coco",
    "voc": "voc2007",
    "openimages": "openimages_miil",
    "imagenet": "imagenet",
    "csv": "csv",
    "yolo": "yolo",
}
# First metric; otherwise mAP.
FIRST = {"openimages": "mAP_partial", "imagenet": "top1"}
FIRST |= dict.fromkeys(("csv", "yolo"), "mAP_skip_empty")
# One layer, one epoch.
TINY = [word for word in QUICK if not word.startswith(("+experiment", "data.", "train.log"))]
TINY += ["data.image_size=32", "train.epochs=1"]
PLUGIN = ["--plugin", "patches"]


def script(monkeypatch, name, *words):
    """Run a script in this process."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


@pytest.fixture
def tree(here, monkeypatch):
    """Return a function that writes a layout. The cache is in a temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))

    def write(layout):
        words = ["--layout", layout, "--train", "48", "--val", "24", "--size", "32"]
        script(monkeypatch, "make_digits", *words, here / layout)
        return here / layout

    return write


def report(cli, checkpoint, *words):
    cli.out("evaluate", checkpoint, *PLUGIN, *words, "--json", "report.json")
    return json.loads(Path("report.json").read_text())


@pytest.mark.parametrize("layout", DATA)
def test_layout_is_checked_trained_and_evaluated(cli, tree, layout):
    root, name = tree(layout), f"digits_{layout}"
    words = ["data.class_map=folders"] if layout == "imagenet" else []
    words += [f"data={DATA[layout]}", f"data.root={root}", "train.workers=0"]
    status, out, err = cli("check_data", *words)
    assert status == 0, err + out
    # The reader of MS-COCO omits scenes without a digit.
    train, val = (47, 23) if layout == "coco" else (48, 24)
    assert f"train: {train} " in out
    assert f"val: {val} " in out
    cli.out("train", f"+experiment={name}", f"data.root={root}", *TINY)
    last = json.loads(Path("outputs", name, "metrics.jsonl").read_text().splitlines()[-1])
    found = report(cli, Path("outputs", name, "checkpoints", "best.pt"))
    metric = FIRST.get(layout, "mAP")
    assert next(iter(found["metrics"])) == metric
    best = max(last[f"val/{metric}"], last[f"val_raw/{metric}"])
    assert found["metrics"][metric] == pytest.approx(best, abs=1e-9)
    assert found["images"] == val


def test_estimated_priors_survive_a_stop(cli, tree, monkeypatch):
    root = tree("openimages")
    words = ["+experiment=digits_openimages", f"data.root={root}", *TINY]
    words += ["loss=partial_selective_one_run", "train.epochs=2"]
    assert cli("train", *words, "name=whole")[0] == 0
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", "SIGTERM:2")
    status, _, err = cli("train", *words, "name=stopped")
    assert status == 143, err
    monkeypatch.delenv("PATCHES_SIGNAL")
    assert not Path("outputs/stopped/class_prior.csv").exists()
    out = cli.out("train", *words, "name=stopped", "resume=auto")
    assert "outputs/stopped/class_prior.csv" in out
    whole, stopped = (Path("outputs", name) for name in ("whole", "stopped"))
    assert (whole / "class_prior.csv").read_bytes() == (stopped / "class_prior.csv").read_bytes()
    assert_equal(
        *(read_torch(run / "checkpoints" / "last.pt")["model"] for run in (whole, stopped))
    )
    assert all(0 < prior < 1 for prior in read_prior(whole / "class_prior.csv"))
    second = ["name=second", "loss=partial_selective", f"loss.class_prior={whole}/class_prior.csv"]
    cli.out("train", *words, *second)
    assert not Path("outputs/second/class_prior.csv").exists()
