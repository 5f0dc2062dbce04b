"""Zero-shot training, evaluation and prediction of new classes by commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import CONFIGS

from mldec.files.torch_files import read_torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_digits.py"
QUICK = [
    "+experiment=nuswide_zsl_tresnet_m",
    "plugins=[patches]",
    "backbone=patches",
    f"--config-dir={CONFIGS}",
    "name=zsl",
    "data.image_size=32",
    "head.word_dim=14",
    "head.embed_dim=32",
    "head.mlp_dim=32",
    "train.batch_size=16",
    "train.epochs=1",
    "train.workers=0",
    "train.precision=fp32",
    "device=cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Digits in the NUS-WIDE layout, and a finished run on them; tests must not change it."""
    folder = tmp_path_factory.mktemp("zsl")
    made = f"{SCRIPT} --layout nuswide data --train 96 --val 48 --size 32".split()
    for words in (made, ["-m", "mldec.train", *QUICK, "data.root=data", "data.cache_dir=cache"]):
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def command(cli, folder, monkeypatch):
    monkeypatch.chdir(folder)

    def command(name, *words):
        return cli(name, "outputs/zsl/checkpoints/best.pt", "--plugin", "patches", *words)

    return command


def some_image(folder):
    return min((folder / "data" / "images").iterdir())


def test_evaluate_gives_the_metric_of_the_run(command, folder, tmp_path):
    state = read_torch(folder / "outputs/zsl/checkpoints/best.pt")
    assert state["best"]["metric"] == "zsl_mAP"
    assert state["classes"]["queries"].shape == (40, 14)
    status, out, err = command("evaluate", "--json", tmp_path / "r.json")
    assert status == 0, err
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["metrics"]["zsl_mAP"] == pytest.approx(state["best"]["value"], abs=1e-9)
    assert sum(row["unseen"] for row in found["per_class"].values()) == 8
    assert f"{state['best']['value']:.3f}" in out


def test_calibration_is_global(command, cli, folder, tmp_path):
    out = tmp_path / "x.pt"
    status, text, err = command("calibrate", "--out", out, "--json", tmp_path / "c.json")
    assert status == 0, err
    assert "images: threshold 0." in text
    content = json.loads((tmp_path / "c.json").read_text())
    thresholds = {values["threshold"] for values in content["per_class"].values()}
    assert content["scope"] == "global"
    assert len(thresholds) == 1

    words = ["--plugin", "patches", "--json", tmp_path / "r.json"]
    text = cli.out("evaluate", out, *words)
    assert "fitted on these images" in text
    metrics = json.loads((tmp_path / "r.json").read_text())["metrics"]
    assert metrics["gzsl_OF1"] == pytest.approx(content["fitted"]["OF1"])

    words = [*words[:2], "--classes", "redfive,bluetwo", "--json", "-"]
    words += ["--vectors", folder / "data/wordvec_array.pth"]
    status, text, err = cli("predict", out, some_image(folder), *words)
    assert (status, err) == (0, "")
    for item in json.loads(text)[0]["predictions"]:
        assert item["score"] >= item["threshold"]
        assert {item["threshold"]} == thresholds
