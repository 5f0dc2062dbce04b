"""The job of `mldec benchmark` that takes a training step apart."""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from mldec import build
from mldec.config.schema import Config
from mldec.data.loader import Batch, labels_of
from mldec.data.types import DataModule
from mldec.errors import UserError
from mldec.files.atomic import replacing
from mldec.runtime.devices import Precision
from mldec.tools.benchmark.throughput import (
    WARM_UP,
    Trial,
    in_turns,
    peak_gib,
    prepare,
    reset_peak,
    settings,
)
from mldec.training.start import check_together
from mldec.training.step import Learner
from mldec.training.trainer import Trainer

TRACED = 3  # steps
# The parts of a step, in the order of the table.
PARTS = {
    "loader": "waiting for the loader",
    "copy": "copying to the device",
    "backbone": "forward pass of the backbone",
    "head": "forward pass of the head",
    "model": "forward pass of the compiled model",
    "loss": "forward pass of the loss",
    "backward": "backward pass",
    "optimizer": "optimiser",
    "ema": "moving average",
    "other": "other",
}

SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices, by type of device
ROUNDS = 10  # of the matrix product


class Stopwatch:
    """Measure the parts of steps; every moment belongs to one part, so that they add up.

    On a GPU a border is an event in its queue: the steps are not slowed by waiting for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open = ["other"]  # the parts that have begun, the innermost last
        self._borders: list[tuple[str, Any]] = []  # the part that ends there, and the moment

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of this context as that of a part, but for parts inside it."""
        self._mark()
        self._open.append(name)
        try:
            with record_function(name):
                yield
        finally:
            self._mark()
            self._open.pop()

    def restart(self) -> None:
        """Forget what was measured so far."""
        self._borders.clear()
        self._mark()

    def seconds(self) -> dict[str, float]:
        """Return the seconds since the restart by part."""
        self._mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

        totals = dict.fromkeys(PARTS, 0.0)
        for (_, start), (name, end) in pairwise(self._borders):
            on_gpu = self.device.type == "cuda"
            totals[name] += start.elapsed_time(end) / 1000 if on_gpu else end - start
        return totals

    def _mark(self) -> None:
        moment: Any = time.perf_counter()
        if self.device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._borders.append((self._open[-1], moment))


class Watched(Tensor):
    """A tensor of a batch whose way to the device is measured."""

    stopwatch: Stopwatch

    def to(self, *args: Any, **options: Any) -> Tensor:
        """Return a plain tensor on the device."""
        with self.stopwatch.part("copy"):
            return self.as_subclass(Tensor).to(*args, **options)


def watched(batch: Batch, stopwatch: Stopwatch) -> Batch:
    """Return a batch whose way to the device is measured."""
    images, targets = batch.images.as_subclass(Watched), batch.targets.as_subclass(Watched)
    images.stopwatch = targets.stopwatch = stopwatch
    return batch._replace(images=images, targets=targets)


@contextmanager
def watching(learner: Learner, stopwatch: Stopwatch) -> Iterator[None]:
    """Measure the parts of each step of a learner, from outside: the step is that of training."""
    functions: dict[str, tuple[Any, str]] = {
        "loss": (learner.loss, "forward"),
        "backward": (torch.autograd, "backward"),
        "optimizer": (learner.optimizer, "step"),
    }
    # What is measured inside a compiled model would be compiled with it.
    if learner.config.train.compile:
        functions["model"] = learner.net, "forward"
    else:
        functions["backbone"] = learner.model.backbone, "forward"
        functions["head"] = learner.model.head, "forward"
    if learner.ema is not None:
        functions["ema"] = learner.ema, "update"

    with ExitStack() as stack:
        for name, (owner, function) in functions.items():
            measured = stopwatch.part(name)(getattr(owner, function))
            stack.enter_context(patch.object(owner, function, measured))
        yield


