"""The job `throughput`, and training steps of an experiment on random images."""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mldec import build
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.labels import from_dense
from mldec.data.loader import Batch, stack
from mldec.data.types import Classes
from mldec.model import Classifier
from mldec.names import numbered_names
from mldec.runtime import distributed
from mldec.runtime.devices import autocast
from mldec.training.step import Learner

LABEL_SHARE = 0.04  # share of positive labels, as in COCO
STEPS = 10_000  # length of the learning rate schedule
MAX_ROUNDS = 5
WARM_UP = 3  # steps


def throughput(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time training steps and inference of an experiment on random images.

    If `--beside` is given, a second model with this changed setting is trained alternately, and
    inference is not timed.
    """
    config = compose_experiment(args)
    trial = build_trial(config, args.classes)
    device = trial.device
    batch_size = config.train.batch_size
    yield trial.facts(args) | {"batch_size": batch_size}

    # Measure the memory before a second model is built.
    learner, step = _training_step(trial)
    yield {"peak_gib": peak_gib(step, device)}
    jobs = {"train": step}
    if args.beside:
        changed = compose_experiment(args, args.beside)
        _, jobs["beside"] = _training_step(build_trial(changed, args.classes))

    times = in_turns(jobs, device=device, **split_repeats(args.repeats))
    for name, seconds in times.items():
        yield step_figures(f"{name}_", seconds, batch_size)
    if args.beside:
        ratio = times_as_long(times, "beside", "train")
        yield {"beside": args.beside, "times_beside": ratio, "beyond_percent": 100 * (1 - ratio)}
        return

    # The same weights and precision. Images need the backbone, also if the head trains on tokens.
    net = learner.net.eval()
    images = trial.random_images(batch_size)

    @torch.no_grad()
    def infer() -> None:
        with autocast(device, config.train.precision):
            net(images, learner.word_vectors)

    yield {"infer_peak_gib": peak_gib(infer, device)}
    times = in_turns({"infer": infer}, device=device, **split_repeats(args.repeats))
    yield step_figures("infer_", times["infer"], batch_size)


def _training_step(trial: "Trial") -> tuple[Learner, Callable[[], Any]]:
    """Return a learner, and a function that does a step on images on the device."""
    batches = []
    for batch in trial.random_batches():
        images = batch.images.to(trial.device)
        batches.append(batch._replace(images=images, targets=batch.targets.to(trial.device)))
    learner = trial.learner()
    learner.train()
    return learner, lambda: learner.learn(batches, trial.config.train.batch_size)


@dataclass(frozen=True)
class Trial:
    """Config and model of an experiment, with random weights and without its data."""

    config: Config
    parts: build.Parts
    device: torch.device
    classes: Classes
    model: Classifier

    def facts(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the settings that the figures depend on."""
        train = self.config.train
        return {
            "experiment": args.experiment,
            "settings": args.settings,
            "precision": train.precision.for_device(self.device).value,
            "compile": train.compile,
            "channels_last": train.channels_last,
            "image_size": self.config.data["image_size"],
            "classes": len(self.classes),
        }

    def learner(self) -> Learner:
        """Return a learner for steps on random images."""
        # Some losses count the training labels.
        loss = build.loss(self.parts, lambda: from_dense(self._targets(1000).numpy()))
        options: dict[str, Any] = {"device": self.device, "word_vectors": self.classes.word_vectors}
        return Learner(self.config, self.model, loss, steps=STEPS, **options)

    def random_images(self, count: int) -> Tensor:
        """Return random images on the device, uint8 [count, 3, S, S]."""
        size = self.config.data["image_size"]
        shape = (count, 3, size, size)
        return torch.randint(256, shape, dtype=torch.uint8, device=self.device)

    def random_batches(self) -> list[Batch]:
        """Return the micro-batches of a step on the CPU, like a loader.

        Mixing and cached tokens are applied as in the experiment.
        """
        train = self.config.train
        images = self.random_images(train.batch_size)
        if train.cache_features:
            with torch.no_grad(), autocast(self.device, train.precision):
                images = self.model.backbone(images).float()

        mixing = build.mixing(self.config.mix, self.classes)
        keys = [(0, index, 0) for index in range(len(images))]
        samples = list(zip(images.cpu(), self._targets(len(images)), keys, strict=True))
        batches = []
        for part in range(train.accumulate):
            batch = stack(samples[part :: train.accumulate], mixing=mixing)
            # Copies from pinned memory are asynchronous.
            if self.device.type == "cuda":
                pinned = batch.images.pin_memory()
                batch = batch._replace(images=pinned, targets=batch.targets.pin_memory())
            batches.append(batch)
        return batches

    def _targets(self, count: int) -> Tensor:
        """Return random targets, int8 [count, K]. Exclusive classes have one label per image."""
        if not self.classes.exclusive:
            return (torch.rand(count, len(self.classes)) < LABEL_SHARE).to(torch.int8)
        labels = torch.randint(len(self.classes), (count,))
        return one_hot(labels, len(self.classes)).to(torch.int8)


def compose_experiment(args: argparse.Namespace, *changed: str) -> Config:
    """Return the config of --experiment with the settings of the command line and `changed`."""
    overrides = [f"+experiment={args.experiment}"] + args.settings + list(changed)
    return compose(overrides).for_world_size(processes=1)


def build_trial(config: Config, num_classes: int) -> Trial:
    """Build the model of an experiment for a number of invented classes."""
    parts = build.check(config, ["backbone", "head", "loss"])
    device = distributed.pick_device(config.device)
    train = config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)

    torch.manual_seed(config.seed)
    names = numbered_names(num_classes)
    # Losses that support both multi-label and single-label data get multi-label data.
    exclusive = getattr(parts["loss"].target, "exclusive", None) is True
    classes = Classes(names, exclusive)
    model = build.model(parts, classes, pretrained=False).to(device)

    # Only zero-shot heads have this attribute.
    word_dim = getattr(model.head, "word_dim", None)
    if word_dim is not None:
        classes = replace(classes, word_vectors=torch.randn(len(classes), word_dim))
    return Trial(config, parts, device, classes, model)


