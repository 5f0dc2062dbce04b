"""The job of `mldec.benchmark` that measures how fast photos are answered."""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import islice

import torch

from mldec.checkpoint import load_model, local
from mldec.errors import DataError
from mldec.predict.answers import BATCH_SIZE, BATCH_SIZE_GPU, Answering, Rule
from mldec.predict.engine import Engine, ExportedEngine, TorchEngine, is_exported
from mldec.predict.inputs import Decoder, Inputs, Item, decoded
from mldec.runtime import distributed
from mldec.runtime.devices import processors
from mldec.runtime.signals import StopRequest


def predict(args: argparse.Namespace) -> dict[str, float]:
    """Time `mldec.predict` on real images, beside its two halves alone.

    Decoding alone uses all processors, and so does the model alone, on images in memory. If both
    share the processors, no program can be faster than 1 / (1 / decode + 1 / model); with a model
    on a GPU none can be faster than the slower half. All of it is timed in turns, and `share` is
    the median over the rounds of the speed divided by the bound of the same round.

    Args:
        args: the command line.

    Returns:
        Images per second of each.

    Raises:
        UserError: if the checkpoint or the images cannot be read.
    """
    device = distributed.pick_device(args.device)
    path = local(args.checkpoint)
    engine: Engine
    if is_exported(path):
        engine = ExportedEngine(path)
    else:
        loaded = load_model(path, device=device)
        distributed.prepare_device(device, tf32=loaded.config.train.tf32)
        engine = TorchEngine(loaded)

    on_gpu = device.type == "cuda"
    batch_size = BATCH_SIZE_GPU if on_gpu else BATCH_SIZE
    items = list(islice(Inputs([args.images]), args.count))
    batch = _first_batch(items, Decoder(engine.transform, decoder=engine.decoder), batch_size)

    rule = Rule(classes=engine.classes)
    whole = Answering(engine, rule, device)
    in_turns = Answering(engine, rule, device, workers=0)

    rounds: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):
        jobs: dict[str, Callable[[], None]] = {
            "decode": lambda: _decode(items, engine, batch_size),
            "model": lambda: _score(engine, batch, len(items)),
            "predict": lambda: _answer(whole, items),
            "one_process": lambda: _answer(in_turns, items),
        }
        speeds = {name: len(items) / _seconds(job) for name, job in jobs.items()}
        halves = speeds["decode"], speeds["model"]
        speeds["bound"] = min(halves) if on_gpu else 1 / sum(1 / half for half in halves)

        # The first round warms up: files come from the disk, and the network chooses its kernels.
        if number > 0:
            speeds["share"] = speeds["predict"] / speeds["bound"]
            for name, speed in speeds.items():
                rounds.setdefault(name, []).append(speed)

    figures = {name: statistics.median(speeds) for name, speeds in rounds.items()}
    return {"images": len(items), "workers": processors(), **figures}


def _first_batch(items: list[Item], decoder: Decoder, batch_size: int) -> torch.Tensor:
    """Return a batch of images in memory; repeated if there are few.

    Raises:
        DataError: if none can be read, or they are not of one size.
    """
    images = [decoder[item] for item in items[:batch_size]]
    readable = [image for image in images if isinstance(image, torch.Tensor)]
    if len({image.shape for image in readable}) != 1:
        raise DataError(
            "the first images cannot be read, or the model takes images in sizes of their own: "
            "choose another folder, or a model without --any-size"
        )

    return torch.stack((readable * batch_size)[:batch_size])


def _decode(items: list[Item], engine: Engine, batch_size: int) -> None:
    """Decode images with all processors."""
    decoder = Decoder(engine.transform, decoder=engine.decoder)
    for _ in decoded(items, decoder, batch_size=batch_size, workers=processors()):
        pass


def _score(engine: Engine, batch: torch.Tensor, images: int) -> None:
    """Score about as many images, always the same ones."""
    for start in range(0, images, len(batch)):
        engine.answer(batch[: images - start])


def _answer(answering: Answering, items: list[Item]) -> None:
    """Answer images as `mldec.predict` does."""
    for _ in answering.rows(iter(items), StopRequest()):
        pass


def _seconds(job: Callable[[], None]) -> float:
    """Return how long a job takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start
