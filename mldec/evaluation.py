"""The one way to a number: `evaluate`, which the trainer calls too, and the work of the command `mldec.evaluate`."""

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

COUNT = "classes_"  # starts the name of what is no percentage
AUTOCAST = {Precision.fp16: torch.float16, Precision.bf16: torch.bfloat16}


@dataclass(frozen=True)
class Results:
    """What an evaluation found: percentages by name, a column of values a class, and the number of images."""

    metrics: dict[str, float]
    per_class: dict[str, list[float]]
    images: int
    bad: list[str]  # what was wrong with each image that was left out
    confusions: (
        list[tuple[int, int, int]] | None
    )  # most frequent first: label, prediction, images; None: no such thing


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context of a forward pass in this precision; a pass-through for fp32."""
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
    """Run the validation images through a model, once each, and compute the dataset's metrics.

    Args:
        model: images uint8 [B, 3, H, W] (, queries) -> logits [B, K]; put in evaluation mode and left as it was.
        data: the dataset; its evaluator says which numbers there are.
        config: for the batch size, workers and precision.
        device: of the model.
        progress: wraps the batches, such as `tqdm`; None for none.

    Returns:
        The results, the same on every process.
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
    batches: Iterable[Batch] = unwrap(loader)
    evaluator = data.evaluator()
    evaluator.update(
        torch.zeros(0, len(split.classes)), torch.zeros(0, len(split.classes))
    )  # all a process may get
    bad: list[str] = []
    was_training = model.training
    model.eval()
    for batch in progress(batches, total=len(loader)) if progress else batches:
        bad += batch.bad
        if len(batch.images):
            with autocast(device, train.precision):
                logits = model(batch.images.to(device, non_blocking=True), queries)
            evaluator.update(logits.float(), batch.targets)
    model.train(was_training)
    bad = [message for messages in distributed.gather(bad) for message in messages]
    metrics = evaluator.compute()
    confusions = evaluator.pairs() if isinstance(evaluator, SingleLabelEvaluator) else None
    return Results(metrics, evaluator.per_class(), len(split.dataset) - len(bad), bad, confusions)


def left_out(results: Results) -> list[str]:
    """Return a line on the images that could not be read, if there are any."""
    if not results.bad:
        return []
    some = "; ".join(results.bad[:10]) + ("; ..." if len(results.bad) > 10 else "")
    return [f"{len(results.bad)} validation images are left out, {results.images:,} count: {some}"]


def check_queries(wanted: Classes, found: Classes, path: str | Path) -> None:
    """Check that a checkpoint can answer for the data: by word vectors it knows any classes, else its own only.

    Raises:
        CheckpointError: if it cannot.
    """
    if wanted.queries is None:
        check_classes(wanted, found, path)
        return
    width = wanted.queries.shape[1]
    if found.queries is None or found.queries.shape[1] != width:
        what = "none" if found.queries is None else f"vectors of {found.queries.shape[1]} numbers"
        raise CheckpointError(
            f"{path} asks by word vectors of {width} numbers, the data has {what}: choose the vectors of its training"
        )


def check_classes(wanted: Classes, found: Classes, path: str | Path) -> None:
    """Raise a `CheckpointError` if a checkpoint's classes are not those of the data, in the same order."""
    if wanted.names == found.names:
        before, now = wanted.queries, found.queries
        if before is not None and now is not None and not torch.equal(before, now):
            raise CheckpointError(
                f"{path} is of other word vectors than the data: put the same data.vectors back"
            )
        return
    if len(wanted) != len(found):
        raise CheckpointError(
            f"{path} knows {len(wanted)} classes, the data has {len(found)}: choose data with its classes"
        )
    place = next(
        i for i, (a, b) in enumerate(zip(wanted.names, found.names, strict=True)) if a != b
    )
    raise CheckpointError(
        f"{path} has other classes than the data: number {place} is '{wanted.names[place]}' there "
        f"and '{found.names[place]}' here"
    )


def report(results: Results, weights: str, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what `--json` writes, before `to_json`: a value that does not exist, such as an AP, is NaN."""
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
    columns = results.per_class.items()
    content["per_class"] = {
        name: {key: column[i] for key, column in columns} for i, name in enumerate(names)
    }
    return content


def table(metrics: dict[str, float]) -> str:
    """Return the metrics as lines of text: percentages, and after them, under their own heading, numbers of classes."""
    width = max(len(name) for name in metrics)
    percent = [
        f"  {name:<{width}}  {value:7.3f}"
        for name, value in metrics.items()
        if not name.startswith(COUNT)
    ]
    counts = [
        f"  {name:<{width}}  {value:7.0f}"
        for name, value in metrics.items()
        if name.startswith(COUNT)
    ]
    return "\n".join(percent + (["number of classes:", *counts] if counts else []))


def to_csv(results: Results, names: tuple[str, ...]) -> str:
    """Return what `--csv` writes: one row per class."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["class", *results.per_class])
    writer.writerows(
        [name, *row] for name, *row in zip(names, *results.per_class.values(), strict=True)
    )
    return text.getvalue()


def choose_precision(config: Config, settings: list[str], device: torch.device) -> None:
    """Evaluate in fp32 on a CPU, where half precision is slow, unless the command line asks for a precision."""
    recorded = config.train.precision
    slow = recorded.warning(device.type)
    if slow is None:
        return
    if any(word.startswith("train.precision=") for word in settings):
        log.warning(slow)
        return
    config.train.precision = Precision.fp32
    log.info(
        f"evaluated in fp32 on a CPU; train.precision={recorded.value}, as in the run, is much slower here"
    )


def run(words: argparse.Namespace) -> None:
    """Load, evaluate, print, write."""
    check_targets(words.json, words.csv)
    loaded = open_model(words, torch.device("cpu"))
    config = override(loaded.config, words.settings)
    parts = build.check(config, ["data"])
    device = distributed.pick_device(config.device)
    choose_precision(config, words.settings, device)
    with distributed.processes(device):
        data = build.data(parts)
        check_queries(loaded.classes, data.val.classes, words.checkpoint)
        bar = partial(
            tqdm,
            desc="evaluate",
            leave=False,
            disable=not (on_terminal() and distributed.is_main()),
        )
        with out_of_memory.explained(config, device):
            results = evaluate(loaded.model.to(device), data, config, device=device, progress=bar)
        if distributed.is_main():
            tell(results, loaded.weights, words, data.val.classes.names)


def tell(results: Results, weights: str, words: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Print the results and write the files that were asked for."""
    for line in left_out(results):
        log.warning(line)
    say(f"{words.checkpoint} ({weights} weights) on {results.images:,} images, percent:")
    say(*table(results.metrics).splitlines())
    if words.json:
        content = report(results, weights, words.checkpoint, names)
        write_result(words.json, to_json(content, indent=1) + "\n")
    if words.csv:
        write_result(words.csv, to_csv(results, names))
