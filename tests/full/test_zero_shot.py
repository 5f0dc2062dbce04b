"""Zero-shot training, evaluation and prediction of new classes by commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import CONFIGS

from mldec.checkpoint import load_model
from mldec.data.transforms import read_image
from mldec.files.torch_files import read_torch
from mldec.words.vectors import load_word_vectors

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


def test_evaluate_on_all_images_and_other_unseen_classes(command, folder, tmp_path):
    status, out, err = command("evaluate", "data.val_images=all")
    assert status == 0, err
    assert "zsl_all_mAP" in out
    assert "on 48 images" in out
    other = tmp_path / "other"
    shutil.copytree(folder / "data", other)
    # Ten classes are new.
    for file in (other / "data.csv", other / "wordvec_array.txt"):
        file.write_text(file.read_text().replace("grey", "black"))
    unseen = ["blackone", "blacktwo", "redsix"]
    (other / "benchmark_81_v0.json").write_text(json.dumps({"test class": unseen}))
    status, _, err = command("evaluate", f"data.root={other}", "--json", tmp_path / "r.json")
    assert status == 0, err
    rows = json.loads((tmp_path / "r.json").read_text())["per_class"]
    assert [name for name, row in rows.items() if row["unseen"]] == unseen


def test_predict_known_and_new_classes(command, folder, tmp_path):
    image = some_image(folder)

    def predicted(*words):
        status, out, err = command("predict", image, *words, "--json", "-")
        assert status == 0, err
        return {item["name"]: item["score"] for item in json.loads(out)[0]["predictions"]}

    own = predicted("--top", "40")
    assert len(own) == 40
    vectors = load_word_vectors(
        str(folder / "data/wordvec_array.pth"), ["redfive", "bluetwo"]
    ).word_vectors
    lines = [
        f"{name} {' '.join(map(str, row.tolist()))}\n"
        for name, row in zip(("a", "b"), vectors, strict=True)
    ]
    (tmp_path / "v.txt").write_text("".join(lines) + "c " + "0.1 " * 14 + "\n")
    new = predicted("--classes", "b, a,c", "--vectors", tmp_path / "v.txt")
    assert new.keys() == {"a", "b", "c"}
    assert new["a"] == pytest.approx(own["redfive"], abs=1e-6)
    assert new["b"] == pytest.approx(own["bluetwo"], abs=1e-6)
    loaded = load_model(folder / "outputs/zsl/checkpoints/best.pt", plugins=["patches"])
    with torch.no_grad():
        logits = loaded.model(loaded.transform(read_image(image))[None], torch.full((1, 14), 0.1))
    assert new["c"] == pytest.approx(logits.sigmoid().item(), abs=1e-6)


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
