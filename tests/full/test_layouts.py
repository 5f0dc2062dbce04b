"""Digits in each on-disk form: written, checked, trained on, evaluated, and packed into shards.

The form "nuswide" is not here: its data are zero-shot, see tests/full/scripts/test_make_digits.py.
"""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import patches
import pytest
from support import CONFIGS, assert_equal, one_line

from mldec.files.torch_files import read_torch
from mldec.losses.partial import read_prior

Cli = Callable[..., tuple[int, str, str]]
SCRIPTS = Path(__file__).parents[2] / "scripts"
DATA = {
    "coco": "coco",
    "voc": "voc2007",
    "openimages": "openimages_miil",
    "imagenet": "imagenet",
    "csv": "csv",
}
FIRST = {
    "openimages": "mAP_partial",
    "imagenet": "top1",
}  # the metric that "best" follows; else mAP
LOSS = {"openimages": "partial", "imagenet": "asl_single_label"}
# A network of one layer, for one epoch.
TINY = [
    "plugins=[patches]",
    "backbone=patches",
    f"--config-dir={CONFIGS}",
    "head.embed_dim=32",
    "head.mlp_dim=32",
]
TINY += [
    "data.image_size=32",
    "train.epochs=1",
    "train.batch_size=16",
    "train.workers=0",
    "device=cpu",
]
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
def test_a_layout_is_checked_trained_on_and_evaluated(
    cli: Cli, tree: Callable[[str], Path], layout: str
) -> None:
    root, name = tree(layout), f"digits_{layout}"
    words = [f"data.{key}=folders" for key in ["class_map"] if layout == "imagenet"]
    status, out, err = cli(
        "check_data", f"data={DATA[layout]}", f"data.root={root}", "train.workers=0", *words
    )
    assert status == 0, err + out
    train, val = (
        (47, 23) if layout == "coco" else (48, 24)
    )  # its reader leaves out scenes without a digit
    assert f"train: {train} " in out
    assert f"val: {val} " in out
    status, _, err = cli("train", f"+experiment={name}", f"data.root={root}", *TINY)
    assert status == 0, err
    lines = [
        json.loads(line) for line in Path("outputs", name, "metrics.jsonl").read_text().splitlines()
    ]
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
    packing = [
        f"data={DATA[layout]}",
        f"data.root={root}",
        *words,
        "--images",
        "20",
        "--workers",
        "0",
    ]
    script(monkeypatch, "pack_shards", "shards", *packing)
    shared = [
        "+experiment=digits",
        *TINY,
        "data.augment=none",
        "data.cutout=0",
        f"loss={LOSS.get(layout, 'asl')}",
    ]
    if layout == "imagenet":
        shared += [
            "data.flip=true",
            "data.crop=0.5",
            "data.test_crop=0.9",
            "data.interpolation=random",
        ]
    settings = {
        "files": [f"data={DATA[layout]}", f"data.root={root}", *words],
        "shards": ["data=shards", "data.root=shards"],
    }
    reports = {}
    for name, data in settings.items():
        status, _, err = cli("train", *shared, *data, f"name={name}")
        assert status == 0, err
        reports[name] = report(
            cli, Path("outputs", name, "checkpoints", "last.pt"), "--weights", "raw"
        )
    assert reports["files"]["metrics"] == reports["shards"]["metrics"]
    assert reports["files"]["per_class"] == reports["shards"]["per_class"]


