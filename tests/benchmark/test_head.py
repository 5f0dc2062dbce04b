"""The head against others, and its matrix products, at small sizes."""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import decoder_macs
from torch.utils.flop_counter import FlopCounterMode

from mldec.benchmark import head as measure_head
from mldec.benchmark.head import IN_FEATURES, Size, products
from mldec.heads.ml_decoder import MLDecoder

CPU = torch.device("cpu")


def flops(job: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        job()
    return counter.get_total_flops()


@pytest.mark.parametrize("size", [Size(10, 3, 4), Size(5, 5, 2)])
def test_the_products_are_those_of_the_head(size: Size) -> None:
    head = MLDecoder(IN_FEATURES, size.classes, num_groups=size.groups)
    tokens = torch.randn(size.images, size.tokens, IN_FEATURES, requires_grad=True)
    alone = flops(products(size, CPU, training=True))
    assert alone == flops(lambda: head(tokens).sum().backward())

    # The projection of the queries is the same for all images.
    macs = decoder_macs(size.tokens, size.groups, size.classes)
    shared = (size.images - 1) * size.groups * 768 * 768
    assert flops(products(size, CPU, training=False)) == 2 * (size.images * macs - shared)


def test_the_head_job_compares_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_head, "OPEN_IMAGES", Size(10, 3, 4))
    monkeypatch.setattr(measure_head, "COCO", Size(5, 5, 2))
    monkeypatch.setattr(measure_head, "BACKBONE", ["+experiment=digits"])
    monkeypatch.setattr(measure_head, "IMAGE_SIZE", 32)
    ticks = itertools.count(1.0)

    def in_turns(jobs: dict[str, Callable[[], Any]], **_: Any) -> dict[str, list[float]]:
        for job in jobs.values():
            job()
        return {name: [next(ticks)] for name in jobs}

    monkeypatch.setattr(measure_head, "in_turns", in_turns)
    figures = measure_head.head(argparse.Namespace(device="cpu", batch_size=2))
    assert figures.pop("largest_difference") < 1e-4
    assert figures["times_faster"] == 1 / 2
    for name, (ours, official, alone) in {
        "open_images": (3, 4, 5),
        "coco_inference": (6, 7, 8),
        "coco_training": (9, 10, 11),
    }.items():
        assert figures[f"{name}_ours_ms"] == 1000 * ours
        assert figures[f"{name}_times_official"] == ours / official
        assert figures[f"{name}_times_products"] == ours / alone

    # Heads in the order 80, its GAP, 9,605, its GAP; then the backbone that all of them share.
    assert figures["tresnet_m_80_inference_times_gap"] == (16 + 12) / (16 + 13)
    assert figures["tresnet_m_9605_inference_times_gap"] == (16 + 14) / (16 + 15)
    assert figures["tresnet_m_80_training_times_gap"] == (21 + 17) / (21 + 18)
