"""Evaluate a model on validation images, for the trainer and for the command `mldec.evaluate`."""

import argparse
import csv
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import logit
from torch import Tensor, nn
from tqdm import tqdm

from mldec import build
from mldec.calibration.stored import chosen_thresholds
from mldec.checkpoint import Calibrated, Loaded, load_model, scoring
from mldec.cli import chosen_model
from mldec.config.compose import override
from mldec.config.schema import Config
from mldec.data.base import DataModule
from mldec.data.loader import Batch, eval_loader
from mldec.data.workers import unwrap
from mldec.errors import CheckpointError, ConfigError, DataError, say
from mldec.evaluators import Evaluator, Thresholded
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files.results import STANDARD_OUTPUT, check_targets, to_json, write_result
from mldec.runtime import distributed, out_of_memory
from mldec.runtime.console import on_terminal
from mldec.runtime.devices import Precision

log = logging.getLogger("mldec")

COUNT = "classes_"  # starts the names of metrics that are numbers of classes, not percentages
AUTOCAST = {Precision.fp16: torch.float16, Precision.bf16: torch.bfloat16}


@dataclass(frozen=True)
class Results:
    """The results of an evaluation."""

    metrics: dict[str, float]  # percentages by name
    per_class: dict[str, list[float]]  # K values per column
    images: int  # that count
    bad: list[str]  # one message per image that was left out
    # Label, prediction and number of images, most frequent first; None for multi-label data.
    confusions: list[tuple[int, int, int]] | None


