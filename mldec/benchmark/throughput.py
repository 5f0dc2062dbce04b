"""How steps of an experiment are timed, and the job that measures images per second."""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mldec.config import build
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.loader import Batch, collate
from mldec.data.mixing import Mixing
from mldec.data.table import from_dense
from mldec.data.types import Classes
from mldec.model import Classifier, TokenClassifier
from mldec.runtime import distributed
from mldec.runtime.devices import autocast
from mldec.training.step import Learner

LABEL_SHARE = 0.04  # of 80 classes, how many an image of COCO shows
STEPS = 10_000  # of a run on random images, for its schedule


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Time training steps and inference of an experiment, with random images on the device."""
    config = settings(args)
    tried = prepare(config, args.classes)
    device, batch_size = tried.device, config.train.batch_size

    def seconds(job: Callable[[], Any]) -> float:
        times = in_turns({"job": job}, device=device, rounds=args.repeats, warmup=3)
        return statistics.median(times["job"])

    batches = [
        batch._replace(images=batch.images.to(device), targets=batch.targets.to(device))
        for batch in tried.random_batches()
    ]
    learner = tried.learner()
    learner.train()
    train = seconds(lambda: learner.learn(batches, batch_size))

    # The same weights, without gradients and in the precision of training. A head that was trained
    # on stored tokens answers images with its backbone.
    net = tried.model if config.train.cache_features else learner.net
    net.eval()
    images = tried.random_images(batch_size)

    @torch.no_grad()
    def answer() -> None:
        with autocast(device, config.train.precision):
            net(images, learner.queries)

    infer = seconds(answer)
    return tried.facts(args) | {
        "batch_size": batch_size,
        "train_images_per_second": batch_size / train,
        "infer_images_per_second": batch_size / infer,
        "peak_gib": peak_gib(device),
    }


# An experiment without its data


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
            "precision": train.precision.on(self.device).value,
            "compile": train.compile,
            "channels_last": train.channels_last,
            "image_size": self.image_size,
            "classes": len(self.classes),
        }

    def learner(self) -> Learner:
        """Return a learner for steps on random images."""
        # Some losses count the training labels.
        loss = build.loss(self.parts, lambda: from_dense(self._targets(1000).numpy()))
        queries = self.classes.queries
        return Learner(
            self.config, self.trained, loss, device=self.device, steps=STEPS, queries=queries
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

        is_mixed = config.mix.on or config.mix.soft
        mixing = Mixing(config.mix, self.classes) if is_mixed else None
        keys = [(0, index, 0) for index in range(count)]
        samples = list(zip(images.cpu(), self._targets(count), keys, strict=True))
        batches = []
        for part in range(config.train.accumulate):
            batch = collate(samples[part :: config.train.accumulate], mixing=mixing)
            assert isinstance(batch, Batch)
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


def settings(args: argparse.Namespace) -> Config:
    """Return the config of an experiment and of the settings behind it on the command line."""
    return compose([f"+experiment={args.experiment}", *args.settings]).on(processes=1)


def prepare(config: Config, classes: Classes | int) -> Trial:
    """Build the model of an experiment for the classes of its data, or a number of made-up ones."""
    parts = build.complete(build.check(config, ["backbone", "head", "loss"]))
    device = distributed.pick_device(config.device)
    train = config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)

    torch.manual_seed(config.seed)
    if isinstance(classes, int):
        # Zero-shot heads, and only they, have a width of word vectors. A loss for both kinds of
        # data takes several labels per image.
        names = tuple(f"class {number}" for number in range(classes))
        word_dim = parts["head"].arguments.get("word_dim")
        queries = None if word_dim is None else torch.randn(classes, word_dim)
        exclusive = getattr(parts["loss"].target, "exclusive", None) is True
        classes = Classes(names, exclusive, queries)
    model = build.model(parts, classes, pretrained=False).to(device)
    return Trial(config, parts, device, classes, model)


# Time and memory


def in_turns(
    jobs: Mapping[str, Callable[[], Any]], *, device: torch.device, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Time several jobs in turns, so that all of them meet the same load of the machine.

    One thread on a CPU is measured in processor time, which other processes hardly change. Returns
    the seconds of each job in each round after those of `warmup`.
    """
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter

    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(warmup + rounds):
        for name, job in jobs.items():
            start = clock()
            job()

            # A kernel is only queued when the call returns.
            if not on_cpu:
                torch.cuda.synchronize(device)
            if turn >= warmup:
                times[name].append(clock() - start)
    return times


def times_as_long(times: Mapping[str, list[float]], job: str, other: str) -> float:
    """Return how many times as long as another job one takes: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(times[job], times[other], strict=True))


def peak_gib(device: torch.device) -> float:
    """Return the largest memory so far: of the device, or on a CPU of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
