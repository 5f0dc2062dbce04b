"""Run a model over validation images, for the trainer and for the command `mldec.evaluate`."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mldec.config.schema import Config
from mldec.data.base import DataModule
from mldec.data.loader import Batch, eval_loader
from mldec.data.workers import unwrap
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator, Thresholded
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.runtime import distributed
from mldec.runtime.console import on_terminal
from mldec.runtime.devices import Precision, autocast, memory_format
from mldec.runtime.facts import explain_out_of_memory

log = logging.getLogger("mldec")


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
        config: for the batch size, workers, precision and `train.channels_last`.
        device: of the model.
        progress: wraps the batches, such as `tqdm`; None for no progress bar.

    Yields:
        The batch, and float32 [b, K] on the device per model, or [0] if no image of the batch can
        be read.

    Raises:
        DataError: from the dataset.
    """
    train, queries = config.train, data.val.classes.queries
    order = memory_format(channels_last=train.channels_last)
    loader = eval_loader(
        data,
        batch_size=train.eval_batch_size,
        workers=train.loader_workers,
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

        images = batch.images.to(device, non_blocking=True, memory_format=order)
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
    with explain_out_of_memory(lambda: memory_advice(config, device)):
        order = memory_format(channels_last=config.train.channels_last)
        model.to(device).to(memory_format=order).eval()
        for batch, [batch_logits] in score([model], data, config, device=device, progress=bar):
            bad += batch.bad
            if len(batch.images):
                rows = slice(count, count + len(batch.images))
                indices[rows] = batch.indices.numpy()
                labels[rows] = batch.targets.numpy()
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
        if train.precision is Precision.fp32:
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