def in_turns(
    jobs: Mapping[str, Callable[[], Any]],
    *,
    device: torch.device,
    rounds: int,
    warmup: int = 1,
    steps: int = 1,
) -> dict[str, list[float]]:
    """Time jobs alternately, so that other load of the machine affects them equally.

    A job is called `steps` times per round. Then the device is synchronized. Times on a single CPU
    thread are processor times. Returns the seconds per call in each round after `warmup`.
    """
    on_cpu = device.type == "cpu"
    clock = time.perf_counter
    if on_cpu and torch.get_num_threads() == 1:
        clock = time.process_time
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(warmup + rounds):
        for name, job in jobs.items():
            start = clock()
            for _ in range(steps):
                job()
            if not on_cpu:
                torch.cuda.synchronize(device)
            if turn >= warmup:
                times[name].append((clock() - start) / steps)
    return times


def split_repeats(repeats: int) -> dict[str, int]:
    """Divide a number of timed steps into `rounds` and `steps` of `in_turns`."""
    rounds = min(MAX_ROUNDS, repeats)
    return {"rounds": rounds, "steps": repeats // rounds}


def step_figures(prefix: str, seconds: Sequence[float], images: int) -> dict[str, float]:
    """Return mean and spread of the seconds per step, and images/s."""
    mean = statistics.fmean(seconds)
    return {
        f"{prefix}step_ms": 1000 * mean,
        f"{prefix}spread_percent": 100 * (max(seconds) - min(seconds)) / mean,
        f"{prefix}images_per_second": images / mean,
    }


def times_as_long(times: Mapping[str, list[float]], job: str, other: str) -> float:
    """Return the median over the rounds of the time of a job divided by the time of another."""
    return statistics.median(a / b for a, b in zip(times[job], times[other], strict=True))


def peak_gib(job: Callable[[], Any], device: torch.device) -> float | None:
    """Warm up a job, and return the peak GPU memory of another call; None on a CPU."""
    for _ in range(WARM_UP):
        job()
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    job()
    return torch.cuda.max_memory_allocated(device) / 2**30