def profile(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the parts of a training step, and count its floating-point operations.

    The time of a part is its mean over the timed steps. Of the figures, `mfu_percent` is the share
    of the operations per second that a large matrix product reaches in the same run.
    """
    config = settings(args)
    data, source = _data_of(config)
    tried = prepare(config, args.classes if data is None else data.train.classes)
    device, precision = tried.device, config.train.precision.for_device(tried.device)

    with tempfile.TemporaryDirectory() as folder:
        learner, batches, images = _learner(tried, data, Path(folder))
        stopwatch = Stopwatch(device)

        def step() -> None:
            with stopwatch.part("loader"):
                micro_batches = next(batches)
            learner.learn([watched(batch, stopwatch) for batch in micro_batches], images)

        learner.train()
        with watching(learner, stopwatch):
            step_flops = _count_flops(step)
            for _ in range(WARM_UP):
                step()

            reset_peak(device)
            stopwatch.restart()
            for _ in range(args.repeats):
                step()
            parts = {name: spent / args.repeats for name, spent in stopwatch.seconds().items()}

            # A compiled model is one part, any other is two.
            for name in ("backbone", "head") if config.train.compile else ("model",):
                del parts[name]
            seconds = sum(parts.values())
            yield tried.facts(args) | {
                "data": source,
                "batch_size": images,
                "accumulate": config.train.accumulate,
                "workers": config.train.workers,
                "steps": args.repeats,
                "images_per_second": images / seconds,
                "step_ms": 1000 * seconds,
                "step_gflop": step_flops / 1e9,
                "peak_gib": peak_gib(device),
            }
            yield {f"{name}_ms": 1000 * spent for name, spent in parts.items()}
            yield {f"{name}_percent": 100 * spent / seconds for name, spent in parts.items()}
            limit = product_flops(device, precision)
            yield {
                "gflop_per_second": step_flops / seconds / 1e9,
                "product_gflop_per_second": limit / 1e9,
                "mfu_percent": 100 * step_flops / seconds / limit,
            }
            if args.trace:
                _write_trace(args.trace, step)


def _data_of(config: Config) -> tuple[DataModule | None, str]:
    """Return the data of an experiment if it can be read, and what the steps are done with."""
    if config.train.cache_features:
        return None, "random images; their tokens are computed once (train.cache_features)"

    try:
        data = build.data(build.check(config, ["data"]))
        images = len(data.train.dataset)
    except UserError as error:
        return None, f"random images: {error}"
    return data, f"{images:,} training images"


def _learner(
    tried: Trial, data: DataModule | None, folder: Path
) -> tuple[Learner, Iterator[list[Batch]], int]:
    """Return a learner, the micro-batches of its steps without end, and the images of a step."""
    if data is None:
        return tried.learner(), repeat(tried.random_batches()), tried.config.train.batch_size

    loss = build.loss(tried.parts, lambda: labels_of(data.train, tried.config.seed))
    check_together(tried.config, data, loss)
    trainer = Trainer(tried.config, tried.trained, loss, data, folder=folder, device=tried.device)
    return trainer.learner, _steps(trainer), trainer.batches.images_in_step(0)


def _steps(trainer: Trainer) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, epoch by epoch, but for smaller steps."""
    batches = trainer.batches
    for epoch in count():
        batches.epoch, batches.start = epoch, 0
        loaded = iter(trainer.loader)
        for position in range(batches.steps):
            micro_batches = [next(loaded) for _ in range(batches.accumulate)]
            if batches.images_in_step(position) == batches.images_in_step(0):
                yield micro_batches


def _count_flops(step: Callable[[], None]) -> float:
    """Count the floating-point operations of a step of the model as it is written, not compiled."""
    with warnings.catch_warnings():
        # The counter has hooks that a compiled model would call twice.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        with FlopCounterMode(display=False) as counter, torch.compiler.set_stance("force_eager"):
            step()
    return counter.get_total_flops()


def _write_trace(target: str, step: Callable[[], None]) -> None:
    """Write the trace of a few steps; they are slower than without it."""
    # The profiler has a log of its own on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile() as profiler:
        for _ in range(TRACED):
            step()
    with replacing(Path(target)) as file:
        profiler.export_chrome_trace(file.name)


def product_flops(device: torch.device, precision: Precision) -> float:
    """Measure the operations per second of a large matrix product; float32 is TF32 with tf32."""
    side, half = SIDE[device.type], precision.for_device(device).half
    matrices = torch.randn(2, side, side, device=device, dtype=half)
    product = {"product": lambda: matrices[0] @ matrices[1]}

    # The fastest round: what the hardware can do when nothing disturbs it.
    times = in_turns(product, device=device, rounds=ROUNDS, warmup=2)
    return 2 * side**3 / min(times["product"])


def table(figures: dict[str, Any]) -> str:
    """Return the figures of `profile` as text."""
    micro_batches = "" if figures["accumulate"] == 1 else f" in {figures['accumulate']} parts"
    lines = [
        f"{figures['experiment']}, {figures['precision']}, {figures['batch_size']} images"
        f"{micro_batches} of {figures['image_size']} pixels, {figures['classes']} classes; "
        f"mean of {figures['steps']} steps",
        f"data: {figures['data']}",
    ]

    for name, meaning in {**PARTS, "step": "step"}.items():
        if f"{name}_ms" in figures:
            percent = figures.get(f"{name}_percent", 100.0)
            lines.append(f"  {meaning:<36} {figures[f'{name}_ms']:10,.2f} ms {percent:6.1f} %")

    peak = figures["peak_gib"]
    memory = "" if peak is None else f", {peak:.2f} GiB at the peak"
    lines += [
        f"{figures['images_per_second']:,.1f} images/s{memory}",
        f"{figures['step_gflop']:,.1f} GFLOP per step: {figures['gflop_per_second']:,.1f} GFLOP/s, "
        f"{figures['mfu_percent']:.1f} % of the {figures['product_gflop_per_second']:,.1f} GFLOP/s "
        f"of a large matrix product",
    ]
    return "\n".join(lines)
