"""The job that measures the metric, at small sizes."""

import argparse

import pytest
import torch

from mldec.benchmark import metric as measure_metric


def test_the_metric_job_measures_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def average_precision(scores: torch.Tensor, targets: torch.Tensor) -> None:
        shapes.append((tuple(scores.shape), targets.dtype, targets.float().mean().item()))

    # A hundredth of the images, and nothing in place of what is measured.
    randn, empty = torch.randn, torch.empty
    monkeypatch.setattr(torch, "randn", lambda images, k, **_: randn(images // 100, k))
    monkeypatch.setattr(torch, "empty", lambda images, k, **named: empty(images // 100, k, **named))
    monkeypatch.setattr(measure_metric, "average_precision", average_precision)
    figures = measure_metric.metric(argparse.Namespace())
    assert {name.rpartition("_")[0] for name in figures} >= {"coco", "open_images"}
    sizes = {shape: share for shape, _, share in shapes}
    assert sizes[405, 80] == pytest.approx(0.036, rel=0.1)
    assert sizes[400, 9605] == pytest.approx(0.001, rel=0.1)
    assert {dtype for _, dtype, _ in shapes} == {torch.int8}
    assert all(value >= 0 for value in figures.values())