class Scores(NamedTuple):
    """What a model says of the n validation images that can be read, and their labels."""

    indices: np.ndarray  # in the dataset, int64 [n]
    labels: np.ndarray  # 1 (present), 0 (absent) or -1 (not annotated), int8 [n, K]
    logits: np.ndarray  # float32 [n, K]
    bad: list[str]  # one message per image that cannot be read


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context of a forward pass in a precision; it does nothing for fp32."""
    precision = precision.on(device.type)
    enabled = precision in AUTOCAST
    return torch.autocast(device.type, dtype=AUTOCAST.get(precision), enabled=enabled)


@torch.no_grad()
def score(
    models: Sequence[nn.Module],
    data: DataModule,
    config: Config,
    *,
    device: torch.device,
    progress: Any = None,
) -> Iterator[tuple[Batch, list[Tensor]]]:
    """Yield each batch of validation images of this process with the logits of each model.

    Args:
        models: images uint8 [B, 3, H, W] and queries [K, D] or None -> logits [B, K]; in evaluation
            mode.
        data: the dataset.
        config: for the batch size, workers and precision.
        device: of the model.
        progress: wraps the batches, such as `tqdm`; None for no progress bar.

    Yields:
        The batch, and float32 [b, K] on the device per model, or [0] if no image of the batch can
        be read.

    Raises:
        DataError: from the dataset.
    """
    train, queries = config.train, data.val.classes.queries
    loader = eval_loader(
        data,
        batch_size=train.eval_batch_size,
        workers=train.workers,
        pin=device.type == "cuda",
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    queries = None if queries is None else queries.to(device)

    batches: Iterable[Batch] = unwrap(loader)
    if progress:
        batches = progress(batches, total=len(loader))
    for batch in batches:
        if not len(batch.images):
            yield batch, [torch.empty(0) for _ in models]
            continue

        images = batch.images.to(device, non_blocking=True)
        with autocast(device, train.precision):
            logits = [model(images, queries) for model in models]
        yield batch, [each.float() for each in logits]


def all_scores(
    model: nn.Module, data: DataModule, config: Config, *, device: torch.device, path: str
) -> Scores:
    """Score all validation images, with a progress bar on a terminal.

    Args:
        model: as each of `score`; it is moved to the device and back to the CPU.
        data: the dataset.
        config: as for `score`.
        device: that computes.
        path: of the checkpoint, for messages.

    Raises:
        DataError: if a score is not finite, or from the dataset.
    """
    # Filled batch by batch: two copies of all scores may not fit in memory.
    shape = len(data.val.dataset), len(data.val.classes)
    indices = np.zeros(shape[0], np.int64)
    labels, logits = np.zeros(shape, np.int8), np.zeros(shape, np.float32)
    count = 0
    bad: list[str] = []

    bar = partial(tqdm, desc=f"score {path}", leave=False, disable=not on_terminal())
    with out_of_memory.explained(lambda: memory_advice(config, device)):
        model.to(device).eval()
        for batch, [batch_logits] in score([model], data, config, device=device, progress=bar):
            bad += batch.bad
            if len(batch.images):
                rows = slice(count, count + len(batch.images))
                indices[rows] = batch.indices.numpy()
                # With data.sizes=true a label is a code of the sizes of objects; each of them means
                # present.
                labels[rows] = batch.targets.clamp(max=1).numpy()
                logits[rows] = batch_logits.cpu().numpy()
                count = rows.stop
    model.cpu()

    if not np.isfinite(logits[:count]).all():
        raise DataError(f"{path}: a score is not finite; look at the weights of the checkpoint")
    return Scores(indices[:count], labels[:count], logits[:count], bad)


def evaluate(
    model: nn.Module,
    data: DataModule,
    config: Config,
    *,
    device: torch.device,
    progress: Any = None,
    logit_threshold: float | Tensor | None = None,
    observe: Callable[[Batch, Tensor], None] | None = None,
) -> Results:
    """Run each validation image through a model once, and compute the metrics of the dataset.

    The arguments and errors are those of `evaluate_all`.
    """
    [results] = evaluate_all(
        [model],
        data,
        config,
        device=device,
        progress=progress,
        logit_threshold=logit_threshold,
        observe=observe,
    )
    return results


def evaluate_all(
    models: Sequence[nn.Module],
    data: DataModule,
    config: Config,
    *,
    device: torch.device,
    progress: Any = None,
    logit_threshold: float | Tensor | None = None,
    observe: Callable[[Batch, Tensor], None] | None = None,
) -> list[Results]:
    """Load each validation image once for all models, and compute the metrics of each.

    Args:
        models: one or more, as for `score`. They are in evaluation mode meanwhile, and afterwards
            in the mode that they were in.
        data: the dataset; its evaluator determines the metrics.
        config: as for `score`.
        device: of the model.
        progress: as for `score`.
        logit_threshold: one for all classes or float64 [K], instead of that of the data's settings;
            see `Thresholded`.
        observe: also called with each batch of this process and the logits of the first model,
            float32 [b, K].

    Returns:
        The results per model, the same on every process.

    Raises:
        ConfigError: if the evaluator of the data has no threshold, and one is given.
        DataError: if a score is not finite, or from the dataset.
    """
    evaluators = [_evaluator(data, logit_threshold) for _ in models]

    bad: list[str] = []
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    for batch, logits in score(models, data, config, device=device, progress=progress):
        bad += batch.bad
        if not len(batch.images):
            continue
        for evaluator, each in zip(evaluators, logits, strict=True):
            evaluator.update(each, batch.targets)
        if observe is not None:
            observe(batch, logits[0])
    for model, mode in zip(models, modes, strict=True):
        model.train(mode)

    # The evaluators gather the scores of all processes by themselves.
    bad = [message for messages in distributed.gather(bad) for message in messages]
    return [_results(evaluator, len(data.val.dataset), bad) for evaluator in evaluators]


def _evaluator(data: DataModule, logit_threshold: float | Tensor | None) -> Evaluator:
    """Return an evaluator of the data, ready for its first batch; see `evaluate_all`."""
    evaluator = data.evaluator()
    if logit_threshold is not None:
        if not isinstance(evaluator, Thresholded):
            raise ConfigError("data: its evaluator takes no thresholds of a checkpoint")
        evaluator.logit_threshold = logit_threshold

    # An empty batch first: with few images a process may get no other.
    nothing = torch.zeros(0, len(data.val.classes))
    evaluator.update(nothing, nothing)
    return evaluator


def _results(evaluator: Evaluator, images: int, bad: list[str]) -> Results:
    """Return what an evaluator says of a number of images, of which some cannot be read."""
    metrics = evaluator.compute()
    confusions = evaluator.pairs() if isinstance(evaluator, SingleLabelEvaluator) else None
    return Results(metrics, evaluator.per_class(), images - len(bad), bad, confusions)


def memory_advice(config: Config, device: torch.device) -> str:
    """Return the message for a run or an evaluation that does not fit in memory.

    It names batch size, image size and peak memory, and the settings that lower them.
    """
    train = config.train
    micro_batch = train.micro_batch(distributed.world_size())
    image_size = config.data.get("image_size", "the default")

    peak = half = ""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device) / 2**30
        capacity = torch.cuda.mem_get_info(device)[1] / 2**30
        peak = f", {used:.1f} GiB of {capacity:.1f} at the peak"

        # Half precision is advised on CUDA only: on a CPU it is slow.
        if train.precision.on(device.type) is Precision.fp32:
            half = "train.precision=bf16, "

    # More micro-batches of the same size would be a larger batch.
    smaller = f"train.accumulate={2 * train.accumulate}"
    if train.batch_per_gpu is not None:
        smaller += f" train.batch_per_gpu={max(1, train.batch_per_gpu // 2)}"

    return (
        f"out of memory on {device}: {micro_batch} training images at a time on each process, "
        f"{train.eval_batch_size} in evaluation, at {image_size} pixels{peak}; "
        f"for the same batch in smaller pieces pass {smaller}; "
        f"{half}train.eval_batch_size and data.image_size help too"
    )


def left_out(results: Results) -> list[str]:
    """Return at most one line, which names images that could not be read."""
    if not results.bad:
        return []

    names = "; ".join(results.bad[:10])
    if len(results.bad) > 10:
        names += "; ..."
    return [f"{len(results.bad)} validation images are left out, {results.images:,} count: {names}"]


def report(results: Results, weights: str, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of `--json`, before `to_json`; an undefined value, such as an AP, is NaN.

    Args:
        results: of the evaluation.
        weights: "ema" or "raw".
        path: of the checkpoint.
        names: of the K classes.
    """
    content: dict[str, Any] = {
        "metrics": results.metrics,
        "images": results.images,
        "left_out": results.bad,
        "weights": weights,
        "checkpoint": path,
    }
    if results.confusions is not None:
        content["confusions"] = [
            {"label": names[label], "prediction": names[prediction], "images": images}
            for label, prediction, images in results.confusions
        ]

    # From columns to one entry per class.
    columns = results.per_class.items()
    content["per_class"] = {
        name: {key: column[index] for key, column in columns} for index, name in enumerate(names)
    }
    return content


