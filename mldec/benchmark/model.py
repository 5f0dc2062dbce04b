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
from mldec.data.labels import from_dense
from mldec.data.loader import Batch
from mldec.evaluation import autocast
from mldec.evaluators.average_precision import average_precision
from mldec.heads.ml_decoder import MLDecoder
from mldec.runtime import distributed
from mldec.training.step import Learner


def seconds(
    job: Callable[[], Any], *, device: torch.device, repeats: int, warmup: int = 2
) -> float:
    """Return the median time of a job in seconds, until the device has finished it."""
    times = []
    for turn in range(warmup + repeats):
        start = time.perf_counter()
        job()

        # A kernel is only queued when the call returns.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def official_projection(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the group projection as the official code does, group by group into a buffer.

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

    # The last group may have room for more classes than there are.
    return out.flatten(1)[:, : len(bias)] + bias


def head(args: argparse.Namespace) -> dict[str, Any]:
    """Time the group projection, forward and backward, beside the official loop over groups.

    It has 9,605 classes in 200 groups, width 768 and batch size 16.
    """
    device = distributed.pick_device(args.device)
    model = MLDecoder(2048, 9605, num_groups=200).to(device)
    x = torch.randn(16, 200, 768, device=device, requires_grad=True)  # decoded queries [B, G, D]

    def official(x: Tensor) -> Tensor:
        return official_projection(x, model.pool_weight, model.pool_bias)

    def step(projection: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: projection(x).sum().backward()

    # They are compared first: a faster projection with other logits would be worth nothing.
    difference = (model.pool(x) - official(x)).abs().max().item()
    slow = seconds(step(official), device=device, repeats=3, warmup=1)
    fast = seconds(step(model.pool), device=device, repeats=20)
    return {
        "official_loop_ms": 1000 * slow,
        "batched_product_ms": 1000 * fast,
        "times_faster": slow / fast,
        "largest_difference": difference,
    }


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
        before = _peak_gib()
        repeats = 3 if name == "coco" else 1
        figures[f"{name}_seconds"] = seconds(
            lambda: average_precision(scores, targets),  # noqa: B023
            device=cpu,
            repeats=repeats,
            warmup=repeats - 1,
        )
        figures[f"{name}_gib_beyond_input"] = _peak_gib() - before
    return figures


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Time training and inference of a multi-label experiment, with random images.

    A training step includes the optimiser and the moving average.
    """
    config = compose([f"+experiment={args.experiment}", *args.settings])
    device = distributed.pick_device(config.device)
    batch_size, size = config.train.batch_size, int(config.data["image_size"])
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = True

    # Weights and images are random: neither changes the time of a step.
    classes = Classes(tuple(f"class {i}" for i in range(args.classes)))
    parts = build.complete(build.check(config, ["backbone", "head", "loss"]))
    model = build.model(parts, classes, pretrained=False).to(device)

    # A batch in micro-batches, with about as many labels per image as in COCO.
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8, device=device)
    targets = (torch.rand(batch_size, args.classes, device=device) < 0.04).to(torch.int8)
    indices = torch.arange(batch_size)
    chunks = [item.chunk(config.train.accumulate) for item in (images, targets, indices)]
    batches = [Batch(*chunk) for chunk in zip(*chunks, strict=True)]

    loss = build.loss(parts, lambda: from_dense(targets.cpu().numpy()))
    learner = Learner(config, model, loss, device=device, steps=10_000)
    learner.train()
    train = seconds(
        lambda: learner.learn(batches, batch_size), device=device, repeats=args.repeats, warmup=3
    )

    # The same weights, without gradients and in the precision of training.
    learner.net.eval()
    infer = seconds(
        lambda: _infer(learner.net, images, config, device),
        device=device,
        repeats=args.repeats,
        warmup=3,
    )

    if device.type == "cuda":
        peak_gib = torch.cuda.max_memory_allocated(device) / 2**30
    else:
        peak_gib = _peak_gib()
    return {
        "experiment": args.experiment,
        "settings": args.settings,
        "precision": config.train.precision.on(device.type).value,
        "compile": config.train.compile,
        "channels_last": config.train.channels_last,
        "batch_size": batch_size,
        "image_size": size,
        "classes": args.classes,
        "train_images_per_second": batch_size / train,
        "infer_images_per_second": batch_size / infer,
        "peak_gib": peak_gib,
    }


@torch.no_grad()
def _infer(net: nn.Module, images: Tensor, config: Config, device: torch.device) -> None:
    with autocast(device, config.train.precision):
        net(images)


def _peak_gib() -> float:
    """Return the largest memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
