"""Scoring and evaluation: images to logits, logits to scores and metrics."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mldec.checkpoint import Loaded
from mldec.config.schema import Config
from mldec.data.loader import Batch, eval_loader
from mldec.data.types import DataModule
from mldec.errors import ConfigError, DataError
from mldec.evaluation.inference import for_inference
from mldec.evaluation.output import Results
from mldec.evaluators import Evaluator
from mldec.evaluators.ranking import ranking_metrics
from mldec.losses.base import Loss
from mldec.runtime import devices, distributed
from mldec.runtime.console import progress_bar
from mldec.runtime.environment import explain_out_of_memory


@torch.no_grad()
def scores(loaded: Loaded, images: Tensor) -> Tensor:
    """Score a batch of images.

    Uncalibrated scores after training with the asymmetric loss are not probabilities. The scores
    of absent classes are often above 0.5.

    Args:
        loaded: Model on the device of the images.
        images: [B, 3, S, S], uint8 or float in [0, 1].

    Returns:
        Scores float32 [B, K] in [0, 1]: softmax for single-label classes, otherwise sigmoid. They
        are calibrated if the checkpoint is calibrated.
    """
    word_vectors = loaded.classes.word_vectors
    if word_vectors is not None:
        word_vectors = word_vectors.to(images.device)
    return probabilities(loaded, loaded.model(images, word_vectors))


def probabilities(loaded: Loaded, logits: Tensor) -> Tensor:
    """Convert the logits [B, K] of a model to scores float32 [B, K]; see `scores`."""
    logits = logits.float()
    if loaded.calibration is not None:
        logits = loaded.calibration.scaled(logits)
    return logits.softmax(-1) if loaded.classes.exclusive else logits.sigmoid()


def as_limits(thresholds: Sequence[float]) -> Tensor:
    """Return thresholds for `decided` as float32, rounded up.

    A float32 score reaches the rounded threshold if and only if it reaches the threshold itself, so
    checkpoints (float64) and exported files (float32) make the same decisions.
    """
    exact = torch.tensor([*thresholds], dtype=torch.float64)
    limits = exact.float()
    return limits.where(limits >= exact, limits.nextafter(torch.tensor(torch.inf)))


def decided(scores: Tensor, limits: Tensor | None) -> Tensor:
    """Return which classes are present, bool [B, K], for scores [B, K] and limits [K] or [1].

    All predictions use it: the command, Python, the web page and exported files. See `as_limits`.
    Without limits (single-label classes), only the first maximum of each row is True.
    """
    if limits is not None:
        return scores >= limits

    classes = torch.arange(scores.shape[1], device=scores.device)
    return classes == scores.argmax(1, keepdim=True)


class Scores(NamedTuple):
    """Logits and labels of the n readable validation images."""

    indices: np.ndarray  # int64 [n], in the dataset
    labels: np.ndarray  # int8 [n, K]: 1 (present), 0 (absent) or -1 (not annotated)
    logits: np.ndarray  # float32 [n, K]
    bad: list[str]  # one message per unreadable image


@torch.no_grad()
def score(
    models: Sequence[nn.Module],
    data: DataModule,
    config: Config,
    *,
    device: torch.device,
    progress: Any = None,
    compiled: bool = False,
) -> Iterator[tuple[Batch, list[Tensor]]]:
    """Yield each batch of validation images of this process with the logits of each model.

    The logits are float32 [b, K] on the device, or [0] without a readable image. `models` map
    images uint8 [B, 3, H, W] and word vectors [K, D] or None to logits. `config` has the settings
    of the loader and the precision. `progress` wraps the batches, as `progress_bar` does.
    """
    train = config.train
    order = devices.memory_format(channels_last=train.channels_last)
    half = train.precision.for_device(device).half
    options = {"fold": train.fold_batchnorms, "compiled": compiled}
    networks = []
    for model in models:
        networks.append(for_inference(model, data.transform.image_size, half, **options))
    # cuDNN and torch.compile are slow at each new shape, so smaller batches are padded.
    size = 0
    if device.type == "cuda" or compiled:
        size = min(train.eval_batch_size, len(data.val.dataset))
    loader = eval_loader(
        data,
        batch_size=train.eval_batch_size,
        workers=train.loader_workers(device.type),
        pin=device.type == "cuda",
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    word_vectors = data.val.classes.word_vectors
    if word_vectors is not None:
        word_vectors = word_vectors.to(device)

    batches: Iterable[Batch] = loader
    if progress:
        batches = progress(batches, total=len(loader))
    for batch in batches:
        if not len(batch.images):
            yield batch, [torch.empty(0) for _ in models]
            continue

        count = len(batch.images)
        images = devices.to_device(batch.images, device, memory_format=order)
        images = devices.pad_batch(images, size)
        with devices.autocast(device, train.precision):
            logits = [model(images, word_vectors)[:count].float() for model in networks]
        yield batch, logits


def all_scores(
    model: nn.Module, data: DataModule, config: Config, *, device: torch.device, path: str
) -> Scores:
    """Score all validation images in a single process; see `score`.

    The model is moved to the device, and afterward to the CPU. Raises DataError if no image can be
    scored, or a logit is not finite. `path` is the path of the checkpoint, for messages.
    """
    # Preallocate the arrays, because two copies of all scores may not fit in memory.
    shape = (len(data.val.dataset), len(data.val.classes))
    indices = np.zeros(shape[0], np.int64)
    labels = np.zeros(shape, np.int8)
    logits = np.zeros(shape, np.float32)
    count = 0
    bad: list[str] = []

    bar = partial(progress_bar, desc=f"score {path}")
    with explain_out_of_memory(lambda: memory_advice(config, device)):
        order = devices.memory_format(channels_last=config.train.channels_last)
        model.to(device).to(memory_format=order).eval()
        scored = score([model], data, config, device=device, progress=bar)
        # The device computes the next batch while the logits of this batch are copied.
        copied = ((batch, devices.PinnedCopies(*own_logits)) for batch, own_logits in scored)
        for batch, copies in devices.prefetch_one(copied):
            bad += batch.bad
            if not len(batch.images):
                continue

            rows = slice(count, count + len(batch.images))
            indices[rows] = batch.indices.numpy()
            labels[rows] = batch.targets.numpy()
            [batch_logits] = copies.wait()
            logits[rows] = batch_logits.numpy()
            count = rows.stop
    model.cpu()

    if not count:
        reason = f" ({bad[0]})" if bad else ""
        raise DataError(f"{path}: no readable validation image{reason}; check data.root")
    if not np.isfinite(logits[:count]).all():
        raise DataError(f"{path}: the scores are not finite; check the weights of the checkpoint")
    return Scores(indices[:count], labels[:count], logits[:count], bad)


def evaluate(model: nn.Module, data: DataModule, config: Config, **options: Any) -> Results:
    """Evaluate one model; see `evaluate_all` for the options."""
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
    observe: Callable[[Batch, list[Tensor]], None] | None = None,
    compiled: bool = False,
    all_metrics: bool = False,
) -> list[Results]:
    """Evaluate several models on the validation images. Each image is loaded once.

    The models are set to evaluation mode, and their modes are restored. For the first arguments see
    `score`. `logit_threshold` is one threshold or float64 [K]; None uses the data's own
    threshold. `observe` is called with each batch of this process and the logits float32 [b, K] of
    each model. `compiled` compiles the models. `all_metrics` adds the metrics of
    `ranking_metrics`; it raises ConfigError if the evaluator of the data does not support them.

    Returns:
        The results of each model, identical on all processes.
    """
    evaluators = [evaluator_of(data, logit_threshold) for _ in models]
    if all_metrics and not hasattr(evaluators[0], "predictions"):
        raise ConfigError("--metrics all: it requires multi-label data; leave it out")

    # Start with an empty batch, because a process may have no images.
    empty = torch.zeros(0, len(data.val.classes))
    for evaluator in evaluators:
        evaluator.update(empty, empty)

    bad: list[str] = []
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    scored = score(models, data, config, device=device, progress=progress, compiled=compiled)
    for batch, logits in scored:
        bad += batch.bad
        if not len(batch.images):
            continue
        for evaluator, model_logits in zip(evaluators, logits, strict=True):
            evaluator.update(model_logits, batch.targets)
        if observe is not None:
            observe(batch, logits)
    for model, mode in zip(models, modes, strict=True):
        model.train(mode)

    all_bad = list(chain.from_iterable(distributed.gather(bad)))
    images = len(data.val.dataset) - len(all_bad)

    results = []
    for evaluator in evaluators:
        metrics = evaluator.compute()
        if all_metrics:
            metrics |= ranking_metrics(evaluator)
        confusions = evaluator.pairs() if hasattr(evaluator, "pairs") else None
        per_class = evaluator.per_class()
        predictions = getattr(evaluator, "predictions", None)
        results.append(Results(metrics, per_class, images, all_bad, confusions, predictions))
    return results


class MeanLoss:
    """Mean of a training loss over the validation images of all ranks, for several models.

    The scale equals the scale of train/loss. A loss with the reduction "sum" is the mean per image
    times `batch_size`, the number of images in a training batch. A copy of the loss is used, in
    evaluation mode. `progress` is the fraction of the training that is done.
    """

    def __init__(
        self,
        loss: Loss,
        *,
        progress: float,
        batch_size: int,
        models: int,
        device: torch.device,
    ) -> None:
        self.loss = copy.deepcopy(loss).eval()
        self.loss.progress = progress
        self.is_sum = loss.reduction == "sum"
        self.batch_size = batch_size
        self.images = 0
        # One tensor [models] per batch. A process may have no images.
        self.sums = [torch.zeros(models, device=device)]

    @torch.no_grad()
    def update(self, logits: list[Tensor], targets: Tensor) -> None:
        """Add a batch: logits float32 [b, K] of each model, and targets int8 [b, K]."""
        targets = devices.to_device(targets, self.sums[0].device)
        try:
            losses = torch.stack([self.loss(each, targets) for each in logits]).float()
        except DataError:
            # The loss does not support these labels. On a GPU it is NaN in this case.
            losses = torch.full_like(self.sums[0], math.nan)
        weight = self.batch_size if self.is_sum else len(targets)
        self.images += len(targets)
        self.sums.append(losses * weight)

    def compute(self) -> list[float]:
        """Return the mean for each model; NaN if the loss does not support the labels."""
        total = devices.as_float64(torch.stack(self.sums)).sum(0)
        total = distributed.total(torch.cat([total, total.new_tensor([self.images])]))
        return (total[:-1] / total[-1]).tolist()


def metrics_by_frequency(
    results: Results, positives: np.ndarray, low: int, high: int
) -> dict[str, float]:
    """Return the mAP and the number of the head, medium and tail classes.

    These have at least `high`, `low` to `high` - 1 and fewer than `low` training images.
    `positives` int [K] are the numbers of training images of the classes. Classes without an
    evaluated positive are ignored. Wu et al. (arXiv 2007.09654) use 20 and 100.
    """
    groups = torch.from_numpy(np.digitize(positives, [low, high]))
    average_precision = torch.tensor(results.per_class["AP"])
    metrics = {}
    for group, name in ((2, "head"), (1, "medium"), (0, "tail")):
        members = groups == group
        metrics[f"{name}_mAP"] = average_precision[members].nanmean().item()
        metrics[f"classes_{name}"] = float(members.sum())
    return metrics


def evaluator_of(data: DataModule, logit_threshold: float | Tensor | None) -> Evaluator:
    """Create the evaluator of the data; for `logit_threshold` see `evaluate_all`."""
    evaluator = data.evaluator()
    if logit_threshold is not None:
        if evaluator.logit_threshold is None:
            raise ConfigError("data: its evaluator does not support thresholds; leave them out")
        evaluator.logit_threshold = logit_threshold
    return evaluator


def memory_advice(config: Config, device: torch.device) -> str:
    """Return the message after an out-of-memory error in training or evaluation."""
    train = config.train
    micro_batch = train.micro_batch(distributed.world_size())
    image_size = config.data.get("image_size", "the default")

    # `accumulate` alone would enlarge the batch if batch_per_gpu is set.
    smaller = f"train.accumulate={2 * train.accumulate}"
    if train.batch_per_gpu is not None:
        smaller += f" train.batch_per_gpu={max(1, train.batch_per_gpu // 2)}"
    elif device.type == "cuda" and train.pieces is None and distributed.world_size() == 1:
        smaller += " or train.batch_size=auto"
    return (
        f"out of memory on {device} (per process {micro_batch} training images or "
        f"{train.eval_batch_size} evaluation images of {image_size} pixels); pass {smaller} for "
        f"smaller micro-batches, or reduce train.eval_batch_size or data.image_size"
    )
