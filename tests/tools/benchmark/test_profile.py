"""The job `profile`: the parts of a training step."""

import json

import pytest
import torch

from mldec.tools.benchmark import profile
from mldec.tools.benchmark.profile import Stopwatch

SMALL = [
    "data.image_size=32",
    "train.batch_size=16",
    "train.accumulate=2",
    "head.embed_dim=16",
    "head.mlp_dim=16",
    "device=cpu",
]


def test_calls_of_a_function_add_up(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(profile.time, "perf_counter", lambda: next(moments))
    stopwatch = Stopwatch(torch.device("cpu"))
    double = stopwatch.measured("double", lambda value: 2 * value)
    assert (double(1), double(2)) == (2, 4)
    assert stopwatch.seconds() == {"double": 1.0 + 3.0}


def test_parts_add_up_to_the_step(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(profile.SIDE, "cpu", 64)
    file = tmp_path / "profile.json"
    words = ["--experiment", "digits", "--classes", "7", "--repeats", "2", "--json", file]
    cli.out("benchmark", "profile", *words, *SMALL)

    figures = json.loads(file.read_text())["figures"]
    parts = {key.removesuffix("_percent") for key in figures if key.endswith("_percent")} - {"mfu"}
    names = {"copy", "backbone", "head", "loss", "backward", "optimizer", "ema", "other"}
    assert parts == names
    for name in names:
        assert figures[f"{name}_ms"] > 0, name
    assert figures["step_ms"] == pytest.approx(sum(figures[f"{name}_ms"] for name in names))
    assert sum(figures[f"{name}_percent"] for name in names) == pytest.approx(100)
    assert figures["images_per_second"] == pytest.approx(16 / figures["step_ms"] * 1000)
    assert figures["backward_ms"] > figures["loss_ms"]

    rate = figures["step_gflop"] / figures["step_ms"] * 1000
    assert figures["gflop_per_second"] == pytest.approx(rate)
    assert figures["mfu_percent"] == pytest.approx(100 * rate / figures["product_gflop_per_second"])
