"""The jobs of `mldec.benchmark` that measure networks and the metric: time, memory, throughput."""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mldec import build
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.base import Classes
from mldec.data.loader import Batch
from mldec.evaluation import autocast
from mldec.evaluators.average_precision import average_precision
from mldec.heads.ml_decoder import MLDecoder
from mldec.runtime import distributed
from mldec.training.step import Learner


def seconds(
    job: Callable[[], Any], *, device: torch.device, repeats: int, warmup: int = 2
) -> float:
    """Return the median time of a job, waiting for the device."""
    times = []
    for turn in range(warmup + repeats):
        start = time.perf_counter()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def official_projection(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Do the group projection as the official code does, group by group into a buffer.

    Source: described from reference ml_decoder.py, GroupFC.

    Args:
        x: decoded queries [B, G, D].
        weight: [G, D, g].
        bias: [K].

    Returns:
        logits [B, K].
    """
    out = torch.zeros(len(x), len(weight), weight.shape[2], device=x.device, dtype=x.dtype)
    for group in range(len(weight)):
        out[:, group, :] = x[:, group, :] @ weight[group]
    return out.flatten(1)[:, : len(bias)] + bias


def head(words: argparse.Namespace) -> dict[str, Any]:
    """Time the group projection of 9,605 classes in 200 groups, width 768, batch 16, forward and backward."""
    device = distributed.pick_device(words.device)
    model = MLDecoder(2048, 9605, num_groups=200).to(device)
    x = torch.randn(16, 200, 768, device=device, requires_grad=True)

    def step(projection: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: projection(x).sum().backward()

    ours = step(model.pool)
    official = step(lambda x: official_projection(x, model.pool_weight, model.pool_bias))
    difference = (
        (model.pool(x) - official_projection(x, model.pool_weight, model.pool_bias))
        .abs()
        .max()
        .item()
    )
    slow = seconds(official, device=device, repeats=3, warmup=1)
    fast = seconds(ours, device=device, repeats=20)
    return {
        "official_loop_ms": 1000 * slow,
        "batched_product_ms": 1000 * fast,
        "times_faster": slow / fast,
        "largest_difference": difference,
    }


def metric(words: argparse.Namespace) -> dict[str, Any]:
    """Time mAP of 40,504 x 80, and of 40,000 x 9,605 with the memory it takes beyond its input."""
    generator = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")
    found: dict[str, Any] = {}
    for name, images, classes, share in (
        ("coco", 40_504, 80, 0.036),
        ("open_images", 40_000, 9_605, 0.001),
    ):
        scores = torch.randn(images, classes, generator=generator)
        targets = torch.empty(images, classes, dtype=torch.int8)
        for block in targets.split(1000):
            block.copy_(torch.rand(block.shape, generator=generator) < share)
        before = _peak_gib()
        repeats = 3 if name == "coco" else 1
        found[f"{name}_seconds"] = seconds(
            lambda: average_precision(scores, targets),  # noqa: B023
            device=cpu,
            repeats=repeats,
            warmup=repeats - 1,
        )
        found[f"{name}_gib_beyond_input"] = _peak_gib() - before
    return found


def throughput(words: argparse.Namespace) -> dict[str, Any]:
    """Time the training step (with optimiser and moving average) and inference of a multi-label experiment."""
    config = compose([f"+experiment={words.experiment}", *words.settings])
    device = distributed.pick_device(config.device)
    batch_size, size = config.train.batch_size, int(config.data["image_size"])
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = True
    classes = Classes(tuple(f"class {i}" for i in range(words.classes)))
    parts = build.check(config, ["backbone", "head", "loss"])
    model = build.model(parts, classes, pretrained=False).to(device)
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8, device=device)
    targets = (torch.rand(batch_size, words.classes, device=device) < 0.04).to(torch.int8)
    pieces = [
        item.chunk(config.train.accumulate) for item in (images, targets, torch.arange(batch_size))
    ]
    batches = [Batch(*piece) for piece in zip(*pieces, strict=True)]
    learner = Learner(config, model, build.loss(parts), device=device, steps=10_000)
    learner.net.train()
    steps = words.repeats
    train = seconds(
        lambda: learner.learn(batches, batch_size), device=device, repeats=steps, warmup=3
    )
    learner.net.eval()
    infer = seconds(
        lambda: _infer(learner.net, images, config, device), device=device, repeats=steps, warmup=3
    )
    return {
        "experiment": words.experiment,
        "settings": words.settings,
        "precision": config.train.precision.on(device.type).value,
        "compile": config.train.compile,
        "channels_last": config.train.channels_last,
        "batch_size": batch_size,
        "image_size": size,
        "classes": words.classes,
        "train_images_per_second": batch_size / train,
        "infer_images_per_second": batch_size / infer,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30
        if device.type == "cuda"
        else _peak_gib(),
    }


@torch.no_grad()
def _infer(net: nn.Module, images: Tensor, config: Config, device: torch.device) -> None:
    with autocast(device, config.train.precision):
        net(images)


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
