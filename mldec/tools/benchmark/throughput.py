"""How steps of an experiment are timed, and the job that measures images per second."""

import argparse
import statistics
import time
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
from mldec.model import Classifier, TokenClassifier
from mldec.runtime import distributed
from mldec.runtime.devices import autocast
from mldec.training.step import Learner

LABEL_SHARE = 0.04  # of 80 classes, how many an image of COCO shows
STEPS = 10_000  # of a run on random images, for its schedule
BLOCKS = 5  # of timed steps, if there are as many
WARM_UP = 3  # steps


def throughput(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time training steps and inference of an experiment, with random images on the device.

    With `--beside` training steps are timed in turns with those of the same experiment with one
    setting changed, and inference is not.
    """
    config = settings(args)
    tried = prepare(config, args.classes)
    device, batch_size = tried.device, config.train.batch_size
    yield tried.facts(args) | {"batch_size": batch_size}

    # The memory is measured before there is a second model.
    learner, step = _training(tried)
    yield {"peak_gib": _peak_of(step, device)}
    jobs = {"train": step}
    if args.beside:
        _, jobs["beside"] = _training(prepare(settings(args, args.beside), args.classes))

    times = in_turns(jobs, device=device, **blocks(args.repeats))
    for name, seconds in times.items():
        yield step_figures(f"{name}_", seconds, batch_size)
    if args.beside:
        ratio = times_as_long(times, "beside", "train")
        beyond = 100 * (1 - ratio)  # percent of our step
        yield {"beside": args.beside, "times_beside": ratio, "beyond_percent": beyond}
        return

    # The same weights, without gradients and in the precision of training. A head that was trained
    # on stored tokens answers images with its backbone.
    net = tried.model if config.train.cache_features else learner.net
    net.eval()
    images = tried.random_images(batch_size)

    @torch.no_grad()
    def answer() -> None:
        with autocast(device, config.train.precision):
            net(images, learner.word_vectors)

    yield {"infer_peak_gib": _peak_of(answer, device)}
    times = in_turns({"infer": answer}, device=device, **blocks(args.repeats))
    yield step_figures("infer_", times["infer"], batch_size)


def _training(tried: "Trial") -> tuple[Learner, Callable[[], Any]]:
    """Return a learner and its step on random images that lie on the device."""
    device, batch_size = tried.device, tried.config.train.batch_size
    batches = [
        batch._replace(images=batch.images.to(device), targets=batch.targets.to(device))
        for batch in tried.random_batches()
    ]
    learner = tried.learner()
    learner.train()
    return learner, lambda: learner.learn(batches, batch_size)


def _peak_of(job: Callable[[], Any], device: torch.device) -> float | None:
    """Warm a job up, and return the largest memory while it is done once more."""
    for _ in range(WARM_UP):
        job()
    reset_peak(device)
    job()
    return peak_gib(device)


@dataclass(frozen=True)
class Trial:
    """An experiment without its data, for one process, and a model with random weights."""

    config: Config
    parts: build.Parts
    device: torch.device
    classes: Classes
    model: Classifier

    @property
    def image_size(self) -> int:
        """The pixels per side of a training image."""
        return int(self.config.data["image_size"])

    @property
    def trained(self) -> Classifier:
        """What the steps of a run train: the model, or with stored tokens its head."""
        if self.config.train.cache_features:
            return TokenClassifier(self.model.backbone, self.model.head)
        return self.model

    def facts(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the figures that say what is measured."""
        train = self.config.train
        return {
            "experiment": args.experiment,
            "settings": args.settings,
            "precision": train.precision.for_device(self.device).value,
            "compile": train.compile,
            "channels_last": train.channels_last,
            "image_size": self.image_size,
            "classes": len(self.classes),
        }

    def learner(self) -> Learner:
        """Return a learner for steps on random images."""
        # Some losses count the training labels.
        loss = build.loss(self.parts, lambda: from_dense(self._targets(1000).numpy()))
        word_vectors = self.classes.word_vectors
        return Learner(
            self.config,
            self.trained,
            loss,
            device=self.device,
            steps=STEPS,
            word_vectors=word_vectors,
        )

    def random_images(self, count: int) -> Tensor:
        """Return random images on the device, uint8 [count, 3, S, S]."""
        shape = (count, 3, self.image_size, self.image_size)
        return torch.randint(256, shape, dtype=torch.uint8, device=self.device)

    def random_batches(self) -> list[Batch]:
        """Return the micro-batches of a step, of random images on the CPU, as a loader would.

        They are mixed, or tokens, if those of the experiment are.
        """
        config, count = self.config, self.config.train.batch_size
        images = self.random_images(count)
        if config.train.cache_features:
            with torch.no_grad(), autocast(self.device, config.train.precision):
                images = self.model.backbone(images).float()

        mixing = build.mixing(config.mix, self.classes)
        keys = [(0, index, 0) for index in range(count)]
        samples = list(zip(images.cpu(), self._targets(count), keys, strict=True))
        batches = []
        for part in range(config.train.accumulate):
            batch = stack(samples[part :: config.train.accumulate], mixing=mixing)
            # From pinned memory a GPU copies while the processor goes on.
            if self.device.type == "cuda":
                pinned = batch.images.pin_memory(), batch.targets.pin_memory()
                batch = batch._replace(images=pinned[0], targets=pinned[1])
            batches.append(batch)
        return batches

    def _targets(self, count: int) -> Tensor:
        """Return random targets, int8 [count, K]: one label per image if the classes exclude."""
        if not self.classes.exclusive:
            return (torch.rand(count, len(self.classes)) < LABEL_SHARE).to(torch.int8)

        labels = torch.randint(len(self.classes), (count,))
        return one_hot(labels, len(self.classes)).to(torch.int8)


def settings(args: argparse.Namespace, *changed: str) -> Config:
    """Return the config of an experiment and of the settings behind it on the command line."""
    words = [f"+experiment={args.experiment}", *args.settings, *changed]
    return compose(words).for_world_size(processes=1)


def prepare(config: Config, classes: Classes | int) -> Trial:
    """Build the model of an experiment for the classes of its data, or a number of made-up ones."""
    parts = build.complete(build.check(config, ["backbone", "head", "loss"]))
    device = distributed.pick_device(config.device)
    train = config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)

    torch.manual_seed(config.seed)
    if isinstance(classes, int):
        # A loss for both kinds of data takes several labels per image.
        names = tuple(f"class {number}" for number in range(classes))
        exclusive = getattr(parts["loss"].target, "exclusive", None) is True
        classes = Classes(names, exclusive)
    model = build.model(parts, classes, pretrained=False).to(device)

    # Zero-shot heads, and only they, have the attribute.
    word_dim = getattr(model.head, "word_dim", None)
    if word_dim is not None and classes.word_vectors is None:
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
    """Time several jobs in turns, so that all of them meet the same load of the machine.

    In its turn a job is done `steps` times before the device is waited for, so that the host may
    run ahead of a GPU as it does in training. One thread on a CPU is measured in processor time,
    which other processes hardly change. Returns the seconds per step of each job in each round
    after those of `warmup`.
    """
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter

    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(warmup + rounds):
        for name, job in jobs.items():
            start = clock()
            for _ in range(steps):
                job()

            # A kernel is only queued when the call returns.
            if not on_cpu:
                torch.cuda.synchronize(device)
            if turn >= warmup:
                times[name].append((clock() - start) / steps)
    return times


def blocks(repeats: int) -> dict[str, int]:
    """Divide a number of timed steps into the rounds of `in_turns` and the steps of each."""
    rounds = min(BLOCKS, repeats)
    return {"rounds": rounds, "steps": repeats // rounds}


def step_figures(prefix: str, seconds: Sequence[float], images: int) -> dict[str, float]:
    """Return the mean of a step over the rounds, how far they are apart, and the images/s."""
    mean = statistics.fmean(seconds)
    return {
        f"{prefix}step_ms": 1000 * mean,
        f"{prefix}spread_percent": 100 * (max(seconds) - min(seconds)) / mean,
        f"{prefix}images_per_second": images / mean,
    }


def times_as_long(times: Mapping[str, list[float]], job: str, other: str) -> float:
    """Return how many times as long as another job one takes: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(times[job], times[other], strict=True))


def reset_peak(device: torch.device) -> None:
    """Let `peak_gib` begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Return the largest memory of a GPU since `reset_peak`; None on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return None
