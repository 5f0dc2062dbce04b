"""The jobs that measure networks and the metric, at small sizes."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mldec.benchmark import model as measure_model
from mldec.benchmark.model import official_projection, seconds
from mldec.heads.ml_decoder import MLDecoder

CPU = torch.device("cpu")


def test_seconds_are_the_median_after_the_warm_up() -> None:
    durations = iter([0.2, 0.1, 0.001, 0.01, 0.02])
    measured = seconds(lambda: time.sleep(next(durations)), device=CPU, repeats=3, warmup=2)
    assert 0.01 <= measured < 0.02
    assert next(durations, None) is None


@pytest.mark.parametrize(("classes", "groups"), [(12, 4), (10, 4), (5, 5)])
@torch.no_grad()
def test_the_official_projection_is_one_product_per_class(classes: int, groups: int) -> None:
    head = MLDecoder(6, classes, num_groups=groups, embed_dim=8, num_heads=2, mlp_dim=8)
    head.pool_weight.normal_()
    head.pool_bias.normal_()
    x = torch.randn(3, groups, 8)
    logits = official_projection(x, head.pool_weight, head.pool_bias)

    size = head.pool_weight.shape[2]
    for number in range(classes):
        group, slot = divmod(number, size)
        expected = x[:, group] @ head.pool_weight[group, :, slot] + head.pool_bias[number]
        torch.testing.assert_close(logits[:, number], expected)
    torch.testing.assert_close(logits, head.pool(x))


def test_the_head_job_compares_both_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_model, "seconds", lambda job, **_: job() or 2.0)
    figures = measure_model.head(argparse.Namespace(device="cpu"))
    assert figures.pop("largest_difference") < 1e-4
    assert figures == {
        "official_loop_ms": 2000.0,
        "batched_product_ms": 2000.0,
        "times_faster": 1.0,
    }


def test_the_metric_job_measures_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def average_precision(scores: torch.Tensor, targets: torch.Tensor) -> None:
        shapes.append((tuple(scores.shape), targets.dtype, targets.float().mean().item()))

    # A hundredth of the images, and nothing in place of what is measured.
    randn, empty = torch.randn, torch.empty
    monkeypatch.setattr(torch, "randn", lambda images, k, **_: randn(images // 100, k))
    monkeypatch.setattr(torch, "empty", lambda images, k, **named: empty(images // 100, k, **named))
    monkeypatch.setattr(measure_model, "average_precision", average_precision)
    figures = measure_model.metric(argparse.Namespace())
    assert {name.rpartition("_")[0] for name in figures} >= {"coco", "open_images"}
    sizes = {shape: share for shape, _, share in shapes}
    assert sizes[405, 80] == pytest.approx(0.036, rel=0.1)
    assert sizes[400, 9605] == pytest.approx(0.001, rel=0.1)
    assert {dtype for _, dtype, _ in shapes} == {torch.int8}
    assert all(value >= 0 for value in figures.values())


def test_the_throughput_job_trains_and_infers(cli: Callable[..., Any]) -> None:
    words = ["--experiment", "digits", "--classes", "7", "--repeats", "1"]
    small = [
        "data.image_size=32",
        "train.batch_size=4",
        "train.accumulate=2",
        "head.embed_dim=16",
        "head.mlp_dim=16",
        "device=cpu",
    ]
    status, out, err = cli("benchmark", "throughput", *words, *small)
    assert status == 0, err
    figures = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (figures["classes"], figures["batch_size"], figures["image_size"]) == ("7", "4", "32")
    assert float(figures["train_images_per_second"].replace(",", "")) > 0
    assert float(figures["infer_images_per_second"].replace(",", "")) > 0
