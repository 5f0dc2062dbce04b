"""Evaluate a model on validation images, for the trainer and for the command `mldec.evaluate`."""

import argparse
import csv
import io
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from mldec import build
from mldec.cli import open_model
from mldec.config.compose import override
from mldec.config.schema import Config, Precision
from mldec.data.base import Classes, DataModule
from mldec.data.loader import Batch, eval_loader, unwrap
from mldec.errors import CheckpointError, say
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files.results import check_targets, to_json, write_result
from mldec.runtime import distributed, out_of_memory
from mldec.runtime.console import on_terminal

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


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context of a forward pass in a precision; it does nothing for fp32."""
    precision = precision.on(device.type)
    enabled = precision in AUTOCAST
    return torch.autocast(device.type, dtype=AUTOCAST.get(precision), enabled=enabled)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: DataModule,
    config: Config,
    *,
    device: torch.device,
    progress: Any = None,
) -> Results:
    """Run each validation image through a model once, and compute the metrics of the dataset.

    Args:
        model: images uint8 [B, 3, H, W] and queries [K, D] or None -> logits [B, K]. It is in
            evaluation mode meanwhile, and afterwards in the mode that it was in.
        data: the dataset; its evaluator determines the metrics.
        config: for the batch size, workers and precision.
        device: of the model.
        progress: wraps the batches, such as `tqdm`; None for no progress bar.

    Returns:
        The results, the same on every process.

    Raises:
        DataError: if a score is not finite, or from the dataset.
    """
    split, train = data.val, config.train
    loader = eval_loader(
        data,
        batch_size=train.eval_batch_size,
        workers=train.workers,
        pin=device.type == "cuda",
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    queries = None if split.classes.queries is None else split.classes.queries.to(device)

    # An empty batch first: with few images a process may get no other.
    evaluator = data.evaluator()
    nothing = torch.zeros(0, len(split.classes))
    evaluator.update(nothing, nothing)

    batches: Iterable[Batch] = unwrap(loader)
    if progress:
        batches = progress(batches, total=len(loader))
    bad: list[str] = []
    was_training = model.training
    model.eval()
    for batch in batches:
        bad += batch.bad
        if len(batch.images):
            with autocast(device, train.precision):
                logits = model(batch.images.to(device, non_blocking=True), queries)
            evaluator.update(logits.float(), batch.targets)
    model.train(was_training)

    # The evaluator gathers the scores of all processes by itself.
    bad = [message for messages in distributed.gather(bad) for message in messages]
    metrics = evaluator.compute()
    confusions = evaluator.pairs() if isinstance(evaluator, SingleLabelEvaluator) else None
    return Results(metrics, evaluator.per_class(), len(split.dataset) - len(bad), bad, confusions)


def left_out(results: Results) -> list[str]:
    """Return at most one line, which names images that could not be read."""
    if not results.bad:
        return []

    names = "; ".join(results.bad[:10])
    if len(results.bad) > 10:
        names += "; ..."
    return [f"{len(results.bad)} validation images are left out, {results.images:,} count: {names}"]


def check_queries(trained: Classes, current: Classes, path: str | Path) -> None:
    """Check that a checkpoint can score the classes of the data.

    A zero-shot model scores any classes that have word vectors, another model only its own classes.

    Args:
        trained: the classes of the checkpoint.
        current: the classes of the data.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if the classes differ, or word vectors of the same width are missing.
    """
    if trained.queries is None:
        check_classes(trained, current, path)
        return

    width = trained.queries.shape[1]
    vectors = "none"
    if current.queries is not None:
        vectors = f"vectors of {current.queries.shape[1]} numbers"

    if current.queries is None or current.queries.shape[1] != width:
        raise CheckpointError(
            f"{path} asks by word vectors of {width} numbers, the data has {vectors}: "
            f"choose the vectors of its training"
        )


def check_classes(trained: Classes, current: Classes, path: str | Path) -> None:
    """Check that the classes of a checkpoint are those of the data, in the same order.

    Args:
        trained: the classes of the checkpoint.
        current: the classes of the data.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if names, order or word vectors differ.
    """
    if trained.names == current.names:
        before, now = trained.queries, current.queries
        if before is not None and now is not None and not torch.equal(before, now):
            raise CheckpointError(
                f"{path} is of other word vectors than the data: put the same data.vectors back"
            )
        return

    if len(trained) != len(current):
        raise CheckpointError(
            f"{path} knows {len(trained)} classes, the data has {len(current)}: "
            f"choose data with its classes"
        )

    # With as many classes and other names, at least one name differs.
    pairs = enumerate(zip(trained.names, current.names, strict=True))
    index = next(index for index, (before, now) in pairs if before != now)
    raise CheckpointError(
        f"{path} has other classes than the data: "
        f"number {index} is '{trained.names[index]}' there and '{current.names[index]}' here"
    )


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
    check_targets(args.json, args.csv)
    loaded = open_model(args, torch.device("cpu"))
    config = override(loaded.config, args.settings)
    parts = build.check(config, ["data"])
    device = distributed.pick_device(config.device)
    choose_precision(config, args.settings, device)

    with distributed.processes(device):
        data = build.data(parts)
        check_queries(loaded.classes, data.val.classes, args.checkpoint)

        is_hidden = not (on_terminal() and distributed.is_main())
        bar = partial(tqdm, desc="evaluate", leave=False, disable=is_hidden)
        with out_of_memory.explained(config, device):
            results = evaluate(loaded.model.to(device), data, config, device=device, progress=bar)

        if distributed.is_main():
            tell(results, loaded.weights, args, data.val.classes.names)


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
