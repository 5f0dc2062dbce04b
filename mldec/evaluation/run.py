"""The one path to a number: a checkpoint, the data that it is asked about, and the metrics."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mldec.checkpoint import Loaded
from mldec.config.schema import Config
from mldec.data.loader import Batch, eval_loader
from mldec.data.types import DataModule
from mldec.errors import ConfigError, DataError
from mldec.evaluation.output import Results
from mldec.evaluators import Evaluator, Thresholded
from mldec.runtime import distributed
from mldec.runtime.devices import Copies, autocast, memory_format, moved, one_late
from mldec.runtime.environment import explain_out_of_memory

log = logging.getLogger("mldec")


@torch.no_grad()
def scores(loaded: Loaded, images: Tensor) -> Tensor:
    """Return the scores float32 [B, K] of images [B, 3, S, S], uint8 or float in [0, 1].

    They are softmax if an image has one label, else sigmoid; calibrated if the checkpoint is.
    Otherwise, after training with the asymmetric loss, they are not probabilities: those of absent
    classes are often above 0.5.
    """
    queries = loaded.classes.queries
    queries = None if queries is None else queries.to(images.device)
    return probabilities(loaded, loaded.model(images, queries))


def probabilities(loaded: Loaded, logits: Tensor) -> Tensor:
    """Return the scores [B, K], float32, of the logits [B, K] of a model; see `scores`."""
    logits = logits.float()
    if loaded.calibration is not None:
        logits = loaded.calibration.scaled(logits)
    return logits.softmax(-1) if loaded.classes.exclusive else logits.sigmoid()


def decided(scores: Tensor, thresholds: Tensor | None) -> Tensor:
    """Return which classes are present, bool [B, K], by the thresholds [K] or [1] of their scores.

    Without thresholds an image has one label: the most probable class, the first one of several.
    """
    if thresholds is not None:
        return scores >= thresholds

    classes = torch.arange(scores.shape[1], device=scores.device)
    return classes == scores.argmax(1, keepdim=True)


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

    The models map images uint8 [B, 3, H, W] and queries [K, D] or None to logits [B, K]. The logits
    are float32 [b, K] on the device, or [0] if no image of the batch can be read.
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

    batches: Iterable[Batch] = loader
    if progress:
        batches = progress(batches, total=len(loader))
    for batch in batches:
        if not len(batch.images):
            yield batch, [torch.empty(0) for _ in models]
            continue

        images = moved(batch.images, device, memory_format=order)
        with autocast(device, train.precision):
            logits = [model(images, queries) for model in models]
        yield batch, [each.float() for each in logits]


def all_scores(
    model: nn.Module, data: DataModule, config: Config, *, device: torch.device, path: str
) -> Scores:
    """Score all validation images; the model is moved to the device, and back to the CPU."""
    # Filled batch by batch: two copies of all scores may not fit in memory.
    shape = len(data.val.dataset), len(data.val.classes)
    indices = np.zeros(shape[0], np.int64)
    labels, logits = np.zeros(shape, np.int8), np.zeros(shape, np.float32)
    count = 0
    bad: list[str] = []

    bar = partial(tqdm, desc=f"score {path}", leave=False, disable=None)
    with explain_out_of_memory(lambda: memory_advice(config, device)):
        order = memory_format(channels_last=config.train.channels_last)
        model.to(device).to(memory_format=order).eval()
        scored = score([model], data, config, device=device, progress=bar)
        # The device works on the next batch while the logits of this one are kept.
        arriving = one_late((batch, Copies(*own_logits)) for batch, own_logits in scored)
        for batch, copies in arriving:
            bad += batch.bad
            if len(batch.images):
                rows = slice(count, count + len(batch.images))
                indices[rows] = batch.indices.numpy()
                labels[rows] = batch.targets.numpy()
                [batch_logits] = copies.wait()
                logits[rows] = batch_logits.numpy()
                count = rows.stop
    model.cpu()

    if not count:
        reason = bad[0] if bad else "there is none"
        raise DataError(f"{path}: no validation image can be scored: {reason}")
    if not np.isfinite(logits[:count]).all():
        raise DataError(f"{path}: a score is not finite; look at the weights of the checkpoint")
    return Scores(indices[:count], labels[:count], logits[:count], bad)


def evaluate(model: nn.Module, data: DataModule, config: Config, **options: Any) -> Results:
    """Run each validation image through one model; the options are those of `evaluate_all`."""
    [results] = evaluate_all([model], data, config, **options)
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
    """Load each validation image once for all models; return their results, alike on all processes.

    The models, as of `score`, are in evaluation mode meanwhile; `progress` wraps the batches, as
    `tqdm` does. The `logit_threshold` is one for all classes or float64 [K], instead of that of the
    data's settings. `observe` is also called with each batch of this process and the logits of the
    first model, float32 [b, K].
    """
    evaluators = [evaluator_of(data, logit_threshold) for _ in models]

    # An empty batch first: with few images a process may get no other.
    nothing = torch.zeros(0, len(data.val.classes))
    for evaluator in evaluators:
        evaluator.update(nothing, nothing)

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
    images = len(data.val.dataset) - len(bad)
    results = []
    for evaluator in evaluators:
        metrics = evaluator.compute()
        confusions = evaluator.pairs() if hasattr(evaluator, "pairs") else None
        results.append(Results(metrics, evaluator.per_class(), images, bad, confusions))
    return results


def evaluator_of(data: DataModule, logit_threshold: float | Tensor | None) -> Evaluator:
    """Return a new evaluator of the data; None leaves the threshold of the data's settings."""
    evaluator = data.evaluator()
    if logit_threshold is not None:
        if not isinstance(evaluator, Thresholded):
            raise ConfigError("data: its evaluator takes no thresholds of a checkpoint")
        evaluator.logit_threshold = logit_threshold
    return evaluator


def memory_advice(config: Config, device: torch.device) -> str:
    """Return the message for a run or an evaluation that does not fit in memory."""
    train = config.train
    micro_batch = train.micro_batch(distributed.world_size())
    image_size = config.data.get("image_size", "the default")

    # More micro-batches of the same size would be a larger batch.
    smaller = f"train.accumulate={2 * train.accumulate}"
    if train.batch_per_gpu is not None:
        smaller += f" train.batch_per_gpu={max(1, train.batch_per_gpu // 2)}"
    elif device.type == "cuda":
        smaller += " or train.batch_size=auto"
    return (
        f"out of memory on {device}: {micro_batch} training images at a time on each process, "
        f"{train.eval_batch_size} in evaluation, at {image_size} pixels; for the same batch in "
        f"smaller pieces pass {smaller}; train.eval_batch_size and data.image_size help too"
    )