def table(metrics: dict[str, float]) -> str:
    """Return the metrics as lines of text: percentages first, numbers of classes below them."""
    width = max(len(name) for name in metrics)
    percentages, counts = [], []
    for name, value in metrics.items():
        if name.startswith(COUNT):
            counts.append(f"  {name:<{width}}  {value:7.0f}")
        else:
            percentages.append(f"  {name:<{width}}  {value:7.3f}")

    if counts:
        counts.insert(0, "number of classes:")
    return "\n".join(percentages + counts)


def to_csv(results: Results, names: tuple[str, ...]) -> str:
    """Return the content of `--csv`: a heading, and one row per class."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["class", *results.per_class])
    writer.writerows(zip(names, *results.per_class.values(), strict=True))
    return text.getvalue()


def choose_precision(config: Config, settings: list[str], device: torch.device) -> None:
    """Use fp32 on a CPU, where half precision is slow, unless the user chooses a precision.

    Args:
        config: of the checkpoint, with the settings of the command line; it is changed.
        settings: of the command line, as key=value.
        device: that evaluates.
    """
    recorded = config.train.precision
    slow = recorded.warning(device.type)
    if slow is None:
        return

    is_chosen = any(setting.startswith("train.precision=") for setting in settings)
    if is_chosen:
        log.warning(slow)
        return

    config.train.precision = Precision.fp32
    log.info(
        f"evaluated in fp32 on a CPU; "
        f"train.precision={recorded.value}, as in the run, is much slower here"
    )


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.evaluate`: load, evaluate, print, and write the files.

    Args:
        args: the command line; see `mldec.evaluate.parser`.

    Raises:
        UserError: for a wrong setting, or a checkpoint or data that cannot be used.
    """
    # Everything that can be refused at once comes before the data.
    check_targets(args.json, args.csv, args.write_classes)
    if args.write_classes and (args.json or args.csv or args.settings):
        raise ConfigError(
            "--write-classes evaluates nothing: leave out the settings, --json and --csv"
        )
    loaded = load_model(**chosen_model(args))
    if args.write_classes:
        write_classes(loaded, args)
        return
    check_class_names(loaded, args)

    config = override(loaded.config, [*size_setting(args), *args.settings])
    parts = build.check(config, ["data"])
    device = distributed.pick_device(config.device)
    choose_precision(config, args.settings, device)

    with distributed.processes(device):
        data = build.data(parts)
        warn_of_size(data, loaded, args)
        thresholds = chosen_thresholds(data, loaded, args)
        model = scorer(loaded, data, args.checkpoint)

        is_hidden = not (on_terminal() and distributed.is_main())
        bar = partial(tqdm, desc="evaluate", leave=False, disable=is_hidden)
        with out_of_memory.explained(lambda: memory_advice(config, device)):
            results = evaluate(
                model.to(device),
                data,
                config,
                device=device,
                progress=bar,
                logit_threshold=None if thresholds is None else torch.tensor(logit(thresholds)),
            )
        if thresholds is not None:
            column = np.broadcast_to(thresholds, len(data.val.classes)).tolist()
            results.per_class["threshold"] = column

        if distributed.is_main():
            tell(results, loaded.weights, args, data.val.classes.names)


