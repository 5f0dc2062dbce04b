"""The job `profile`: time the parts of a training step."""

import argparse
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from mldec.runtime.devices import Precision
from mldec.tools.benchmark.throughput import build_trial, compose_experiment, in_turns, peak_gib
from mldec.training import step as training_step
from mldec.training.step import Learner

SIDE = {"cuda": 8192, "cpu": 1024}  # size of the square matrices whose product is timed
ROUNDS = 10  # of the matrix product


class Stopwatch:
    """Measures the time in functions. GPU times are from CUDA events, without synchronization."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans: list[tuple[str, Any, Any]] = []  # name, start and end of each call

    def measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are measured."""

        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            start = self._moment()
            result = function(*args, **options)
            self.spans.append((name, start, self._moment()))
            return result

        return run

    def seconds(self) -> dict[str, float]:
        """Return the total seconds by name."""
        if self.on_gpu:
            torch.cuda.synchronize()
        totals: dict[str, float] = defaultdict(float)
        for name, start, end in self.spans:
            totals[name] += start.elapsed_time(end) / 1000 if self.on_gpu else end - start
        return totals

    def _moment(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def patched_parts(learner: Learner, stopwatch: Stopwatch) -> Iterator[None]:
    """Patch the functions of the parts of a training step, so that they are measured."""
    functions: dict[str, tuple[Any, str]] = {
        "copy": (training_step, "to_device"),
        "loss": (learner.loss, "forward"),
        "backward": (torch.autograd, "backward"),
        "optimizer": (learner.optimizer, "step"),
    }
    # A patched part of a compiled model would change the compiled graph.
    if learner.config.train.compile:
        functions["model"] = (learner.net, "forward")
    else:
        functions["backbone"] = (learner.model.backbone, "forward")
        functions["head"] = (learner.model.head, "forward")
    if learner.ema is not None:
        functions["ema"] = (learner.ema, "update")

    with ExitStack() as stack:
        for name, (owner, function) in functions.items():
            measured = stopwatch.measured(name, getattr(owner, function))
            stack.enter_context(patch.object(owner, function, measured))
        yield


def profile(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the parts of a training step on random images, and count its operations.

    `mfu_percent` is the speed of a step as a percentage of the speed of a large matrix product.
    """
    config = compose_experiment(args)
    trial = build_trial(config, args.classes)
    batch_size = config.train.batch_size
    learner = trial.learner()
    batches = trial.random_batches()
    stopwatch = Stopwatch(trial.device)

    learner.train()
    step = stopwatch.measured("step", partial(learner.learn, batches, batch_size))
    with patched_parts(learner, stopwatch):
        step_flops = _count_flops(step)
        peak = peak_gib(step, trial.device)
        stopwatch.spans.clear()
        for _ in range(args.repeats):
            step()
        parts = stopwatch.seconds()

        seconds = parts.pop("step") / args.repeats
        yield trial.facts(args) | {
            "batch_size": batch_size,
            "accumulate": config.train.accumulate,
            "steps": args.repeats,
            "images_per_second": batch_size / seconds,
            "step_ms": 1000 * seconds,
            "step_gflop": step_flops / 1e9,
            "peak_gib": peak,
        }
        parts["other"] = seconds * args.repeats - sum(parts.values())
        for name, total in parts.items():
            spent = total / args.repeats
            yield {f"{name}_ms": 1000 * spent, f"{name}_percent": 100 * spent / seconds}
        limit = product_flops(trial.device, config.train.precision.for_device(trial.device))
        yield {
            "gflop_per_second": step_flops / seconds / 1e9,
            "product_gflop_per_second": limit / 1e9,
            "mfu_percent": 100 * step_flops / seconds / limit,
        }


def _count_flops(step: Callable[[], None]) -> float:
    """Count the floating-point operations of a training step, without compilation."""
    with warnings.catch_warnings():
        # A compiled model would call the hooks of the counter twice.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        with FlopCounterMode(display=False) as counter, torch.compiler.set_stance("force_eager"):
            step()
    return counter.get_total_flops()


def product_flops(device: torch.device, precision: Precision) -> float:
    """Measure the operations per second of a large matrix product; float32 may use TF32."""
    side = SIDE[device.type]
    matrices = torch.randn(2, side, side, device=device, dtype=precision.for_device(device).half)

    # The fastest round is the least disturbed one.
    jobs = {"product": lambda: matrices[0] @ matrices[1]}
    times = in_turns(jobs, device=device, rounds=ROUNDS, warmup=2)
    return 2 * side**3 / min(times["product"])
