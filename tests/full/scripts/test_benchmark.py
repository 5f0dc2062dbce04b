"""scripts/benchmark.py: its options, JSON files and jobs."""

import json
import math
from functools import partial

import benchmark
import hostile
import pytest
import torch
from benchmark import in_turns, split_repeats, step_figures, times_as_long
from pictures import picture, saved

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Classes
from mldec.errors import DataError
from mldec.model import multiply_accumulates
from mldec.runtime import environment as facts

SMALL = ["data.image_size=32", "train.batch_size=4", "device=cpu"]
HEAD = ["head.embed_dim=16", "head.mlp_dim=16"]
STEP = [
    "data.image_size=32",
    "train.batch_size=16",
    "train.accumulate=2",
    "head.embed_dim=16",
    "head.mlp_dim=16",
    "device=cpu",
]


def test_figures_are_printed_and_written(cli, tmp_path, monkeypatch):
    figures = [{"seconds": 1234.5678}, {"name": "x"}]
    monkeypatch.setitem(benchmark.JOBS, "throughput", (lambda args: figures, ""))
    file = tmp_path / "m.json"
    out = cli.out("benchmark", "throughput", "--json", file)
    assert dict(line.split() for line in out.splitlines()) == {"seconds": "1,235", "name": "x"}
    content = json.loads(file.read_text())
    assert (content["benchmark"], content["figures"]["seconds"]) == ("throughput", 1234.5678)
    measured = content["environment"]
    assert measured == facts.environment()
    assert (measured["torch"], measured["commit"]) == (torch.__version__, facts.git_commit())


def test_figures_before_an_error_are_written(cli, tmp_path, monkeypatch):
    def measure(args):
        yield {"first": 1}
        raise DataError("second figure")

    monkeypatch.setitem(benchmark.JOBS, "throughput", (measure, ""))
    assert cli("benchmark", "throughput", "--json", tmp_path / "m.json").status == 1
    assert json.loads((tmp_path / "m.json").read_text())["figures"] == {"first": 1}


@pytest.mark.parametrize(
    ("words", "status", "name"),
    [
        (["data", "folder", "head=gap"], 2, "head=gap"),
        (["predict", "x.pt", "folder", "--device", "cpu"], 1, "folder"),
    ],
)
def test_errors(cli, here, words, status, name):
    (here / "folder").mkdir()
    if words[0] == "predict":
        torch.save(hostile.good(), "x.pt")
        (here / "folder" / "x.png").write_text("no image")
    done = cli("benchmark", *words)
    assert done.status == status
    assert name in done.err


def test_predict_is_compared_with_its_bound(cli, tmp_path):
    torch.save(hostile.good(), tmp_path / "x.pt")
    for number in range(20):
        picture(seed=number).save(tmp_path / f"{number}.png")
    words = ["--count", "15", "--rounds", "1", "--device", "cpu", "--json", tmp_path / "r.json"]
    cli.out("benchmark", "predict", tmp_path / "x.pt", tmp_path, *words)
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["images"] == 15
    bound = 1 / (1 / figures["decode"] + 1 / figures["model"])
    assert figures["bound"] == pytest.approx(bound)
    assert figures["share"] == pytest.approx(figures["predict"] / bound)


@pytest.mark.parametrize(
    ("experiment", "changed"),
    [
        ("digits", ["train.accumulate=2"]),
        ("nuswide_zsl_tresnet_m", ["backbone=tiny"]),  # word queries
        ("digits", ["head=ram"]),  # learned word vectors
    ],
)
def test_an_experiment_trains_and_infers(cli, experiment, changed):
    options = ["--experiment", experiment, "--classes", "7", "--repeats", "1"]
    out = cli.out("benchmark", "throughput", *options, *SMALL, *HEAD, *changed)
    figures = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (figures["classes"], figures["batch_size"], figures["image_size"]) == ("7", "4", "32")
    assert float(figures["train_images_per_second"].replace(",", "")) > 0
    assert float(figures["infer_images_per_second"].replace(",", "")) > 0


