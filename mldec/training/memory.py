"""`train.batch_size=auto`: divide the batch of a recipe so that it fits in memory."""

import copy
import gc
import logging
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from mldec import build
from mldec.checkpoint.state import Checkpoint
from mldec.config.schema import Config
from mldec.data.types import DataModule
from mldec.errors import ConfigError
from mldec.runtime import distributed
from mldec.runtime.devices import autocast, memory_format
from mldec.training.optim import freeze

log = logging.getLogger("mldec")

ENOUGH_FOR_BATCH_NORM = 16  # images; with fewer the statistics are noisy (group norm, figure 1)

SHARE_USED = 0.9  # of the free memory, because of fragmentation


class Division(NamedTuple):
    """Number of micro-batches per step, and whether activations are recomputed."""

    accumulate: int
    checkpointing: bool


def divisions(images: int, *, checkpointing: list[bool]) -> list[Division]:
    """Return the ways to divide the images of a process per step, the fastest first.

    More micro-batches cost little while each is large enough for batch norms. Recomputing
    activations costs another forward pass, and is preferred to smaller micro-batches.
    """
    enough = min(images, ENOUGH_FOR_BATCH_NORM)
    ways = []
    for recompute in checkpointing:
        for parts in range(1, images + 1):
            if images % parts == 0:
                ways.append(Division(parts, recompute))

    def order(way: Division) -> tuple[int, ...]:
        is_small = images // way.accumulate < enough
        if is_small:
            return (is_small, way.accumulate, way.checkpointing)
        return (is_small, way.checkpointing, way.accumulate)

    return sorted(ways, key=order)


def divide_batch(
    config: Config,
    parts: build.Parts,
    data: DataModule,
    loss: nn.Module,
    saved: Checkpoint | None,
    device: torch.device,
) -> tuple[Config, build.Parts]:
    """Return config and parts with the first of `divisions` that fits on all ranks.

    A resumed run keeps the division of its checkpoint. The batch is not divided on a CPU or with
    train.cache_features, where only the head is trained.
    """
    train = config.train
    backbone = parts["backbone"].arguments
    images = train.batch_size // distributed.world_size()
    before = bool(backbone.get("checkpointing"))
    if saved is not None:
        recompute = bool(saved.config["backbone"].get("checkpointing"))
        way = Division(saved.config["train"]["accumulate"], recompute)
        reason = "as the checkpoint was trained"
    elif device.type != "cuda" or train.cache_features:
        way = Division(1, before)
        reason = "batches are not divided on a CPU or with cached features"
    else:
        free = free_memory(device)

        def fits(way: Division) -> bool:
            needed = measured(*with_division(config, parts, way), data, loss, device)
            return max(distributed.gather(needed / free)) <= SHARE_USED

        # A frozen backbone stores no activations.
        may_recompute = "checkpointing" in backbone and "backbone" not in train.freeze
        choices = [before]
        if may_recompute and not before:
            choices = [False, True]
        ways = divisions(images, checkpointing=choices)
        first = next((way for way in ways if fits(way)), None)
        if first is None:
            raise ConfigError(
                f"train.batch_size=auto: a training step of one image does not fit in the "
                f"{free / 2**30:.1f} GiB that are free on {device}; lower data.image_size"
            )
        way = first
        reason = f"chosen for {free / 2**30:.1f} GiB that are free on {device}"

    log.info(
        f"train.batch_size=auto: {train.batch_size} images per step, train.accumulate="
        f"{way.accumulate}, {images // way.accumulate} images at a time on each process, "
        f"backbone.checkpointing={str(way.checkpointing).lower()}; {reason}"
    )
    return with_division(config, parts, way)


def with_division(config: Config, parts: build.Parts, way: Division) -> tuple[Config, build.Parts]:
    """Return config and parts with a division, for the record of the run."""
    backbone = parts["backbone"]
    if "checkpointing" in backbone.arguments:
        arguments = {**backbone.arguments, "checkpointing": way.checkpointing}
        parts = {**parts, "backbone": replace(backbone, arguments=arguments)}
    train = replace(config.train, accumulate=way.accumulate, fit_memory=False)
    train = train.for_world_size(distributed.world_size())
    return build.recorded(replace(config, train=train), parts), parts


def free_memory(device: torch.device) -> int:
    """Return the free memory of a CUDA device in bytes."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def measured(
    config: Config, parts: build.Parts, data: DataModule, loss: nn.Module, device: torch.device
) -> float:
    """Return the bytes that a run needs on a CUDA device, or infinity if it does not fit."""
    # The measurement must not change the initial weights of the run.
    with torch.random.fork_rng([]):
        try:
            needed: float = _measured(config, parts, data, copy.deepcopy(loss), device)
        except torch.OutOfMemoryError:
            needed = float("inf")
        except ConfigError:
            # Not every network can recompute its activations.
            if not parts["backbone"].arguments.get("checkpointing"):
                raise
            needed = float("inf")

    gc.collect()  # the error kept references to tensors
    torch.cuda.empty_cache()
    return needed


def _measured(
    config: Config, parts: build.Parts, data: DataModule, loss: nn.Module, device: torch.device
) -> int:
    """Measure a forward and a backward pass of a micro-batch of black images, in bytes."""
    train = config.train
    classes = data.train.classes
    size = data.transform.image_size
    model = build.model(parts, classes, pretrained=False)
    model.to(device).to(memory_format=memory_format(channels_last=train.channels_last)).train()
    for norm in freeze(model, train):
        norm.eval()
    batch = train.micro_batch(distributed.world_size())
    images = torch.zeros(batch, 3, size, size, dtype=torch.uint8, device=device)
    targets = torch.zeros(batch, len(classes), device=device)
    targets[:, 0] = 1  # single-label data needs a label
    word_vectors = None if classes.word_vectors is None else classes.word_vectors.to(device)

    torch.cuda.reset_peak_memory_stats(device)
    with autocast(device, train.precision):
        logits = model(images, word_vectors)
    loss.to(device)(logits.float(), targets).backward()
    peak = int(torch.cuda.max_memory_allocated(device))

    # A run also stores two moments of the optimizer and the moving average. Several ranks store
    # another copy of the gradients.
    copies = 2 + bool(train.ema_decay) + (distributed.world_size() > 1)
    weights = sum(value.nbytes for value in model.parameters() if value.requires_grad)
    return peak + copies * weights
