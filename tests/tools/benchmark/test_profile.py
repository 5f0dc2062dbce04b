"""A training step, taken apart."""

import json

import pytest
import torch

from mldec.tools.benchmark import profile
from mldec.tools.benchmark.profile import PARTS, Stopwatch

SMALL = [
    "data.image_size=32",
    "data.train_images=40",
    "train.batch_size=16",
    "train.accumulate=2",
    "train.workers=0",
    "head.embed_dim=16",
    "head.mlp_dim=16",
    "device=cpu",
]


@pytest.fixture(autouse=True)
def small_product(monkeypatch):
    monkeypatch.setitem(profile.SIDE, "cpu", 64)


def test_every_moment_belongs_to_one_part(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(profile.time, "perf_counter", lambda: next(moments))
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.restart()
    with stopwatch.part("backward"), stopwatch.part("backbone"):
        pass
    expected = {"other": 1.0 + 5.0, "backward": 2.0 + 4.0, "backbone": 3.0}
    assert stopwatch.seconds() == {**dict.fromkeys(PARTS, 0.0), **expected}


def test_the_parts_add_up_to_the_step(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "TRACED", 1)
    file, trace = tmp_path / "profile.json", tmp_path / "trace.json"
    trace.write_text("an older trace")
    words = ["--experiment", "digits", "--repeats", "2", "--json", file, "--trace", trace]
    out = cli.out("benchmark", "profile", *words, *SMALL)

    figures = json.loads(file.read_text())["figures"]
    parts = {name for name in PARTS if f"{name}_ms" in figures}
    assert parts == PARTS.keys() - {"model"}
    total = sum(figures[f"{name}_ms"] for name in parts)
    assert figures["step_ms"] == pytest.approx(total)
    assert sum(figures[f"{name}_percent"] for name in parts) == pytest.approx(100)
    assert figures["images_per_second"] == pytest.approx(16 / figures["step_ms"] * 1000)
    for name in ("loader", "copy", "backbone", "head", "loss", "backward", "optimizer", "ema"):
        assert figures[f"{name}_ms"] > 0, name
    assert figures["backward_ms"] > figures["loss_ms"]
    assert figures["data"] == "40 training images"
    rate = figures["step_gflop"] / figures["step_ms"] * 1000
    assert figures["gflop_per_second"] == pytest.approx(rate)
    assert figures["mfu_percent"] == pytest.approx(100 * rate / figures["product_gflop_per_second"])

    # Every part has its line, and the trace its range.
    lines = out.splitlines()
    for name in parts:
        assert any(line.strip().startswith(PARTS[name]) for line in lines), name
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("optimizer") == 1
    assert names.count("backbone") == 2  # micro-batches
    assert "aten::convolution" in names


def test_without_its_data_an_experiment_has_random_images(cli, tmp_path):
    settings = ["backbone=tiny", "data.image_size=32", "train.batch_size=4", "device=cpu"]
    settings += ["head.embed_dim=16", "head.mlp_dim=16", f"data.root={tmp_path / 'absent'}"]
    words = ["--experiment", "nuswide_zsl_tresnet_m", "--repeats", "1", "--classes", "7"]
    out = cli.out("benchmark", "profile", *words, *settings)
    lines = out.splitlines()
    assert "7 classes" in lines[0]
    assert lines[1].startswith(f"data: random images: {tmp_path / 'absent'}")