def test_estimated_priors_are_kept_over_a_stop_and_written_at_the_end(
    cli: Cli, tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("openimages")
    words = [
        "+experiment=digits_openimages",
        f"data.root={root}",
        *TINY,
        "loss=partial_selective_one_run",
        "train.epochs=2",
    ]
    assert cli("train", *words, "name=whole")[0] == 0
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", "SIGTERM:2")
    status, _, err = cli("train", *words, "name=stopped")
    assert status == 143, err
    monkeypatch.delenv("PATCHES_SIGNAL")
    assert not Path("outputs/stopped/class_prior.csv").exists()
    status, out, err = cli("train", *words, "name=stopped", "resume=auto")
    assert status == 0, err
    assert "outputs/stopped/class_prior.csv" in out
    whole, stopped = (Path("outputs", name) for name in ("whole", "stopped"))
    assert (whole / "class_prior.csv").read_bytes() == (stopped / "class_prior.csv").read_bytes()
    assert_equal(
        *(read_torch(run / "checkpoints" / "last.pt")["model"] for run in (whole, stopped))
    )
    assert all(0 < prior < 1 for prior in read_prior(whole / "class_prior.csv"))
    status, _, err = cli(
        "train",
        *words,
        "name=second",
        "loss=partial_selective",
        f"loss.class_prior={whole}/class_prior.csv",
    )
    assert status == 0, err
    assert not Path("outputs/second/class_prior.csv").exists()  # nothing was estimated


# Experiment -> layout of its data, and settings that fit the few images.
TWO_STEPS = {
    "coco_json_tresnet_l": ("coco", ["data.train=train2014", "data.val=val2014"]),
    "coco_partial_rps": ("coco", []),
    "coco_partial_fpc": ("coco", ["data.keep_per_class=3"]),
    "openimages_tresnet_m": ("openimages", ["head.num_groups=5"]),
    "voc2012_tresnet_l": ("voc", []),
}


@pytest.mark.parametrize("name", TWO_STEPS)
def test_an_experiment_trains_two_steps(cli: Cli, tree: Callable[[str], Path], name: str) -> None:
    layout, words = TWO_STEPS[name]
    root = tree(layout)
    if layout == "voc":
        lists = root / "VOCdevkit" / "VOC2007" / "ImageSets" / "Main"
        (lists / "trainval.txt").rename(lists / "train.txt")
        (lists / "test.txt").rename(lists / "val.txt")
        (root / "VOCdevkit" / "VOC2007").rename(root / "VOCdevkit" / "VOC2012")

    # The decoder of TINY is no setting of the GAP head.
    tiny = [word for word in TINY if not (word.startswith("head.") and "partial" in name)]
    words = [f"+experiment={name}", f"data.root={root}", *tiny, "train.batch_size=24", *words]
    status, _, err = cli("train", *words)
    assert status == 0, err
    state = read_torch(Path("outputs", name, "checkpoints", "last.pt"))
    assert (state["step"], state["epoch"]) == (2, 1)


def test_without_a_valid_class_a_run_ends_at_its_first_evaluation(
    cli: Cli, tree: Callable[[str], Path]
) -> None:
    root = tree("openimages")
    rows = (root / "data.csv").read_text().splitlines()
    mids = sorted({mid for row in rows for mid in re.findall(r"/m/\w+", row)})
    nothing = [f"{row.split(',')[0]},[],[],{row.rsplit(',')[-1]}" for row in rows[1:]]
    (root / "data.csv").write_text("\n".join([rows[0], *nothing]) + "\n")
    (root / "list.txt").write_text("\n".join(mids))
    words = [f"data.root={root}", "data.class_list=list.txt"]
    status, _, err = cli("train", "+experiment=digits_openimages", *words, *TINY)
    assert status == 1
    one_line(err, "mAP_partial does not exist: no class has both a positive and a negative")


def test_reports_call_counts_counts_and_name_confusions(
    cli: Cli, tree: Callable[[str], Path]
) -> None:
    for layout in ("openimages", "imagenet"):
        status, _, err = cli(
            "train", f"+experiment=digits_{layout}", f"data.root={tree(layout)}", *TINY
        )
        assert status == 0, err
    status, out, _ = cli("evaluate", "outputs/digits_openimages/checkpoints/best.pt", *PLUGIN)
    percent, _, counts = out.partition("number of classes:\n")
    assert "classes_" not in percent
    assert re.search(r"^  classes_valid +10$", counts, re.MULTILINE)
    found = report(cli, Path("outputs/digits_imagenet/checkpoints/best.pt"))
    wrong = sum(pair["images"] for pair in found["confusions"])
    assert wrong == round(24 * (1 - found["metrics"]["top1"] / 100))
    assert all(pair["label"] != pair["prediction"] for pair in found["confusions"])
    assert {pair["prediction"] for pair in found["confusions"]} <= found["per_class"].keys()