def scorer(loaded: Loaded, data: DataModule, path: str) -> nn.Module:
    """Return a checkpoint's model with calibrated logits, in the order of the data's classes.

    Args:
        loaded: the checkpoint.
        data: whose validation images are scored.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if checkpoint and data have other classes.
    """
    model: nn.Module = loaded.model
    if loaded.calibration is not None:
        model = Calibrated(model, loaded.calibration)
    return scoring(model, loaded.classes, data.val.classes, path)


def check_class_names(loaded: Loaded, args: argparse.Namespace) -> None:
    """Raise a `ConfigError` for --class-names if the classes are those of the data anyway."""
    if args.class_names and loaded.classes.queries is not None:
        raise ConfigError(
            f"--class-names has no effect: {args.checkpoint} scores the classes of the data, "
            f"by their word vectors; leave it out"
        )


def size_setting(args: argparse.Namespace) -> list[str]:
    """Return --image-size as a setting, since data=NAME brings an image size of its own."""
    return [] if args.image_size is None else [f"data.image_size={args.image_size}"]


def warn_of_size(data: DataModule, loaded: Loaded, args: argparse.Namespace) -> None:
    """Warn of an image size that data=NAME brings, and that is not the checkpoint's."""
    trained, evaluated = loaded.transform.image_size, data.transform.image_size
    is_chosen = any(setting.startswith("data.image_size=") for setting in args.settings)
    if evaluated != trained and not is_chosen:
        log.warning(
            f"evaluated at {evaluated} pixels, the default of this data; {args.checkpoint} is for "
            f"{trained}: pass data.image_size={trained} for that"
        )


def write_classes(loaded: Loaded, args: argparse.Namespace) -> None:
    """Write the names of a checkpoint's classes, as `--class-names` reads them.

    Raises:
        CheckpointError: if it has no classes of its own.
        DataError: if the file cannot be written.
    """
    names = loaded.classes.names
    if not names:
        raise CheckpointError(
            f"--write-classes: {args.checkpoint} names no classes, it scores those of word vectors"
        )

    write_result(args.write_classes, "".join(f"{name}\n" for name in names))
    if args.write_classes != STANDARD_OUTPUT:
        say(f"{args.write_classes}: the names of the {len(names):,} classes of {args.checkpoint}")


def tell(results: Results, weights: str, args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Print the results, and write the files that the command line names.

    Args:
        results: of the evaluation.
        weights: "ema" or "raw".
        args: the command line.
        names: of the K classes.
    """
    for line in left_out(results):
        log.warning(line)
    say(f"{args.checkpoint} ({weights} weights) on {results.images:,} images, percent:")
    say(*table(results.metrics).splitlines())

    if args.json:
        content = report(results, weights, args.checkpoint, names)
        write_result(args.json, to_json(content, indent=1) + "\n")
    if args.csv:
        write_result(args.csv, to_csv(results, names))
