#!/usr/bin/env python
"""Measure the speed and memory of training and inference.

python scripts/benchmark.py JOB [--json FILE]
"""

import argparse
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.flop_counter import FlopCounterMode

from mldec import build
from mldec.cli import positive, run_command
from mldec.config.compose import compose
from mldec.config.schema import Config
from mldec.data.images import check_decoder, load_image
from mldec.data.labels import from_dense
from mldec.data.loader import Batch, stack
from mldec.data.official_augment import augment_by_pair, cutout
from mldec.data.sampling import SampleRandom, sample_seed
from mldec.data.transforms import RESIZES, View, as_pillow, resized, to_tensor
from mldec.data.types import Classes
from mldec.errors import DataError, say
from mldec.evaluation.options import ModelOptions
from mldec.files.atomic import check_targets, write_json
from mldec.model import Classifier
from mldec.names import numbered_names
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, autocast, processors
from mldec.runtime.environment import environment
from mldec.runtime.signals import StopRequest
from mldec.tools.predict.answers import BATCH_SIZE, BATCH_SIZE_GPU, Predictor, chosen_rule
from mldec.tools.predict.decode import Decoder, decoded
from mldec.tools.predict.engine import open_engine
from mldec.tools.predict.inputs import Inputs
from mldec.training import step as training_step
from mldec.training.step import Learner

# The job `throughput`, and training steps of an experiment on random images.

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


# The job `profile`: time the parts of a training step.

SIDE = {"cuda": 8192, "cpu": 1024}  # size of the square matrices whose product is timed
PRODUCT_ROUNDS = 10  # of the matrix product


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
    times = in_turns(jobs, device=device, rounds=PRODUCT_ROUNDS, warmup=2)
    return 2 * side**3 / min(times["product"])


# The job `data`: time the parts of the training transform on one core.

PARTS = ("seeding", "decode", "resize", "cutout", "operations", "tensor", "all")
SIZE = 448  # pixels per side of a training image
ROUNDS = 15  # of the transform; the median is reported
IMAGES = 40  # per round and pipeline of the transform

# Named steps that turn the path of an image file into a training image [3, S, S]. The arguments of
# a step are the result of the previous step and the random generator of the image.
Pipeline = dict[str, Callable[[Any, SampleRandom], Any]]


def pipeline(size: int, *, decoder: str = "pillow", resize: str = "pillow") -> Pipeline:
    """Return the steps of `TrainTransform` with the settings of the official recipe."""
    prepare = RESIZES[resize]
    return {
        "decode": lambda path, _: load_image(path, lambda image: image, decoder=decoder),
        "resize": lambda image, _: as_pillow(resized(prepare(image), (size, size), "bilinear")),
        "cutout": lambda image, rng: cutout(image, View().cutout, rng),
        "operations": augment_by_pair,
        "tensor": lambda image, _: to_tensor(image),
    }


