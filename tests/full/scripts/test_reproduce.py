"""The rows of scripts/reproduce compose, and run.py trains, resumes and reports them."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from mldec.config.compose import to_yaml

TOP = Path(__file__).parents[3]
FOLDER = TOP / "scripts" / "reproduce"


def load(name):
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


rows, costs, run = load("rows"), load("costs"), load("run")
RUNS = {row.run: row for _, table in rows.TABLES.values() for row in table}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_composes(name):
    config = costs.composed((*RUNS[name].settings, f"name={name}"))
    assert costs.dataset(config) is not None


def test_rows_have_consistent_settings_and_sections():
    for _, table in rows.TABLES.values():
        for row in table:
            assert row.settings == RUNS[row.run].settings
            assert not row.runs or row.paper or "not found" in row.note
    text = "".join(path.read_text() for path in TOP.glob("DATASETS*.md"))
    for data in costs.DATASETS.values():
        assert re.search(rf"^## {re.escape(data.section)}\b", text, re.MULTILINE), data.section


@pytest.fixture
def reproduce(monkeypatch, capsys, here):
    monkeypatch.delenv("MLDEC_DATA", raising=False)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["run.py", *args])
        status = 0
        try:
            run.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        return (status, *capsys.readouterr())

    return call


def test_unfinished_runs_are_trained_and_reported(reproduce, tmp_path, monkeypatch):
    settings = ["+experiment=digits", "head=gap", "data.image_size=16", "train.workers=0"]
    settings += ["data.train_images=32", "data.val_images=32"]
    row = rows.Row("tiny", "GAP", settings, {"mAP": 50.0, "CF1": 40.0}, "made up")
    monkeypatch.setitem(run.TABLES, "table1", ("Tiny", [row]))
    status, out, err = reproduce("table1", "--gpus", "0", "train.epochs=1")
    assert status == 0, err
    checkpoint = tmp_path / "outputs" / "tiny" / "checkpoints" / "best.pt"
    metrics = torch.load(checkpoint, weights_only=True)["metrics"]
    lines = [line.split(" | ") for line in out.splitlines() if line.startswith("| GAP")]
    assert [line[1:3] for line in lines] == [["mAP", "50.0"], ["CF1", "40.0"]]
    assert float(lines[0][3]) in {round(metrics[f"{key}/mAP"], 2) for key in ("val", "val_raw")}
    assert lines[0][4] == "1"

    # A finished run is not trained again.
    written = checkpoint.stat().st_mtime_ns
    assert reproduce("table1", "--gpus", "0", "train.epochs=1")[0] == 0
    assert checkpoint.stat().st_mtime_ns == written
    assert "resume=auto" in run.command(row, 0, 0, ["train.epochs=1"])


@pytest.mark.parametrize(
    ("setting", "is_same"),
    [("train.workers=1", True), ("train.epochs=3", False), ("init=other.pt", False)],
)
def test_only_a_run_with_the_settings_of_a_row_is_resumed(here, setting, is_same):
    tiny = rows.Row("tiny", "GAP", ["+experiment=digits", "head=gap"], {"mAP": 50.0})
    checkpoints = here / "outputs" / "tiny" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.pt").touch()
    config = costs.composed((*tiny.settings, "seed=0", setting))
    (checkpoints.parent / "config.yaml").write_text(to_yaml(config))

    name, messages = run.folder_name(tiny, 0, [])
    assert name == ("tiny" if is_same else "tiny_2")
    assert setting.partition("=")[0] in (messages[0] if messages else "train.workers")
    words = run.command(tiny, 0, 0, [])
    assert f"name={name}" in words
    assert ("resume=auto" in words) is is_same
    assert run.result(tiny, 0, []) is None


def test_gpu_hours_follow_from_the_published_cost():
    hours = costs.gpu_hours(("+experiment=coco_tresnet_l",))
    by_hand = 82_081 * 40 * 36.2e9 * 2 * 3 / costs.SUSTAINED / 3600
    assert hours == pytest.approx(by_hand, rel=0.01)
    assert costs.gpu_hours(("+experiment=digits",)) is None


@pytest.mark.parametrize("row", rows.TABLES["recipes"][1], ids=lambda row: row.run)
def test_headers_of_recipes_have_the_estimated_cost(row):
    experiment = row.settings[0].removeprefix("+experiment=")
    header = (TOP / "configs" / "experiment" / f"{experiment}.yaml").read_text()
    stated = [float(hours) for hours in re.findall(r"([\d.]+)(?: H100 hours| at 644)", header)]
    expected = stated[0 if row.run == experiment else -1]  # variants come last
    sustained = costs.h100(tuple(row.settings))
    assert costs.gpu_hours(tuple(row.settings), sustained) == pytest.approx(expected, abs=0.05)
    assert f"{round(sustained / 1e12)} TFLOP/s" in header
    assert "# Measured: no." in header
    assert "License: " in header
