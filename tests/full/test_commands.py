"""Commands of a user, with a short run of another process."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import QUICK, one_line

from mldec import build
from mldec.checkpoint import load_model, loading
from mldec.data.loader import labels_of
from mldec.files.torch_files import read_torch
from mldec.words.digits import NAMES


def test_files_of_a_run(digits_run):
    files = [path.relative_to(digits_run) for path in digits_run.rglob("*") if path.is_file()]
    names = {path.name for path in files if path.parent.name != "tensorboard"}
    checkpoints = ("last.pt", "last.1.pt", "best.pt")
    assert names == {
        *("config.yaml", "train.log", "metrics.jsonl", "run.json"),
        *(f"{name}{end}" for name in checkpoints for end in ("", ".sha256")),
    }
    assert len(files) == 11  # with one file of TensorBoard
    lines = [json.loads(line) for line in (digits_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4, 6, 8, 8]
    assert all(line.keys() >= {"step", "epoch", "time"} for line in lines)
    assert "val/mAP" in lines[-1]
    assert "val_raw/mAP" in lines[-1]


def test_sweep_and_evaluation_of_awkward_names(cli, here):
    folder = here / "Bilder (2019), R&D" / "${x}"
    for kind in ("Tür", "1.10"):
        (folder / kind).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (64, 64), (25 * number, 9, 9)).save(folder / kind / f"{number}.png")
    words = ["+experiment=digits_single", "data=folders", f"data.root='{folder}'", "device=cpu"]
    words += ["data.image_size=64", "train.epochs=1", "train.workers=0", "name=1.10,it's"]
    trained = cli("train", "-m", *words, "hydra.sweep.dir=sweep x")
    assert trained.status == 0, trained.err
    runs = sorted(path.name for path in Path("sweep x").iterdir() if path.is_dir())
    assert runs == ["1.10_0", "it's_1"]

    run = Path("sweep x", "it's_1")
    evaluated = cli("evaluate", run, f"data.root={folder}", "--json", "x.json")
    assert evaluated.status == 0, evaluated.err
    assert cli("evaluate", run).status == 0


def test_existing_run_is_not_overwritten(cli, digits_run, here):
    shutil.copytree(digits_run, "outputs/digits")
    last = Path("outputs/digits/checkpoints/last.pt")
    before = last.read_bytes()
    assert "resume=auto" in cli.fault("train", *QUICK)
    assert last.read_bytes() == before


def test_evaluate_gives_the_metrics_of_the_run(cli, best, tmp_path):
    words = ["--plugin", "patches", "--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv"]
    cli.out("evaluate", best, *words)
    found = json.loads((tmp_path / "r.json").read_text())
    state = read_torch(best)
    assert found["metrics"]["mAP"] == pytest.approx(state["best"]["value"], abs=1e-9)
    assert found["weights"] == state["best"]["weights"]
    assert found["images"] == 40
    assert found["checkpoint"] == str(best)
    assert {"mAP", "CP", "CR", "CF1", "OP", "OR", "OF1"} <= found["metrics"].keys()
    assert tuple(found["per_class"]) == NAMES
    mean = sum(row["AP"] or 0 for row in found["per_class"].values()) / 10
    assert mean == pytest.approx(found["metrics"]["mAP"])
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert [row["class"] for row in rows] == list(NAMES)
    assert float(rows[3]["AP"]) == pytest.approx(found["per_class"]["three"]["AP"], abs=1e-3)


def test_evaluate_prints_more_metrics_on_request(cli, best, tmp_path):
    words = ["--plugin", "patches", "--json", tmp_path / "r.json"]
    out = cli.out("evaluate", best, *words, "--metrics", "all", "--groups", 20, 12)
    found = json.loads((tmp_path / "r.json").read_text())
    metrics = found["metrics"]
    assert 0 < metrics["LRAP"] < 100
    assert 1 < metrics["coverage"] < 10
    assert "LRAP" in out

    # The groups follow the training labels. The order of the bounds does not matter.
    config = load_model(best, plugins=["patches"]).config
    data = build.data(build.check(config, ["data"]))
    counts = labels_of(data.train).counts()
    precisions = np.array([row["AP"] for row in found["per_class"].values()], float)
    groups = {"head": counts >= 20, "medium": (counts >= 12) & (counts < 20), "tail": counts < 12}
    for name, members in groups.items():
        assert metrics[f"classes_{name}"] == members.sum()
        if members.any():
            assert metrics[f"{name}_mAP"] == pytest.approx(np.nanmean(precisions[members]))
        else:
            assert metrics[f"{name}_mAP"] is None
    one_line(cli("evaluate", best, "--metrics", "some").err, "--metrics", "some")
    one_line(cli("evaluate", best, "--groups", "20", "many").err, "--groups", "many")


def test_resumed_run_with_label_counts_equals_whole_run(cli, here):
    words = ["loss=distribution_balanced"]
    for setting in ("name=whole", "name=parts train.stop_epoch=1", "name=parts resume=auto"):
        cli.out("train", *QUICK, *words, *setting.split())

    # Each process draws the training scenes and counts the labels.
    files = [Path("outputs", name, "checkpoints", "last.pt") for name in ("whole", "parts")]
    weights = [loading.load(file).model for file in files]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_init_starts_from_weights(cli, best, here):
    out = cli.out(
        "train", *QUICK, f"init={best}", "train.epochs=1", "optim.lr=1e-9", "train.ema_decay=null"
    )
    assert "tensors loaded" in out
    assert f"start weights: init={best}" in Path("outputs/digits/train.log").read_text()
    began = read_torch(best)
    start = began["ema" if began["best"]["weights"] == "ema" else "model"]
    end = read_torch(Path("outputs/digits/checkpoints/last.pt"))["model"]
    torch.testing.assert_close(end, start, atol=1e-5, rtol=0)
    assert not math.isnan(read_torch(Path("outputs/digits/checkpoints/last.pt"))["best"]["value"])