def data(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time the training transform with the default decoder and with the fast one."""
    check_decoder("simplejpeg")
    pipelines = {
        "default": pipeline(SIZE),
        "fast": pipeline(SIZE, decoder="simplejpeg", resize="tensor"),
    }
    yield time_pipelines(pipelines, photos_in(args.folder))


def photos_in(folder: str) -> list[str]:
    """Return the paths of at most `IMAGES` photos in a folder. Members of tar files are skipped."""
    paths = [item.path for item in Inputs([folder]) if item.path == item.name]
    return paths[:: max(1, len(paths) // IMAGES)][:IMAGES]


def time_pipelines(pipelines: Mapping[str, Pipeline], files: Sequence[str]) -> dict[str, float]:
    """Time pipelines alternately on image files.

    Returns NAME_PART_ms, the median processor time per image, and NAME_images_per_second.
    """
    torch.set_num_threads(1)  # as in a loader process
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(ROUNDS + 1):
        for name, steps in pipelines.items():
            seconds = _seconds_per_part(steps, files, turn)
            # The first round is a warm-up.
            if turn > 0:
                rounds[name].append(seconds)

    figures = {}
    for name, times in rounds.items():
        for part in PARTS:
            median = statistics.median(seconds[part] for seconds in times)
            figures[f"{name}_{part}_ms"] = 1000 * median
        figures[f"{name}_images_per_second"] = 1000 / figures[f"{name}_all_ms"]
    return figures


def _seconds_per_part(steps: Pipeline, files: Sequence[str], turn: int) -> dict[str, float]:
    spent = dict.fromkeys(PARTS, 0.0)
    for number in range(IMAGES):
        # This frees the previous image outside of the measurement.
        value: Any = files[number % len(files)]

        start = time.process_time()
        rng = SampleRandom(sample_seed(0, turn, number))
        end = time.process_time()
        spent["seeding"] += (end - start) / IMAGES
        for part, step in steps.items():
            start = end
            value = step(value, rng)
            end = time.process_time()
            spent[part] += (end - start) / IMAGES

    spent["all"] = sum(spent.values())
    return spent


# The job `predict`: images/s of `mldec predict`.


def predict(args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Time `mldec predict`, decoding alone and the model alone. Yields figures after each round.

    `bound` is the highest possible speed of predict: 1 / (1 / decode + 1 / model) if both share the
    processors, and min(decode, model) with a GPU. `share` is the measured speed divided by `bound`.
    All figures are medians over the rounds, in images/s.
    """
    engine = open_engine(ModelOptions(checkpoint=args.checkpoint, device=args.device))
    on_gpu = engine.device.type == "cuda"
    batch_size = BATCH_SIZE_GPU if on_gpu else BATCH_SIZE
    items = list(islice(Inputs([args.images]), args.count))
    decoder = Decoder(engine.transform, decoder=engine.decoder)

    # The model is timed on one batch in memory, with repeated images if there are few.
    images = []
    for item in items[:batch_size]:
        image = decoder[item]
        if isinstance(image, torch.Tensor):
            images.append(image)
    if len({image.shape for image in images}) != 1:
        raise DataError(f"{args.images}: no readable images of one size; choose other images")
    batch = torch.stack((images * batch_size)[:batch_size])
    if on_gpu:
        batch = batch.pin_memory()
    predictor = Predictor(engine, chosen_rule(engine, content="top"))

    def decode() -> None:
        for _ in decoded(items, decoder, batch_size=batch_size, workers=processors()):
            pass

    def score() -> None:
        for start in range(0, len(items), batch_size):
            scores = engine.answer(batch[: len(items) - start]).scores
        scores.cpu()  # the only synchronization with a GPU

    def answer() -> None:
        for _ in predictor.rows(iter(items), StopRequest()):
            pass

    jobs: dict[str, Callable[[], None]] = {"decode": decode, "model": score, "predict": answer}
    yield {"images": len(items), "workers": processors()}
    rounds: dict[str, list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        speeds = {}
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            speeds[name] = len(items) / (time.perf_counter() - start)

        speeds["bound"] = 1 / (1 / speeds["decode"] + 1 / speeds["model"])
        if on_gpu:
            speeds["bound"] = min(speeds["decode"], speeds["model"])
        speeds["share"] = speeds["predict"] / speeds["bound"]
        # The first round is a warm-up: files are read from the disk.
        if number > 0:
            for name, speed in speeds.items():
                rounds[name].append(speed)
            yield {name: statistics.median(values) for name, values in rounds.items()}


# The command line. Each job is a function that yields dictionaries of figures.

Job = Callable[[argparse.Namespace], Iterable[dict[str, Any]]]
JOBS: dict[str, tuple[Job, str]] = {
    "throughput": (
        throughput,
        "images/s of training and inference of an experiment, on random images",
    ),
    "profile": (
        profile,
        "time of each part of a training step, and its speed relative to a matrix product",
    ),
    "data": (
        data,
        "time of each part of the training transform, on one core and your photos",
    ),
    "predict": (
        predict,
        "images/s of mldec predict on your photos, and of decoding and the model alone",
    ),
}


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Add the options of jobs that train an experiment."""
    parser.add_argument("--experiment", default="coco_tresnet_l", help="default: coco_tresnet_l")
    parser.add_argument("--classes", type=positive, default=80, help="default: 80")
    parser.add_argument("--repeats", type=positive, default=20, help="timed steps (default: 20)")
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as train.precision=bf16"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = arguments.add_subparsers(required=True, dest="job", metavar="JOB", title="jobs")
    jobs = {}
    for name, (_, purpose) in JOBS.items():
        jobs[name] = commands.add_parser(name, help=purpose, description=f"Measure {purpose}.")
        jobs[name].add_argument(
            "--json", metavar="FILE", help="write figures, hardware, versions, date and commit"
        )

    add_experiment(jobs["throughput"])
    jobs["throughput"].add_argument(
        "--beside", metavar="KEY=VALUE", help="alternate with steps that have this setting changed"
    )
    add_experiment(jobs["profile"])
    jobs["data"].add_argument("folder", metavar="FOLDER", help="folder of photos")
    predict = jobs["predict"]
    predict.add_argument("checkpoint", help="as for mldec predict")
    predict.add_argument("images", metavar="FOLDER", help="folder of photos")
    predict.add_argument(
        "--count", type=positive, default=512, help="images per round (default: 512)"
    )
    predict.add_argument("--rounds", type=positive, default=5, help="timed rounds (default: 5)")
    predict.add_argument("--device", default="auto", help="auto, cpu, mps or cuda")
    return arguments


def run(args: argparse.Namespace) -> None:
    """Run a job, print its figures, and write them to the file of --json."""
    check_targets(json=args.json)
    job, _ = JOBS[args.job]
    record(args.job, job(args), args.json)


def record(name: str, measured: Iterable[dict[str, Any]], file: str | None) -> None:
    """Print the figures of a benchmark, and write them with the environment to a JSON file.

    The file is written after each item, so that an interrupted job leaves its first figures.
    """
    figures: dict[str, Any] = {}
    machine = environment()
    for new_figures in measured:
        figures |= new_figures
        if file:
            write_json(file, {"benchmark": name, "figures": figures, "environment": machine})
    for key, value in figures.items():
        text = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
        say(f"  {key:<36} {text}")


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, run)


if __name__ == "__main__":
    main()
