"""The job `throughput`: images/s of experiments, and timing of jobs in turns."""

from functools import partial

import pytest
import torch

from mldec.tools.benchmark.throughput import (
    in_turns,
    split_repeats,
    step_figures,
    times_as_long,
)

SMALL = ["data.image_size=32", "train.batch_size=4", "device=cpu"]
HEAD = ["head.embed_dim=16", "head.mlp_dim=16"]


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
