"""The job of `mldec.benchmark` that measures the metric: time and memory of the mAP."""

import argparse
from typing import Any

import torch

from mldec.benchmark.timing import peak_gib, seconds
from mldec.evaluators.average_precision import average_precision


def metric(args: argparse.Namespace) -> dict[str, Any]:
    """Time mAP of 40,504 x 80 and of 40,000 x 9,605 scores; measure memory beyond the input."""
    generator = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")
    figures: dict[str, Any] = {}
    for name, images, classes, share in (
        ("coco", 40_504, 80, 0.036),
        ("open_images", 40_000, 9_605, 0.001),
    ):
        scores = torch.randn(images, classes, generator=generator)

        # In blocks, because a float matrix of random numbers would be the peak of memory.
        targets = torch.empty(images, classes, dtype=torch.int8)
        for block in targets.split(1000):
            block.copy_(torch.rand(block.shape, generator=generator) < share)

        # The peak never falls, so the larger case must come second.
        before = peak_gib(cpu)
        repeats = 3 if name == "coco" else 1
        figures[f"{name}_seconds"] = seconds(
            lambda: average_precision(scores, targets),  # noqa: B023
            device=cpu,
            repeats=repeats,
            warmup=repeats - 1,
        )
        figures[f"{name}_gib_beyond_input"] = peak_gib(cpu) - before
    return figures
