"""Digits in each on-disk form, all the way: written, checked, trained on, evaluated, and packed into shards.

The form "nuswide" is not here: its data are zero-shot, see tests/scripts/test_make_digits.py.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import CONFIGS

Cli = Callable[..., tuple[int, str, str]]
SCRIPTS = Path(__file__).parents[2] / "scripts"
DATA = {"coco": "coco", "voc": "voc2007", "openimages": "openimages_miil", "imagenet": "imagenet", "csv": "csv"}
FIRST = {"openimages": "mAP_partial", "imagenet": "top1"}  # the metric that "best" follows; else mAP
LOSS = {"openimages": "partial", "imagenet": "asl_single_label"}
# A network of one layer, for one epoch.
TINY = ["plugins=[patches]", "backbone=patches", f"--config-dir={CONFIGS}", "head.embed_dim=32", "head.mlp_dim=32"]
TINY += ["data.image_size=32", "train.epochs=1", "train.batch_size=16", "train.workers=0", "device=cpu"]
PLUGIN = ["--plugin", "patches"]


def script(monkeypatch: pytest.MonkeyPatch, name: str, *words: str | Path) -> None:
    """Run a script in this process."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a layout; the parsed labels go to a cache of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(layout: str) -> Path:
        words = ["--layout", layout, "--train", "48", "--val", "24", "--size", "32"]
        script(monkeypatch, "make_digits", *words, tmp_path / layout)
        return tmp_path / layout

    return write


def report(cli: Cli, checkpoint: Path, *words: str | Path) -> dict:
    status, _, err = cli("evaluate", checkpoint, *PLUGIN, *words, "--json", "report.json")
    assert status == 0, err
    return json.loads(Path("report.json").read_text())


@pytest.mark.parametrize("layout", DATA)
def test_a_layout_is_checked_trained_on_and_evaluated(cli: Cli, tree: Callable[[str], Path], layout: str) -> None:
    root, name = tree(layout), f"digits_{layout}"
    words = [f"data.{key}=folders" for key in ["class_map"] if layout == "imagenet"]
    status, out, err = cli("check_data", f"data={DATA[layout]}", f"data.root={root}", "train.workers=0", *words)
    assert status == 0, err + out
    train, val = (47, 23) if layout == "coco" else (48, 24)  # its reader leaves out scenes without a digit
    assert f"train: {train} " in out
    assert f"val: {val} " in out
    status, _, err = cli("train", f"+experiment={name}", f"data.root={root}", *TINY)
    assert status == 0, err
    lines = [json.loads(line) for line in Path("outputs", name, "metrics.jsonl").read_text().splitlines()]
    found = report(cli, Path("outputs", name, "checkpoints", "best.pt"))
    metric = FIRST.get(layout, "mAP")
    assert next(iter(found["metrics"])) == metric
    best = max(lines[-1][f"val/{metric}"], lines[-1][f"val_raw/{metric}"])
    assert found["metrics"][metric] == pytest.approx(best, abs=1e-9)
    assert found["images"] == val


@pytest.mark.parametrize("layout", ["coco", "openimages", "imagenet"])
def test_shards_give_the_metrics_of_the_files(
    cli: Cli, tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    root = tree(layout)
    words = [f"data.{key}=folders" for key in ["class_map"] if layout == "imagenet"]
    packing = [f"data={DATA[layout]}", f"data.root={root}", *words, "--images", "20", "--workers", "0"]
    script(monkeypatch, "pack_shards", "shards", *packing)
    shared = ["+experiment=digits", *TINY, "data.augment=none", "data.cutout=0", f"loss={LOSS.get(layout, 'asl')}"]
    if layout == "imagenet":
        shared += ["data.flip=true", "data.crop=0.5", "data.test_crop=0.9", "data.interpolation=random"]
    settings = {
        "files": [f"data={DATA[layout]}", f"data.root={root}", *words],
        "shards": ["data=shards", "data.root=shards"],
    }
    reports = {}
    for name, data in settings.items():
        status, _, err = cli("train", *shared, *data, f"name={name}")
        assert status == 0, err
        reports[name] = report(cli, Path("outputs", name, "checkpoints", "last.pt"), "--weights", "raw")
    assert reports["files"]["metrics"] == reports["shards"]["metrics"]
    assert reports["files"]["per_class"] == reports["shards"]["per_class"]