def test_a_changed_setting_is_timed_in_turns(cli):
    options = ["--experiment", "digits", "--repeats", "1", "--beside", "head=gap"]
    out = cli.out("benchmark", "throughput", *options, *SMALL)
    # A slow machine takes over a thousand milliseconds, with a comma.
    figures = dict(line.replace(",", "").split(maxsplit=1) for line in out.splitlines())
    ours, other = (float(figures[f"{side}_step_ms"]) for side in ("train", "beside"))
    assert float(figures["times_beside"]) == pytest.approx(other / ours, rel=1e-2)
    assert figures["beside"] == "head=gap"
    assert "infer_step_ms" not in figures


def test_jobs_take_turns():
    cpu = torch.device("cpu")
    calls = []
    jobs = {name: partial(calls.append, name) for name in ("a", "b")}
    times = in_turns(jobs, device=cpu, rounds=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}

    # Several steps between two reads of the clock.
    calls.clear()
    in_turns(jobs, device=cpu, rounds=1, warmup=0, steps=2)
    assert calls == ["a", "a", "b", "b"]
    assert split_repeats(20) == {"rounds": 5, "steps": 4}
    assert split_repeats(1) == {"rounds": 1, "steps": 1}
    assert step_figures("x_", [0.1, 0.3], images=40) == {
        "x_step_ms": pytest.approx(200),
        "x_spread_percent": pytest.approx(100),
        "x_images_per_second": pytest.approx(200),
    }

    # Both sides of the second round were disturbed: the ratio is computed within rounds.
    times = {"a": [2.0, 20.0, 2.2], "b": [1.0, 10.0, 1.0]}
    assert times_as_long(times, "a", "b") == pytest.approx(2)


def test_calls_of_a_function_add_up(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(moments))
    stopwatch = benchmark.Stopwatch(torch.device("cpu"))
    double = stopwatch.measured("double", lambda value: 2 * value)
    assert (double(1), double(2)) == (2, 4)
    assert stopwatch.seconds() == {"double": 1.0 + 3.0}


def test_parts_add_up_to_the_step(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(benchmark.SIDE, "cpu", 64)
    file = tmp_path / "profile.json"
    words = ["--experiment", "digits", "--classes", "7", "--repeats", "2", "--json", file]
    cli.out("benchmark", "profile", *words, *STEP)

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


@pytest.fixture
def profiled(cli, tmp_path, monkeypatch):
    """Profile a small step of digits, and return its figures."""
    monkeypatch.setitem(benchmark.SIDE, "cpu", 64)

    def run(*changed):
        file = tmp_path / "profile.json"
        words = ["--experiment", "digits", "--classes", "10", "--repeats", "1", "--json", file]
        sizes = ["data.image_size=32", "train.batch_size=16", "train.accumulate=2"]
        cli.out("benchmark", "profile", *words, *sizes, "device=cpu", "optim.name=adam", *changed)
        return json.loads(file.read_text())["figures"]

    return run


def test_operations_of_a_step(profiled):
    figures = profiled("head=gap")
    # Each product has two more in the backward pass, except for the gradient of the images. A
    # product and a sum are two operations.
    parts = build.check(compose(["+experiment=digits", "head=gap"]), build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple("0123456789")), pretrained=False)
    first = model.backbone.network.conv1[0]
    outputs = first(torch.zeros(1, 3, 32, 32)).numel()
    first_macs = outputs * math.prod(first.weight.shape[1:])
    flops = 16 * 2 * (3 * multiply_accumulates(model, 32) - first_macs)
    assert figures["step_gflop"] == pytest.approx(flops / 1e9)


def test_parts_of_the_transform_add_up(cli, tmp_path, monkeypatch):
    pytest.importorskip("simplejpeg", reason="the fast decoder")
    for name, value in {"ROUNDS": 1, "IMAGES": 2, "SIZE": 64}.items():
        monkeypatch.setattr(benchmark, name, value)
    photos = tmp_path / "photos" / "subfolder"
    photos.mkdir(parents=True)
    for number in range(3):
        saved(picture(160, 120, seed=number), photos / f"{number}.jpg")
    (photos / "notes.txt").write_text("no image")

    cli.out("benchmark", "data", photos.parent, "--json", tmp_path / "r.json")
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    for name in ("default", "fast"):
        *parts, total = [figures[f"{name}_{part}_ms"] for part in benchmark.PARTS]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(total)
        assert figures[f"{name}_images_per_second"] == pytest.approx(1000 / total)
