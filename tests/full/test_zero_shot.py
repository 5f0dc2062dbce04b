"""Zero-shot training, evaluation and prediction of new classes by commands."""

import json
from pathlib import Path

import forked
import pytest
from support import CONFIGS, train_here

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
    words = ["--layout", "nuswide", "data", "--train", "96", "--val", "48", "--size", "32"]
    done = forked.run(forked.script, str(SCRIPT), *words, cwd=folder)
    assert done.status == 0, done.err
    train_here(folder, *QUICK, "data.root=data", "data.cache_dir=cache")
    return folder


def test_run_is_evaluated_calibrated_and_predicts_new_classes(cli, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    best = folder / "outputs/zsl/checkpoints/best.pt"
    state = read_torch(best)
    assert state["best"]["metric"] == "zsl_mAP"
    assert state["classes"]["queries"].shape == (40, 14)

    def report(command, path, *words):
        target = tmp_path / f"{command}.json"
        cli.out(command, path, "--plugin", "patches", *words, "--json", target)
        return json.loads(target.read_text())

    found = report("evaluate", best)
    assert found["metrics"]["zsl_mAP"] == pytest.approx(state["best"]["value"], abs=1e-9)
    assert sum(row["unseen"] for row in found["per_class"].values()) == 8

    # All classes share one threshold, which new classes also have.
    out = tmp_path / "x.pt"
    content = report("calibrate", best, "--out", out)
    [threshold] = {values["threshold"] for values in content["per_class"].values()}
    assert content["scope"] == "global"
    metrics = report("evaluate", out)["metrics"]
    assert metrics["gzsl_OF1"] == pytest.approx(content["fitted"]["OF1"])
    image = min((folder / "data" / "images").iterdir())
    vectors = ["--classes", "redfive,bluetwo", "--vectors", "data/wordvec_array.pth"]
    [row] = report("predict", out, image, *vectors)
    for item in row["predictions"]:
        assert item["score"] >= item["threshold"] == threshold
