"""The one path to a number: a checkpoint, the data that it is asked about, and the metrics."""

import argparse
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mldec.checkpoint import Loaded
from mldec.checkpoint.classes import check_queries, scoring
from mldec.checkpoint.state import Calibrated, Calibration
from mldec.config import build
from mldec.config.compose import override
from mldec.config.schema import Config
from mldec.data.fingerprint import fingerprint
from mldec.data.loader import Batch, eval_loader, unwrap
from mldec.data.table import listed
from mldec.data.types import DataModule
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator, Thresholded
from mldec.evaluators.constant import ConstantScores
from mldec.runtime import distributed
from mldec.runtime.devices import Copies, Precision, autocast, memory_format, moved, one_late
from mldec.runtime.facts import explain_out_of_memory
from mldec.runtime.results import csv_lines

log = logging.getLogger("mldec")

DEFAULT_THRESHOLD = 0.5  # of a model without thresholds


@dataclass(frozen=True)
class EvaluationSetup:
    """A checkpoint, and the data that it is asked about."""

    path: str  # of the checkpoint, as the user names it
    loaded: Loaded  # with the classes of the data if it has none of its own
    config: Config  # its settings, with those of the command line
    data: DataModule  # its validation images are those to score
    network: nn.Module  # images [B, 3, H, W], queries -> logits [B, K] of the data's classes
    device: torch.device
    thresholds: list[float] | None  # of all classes or each; None: as the data's settings say
    ranks_only: bool  # scores have a meaning beside those of other classes only

    def logit_threshold(self) -> Tensor | None:
        """Return the thresholds as logits, float64 [1] or [K]; None for that of the data."""
        from scipy.special import logit  # slow to import, and training has no use for it

        # One above 1, which no score reaches, is that of an infinite logit.
        thresholds = np.minimum(1, self.thresholds or [])
        return None if self.thresholds is None else torch.from_numpy(logit(thresholds))

    def evaluator(self) -> Evaluator:
        """Return a new evaluator of the data, with the thresholds of choice."""
        return evaluator_of(self.data, self.logit_threshold())

    def scores(self) -> "Scores":
        """Score all validation images; see `all_scores`."""
        return all_scores(self.network, self.data, self.config, device=self.device, path=self.path)

    def constant_classes(self, scores: "Scores") -> tuple[str, ...]:
        """Name the classes whose scores are the same for nearly all of these images."""
        classes = self.data.val.classes
        constant = ConstantScores(len(classes))
        # Scores of CLIP are compared with those of other classes, and may all be near 1.
        if not classes.exclusive and not self.ranks_only:
            logits, labels = torch.from_numpy(scores.logits), torch.from_numpy(scores.labels)
            for block in zip(logits.split(1024), labels.split(1024), strict=True):
                constant.update(*block)
        return tuple(classes.names[index] for index in constant.classes())


def open_for_evaluation(
    loaded: Loaded, args: argparse.Namespace, *, calibrated: bool = True
) -> EvaluationSetup:
    """Choose the data that a checkpoint is asked about, its device and its thresholds.

    The command line has the options of a model and `settings`, perhaps `threshold` and
    `class_list`. With `calibrated` the calibration of the checkpoint is used.
    """
    path = args.checkpoint
    config, parts = chosen_settings(loaded, args)
    device = distributed.pick_device(config.device)
    fit_to_device(config, args.settings, device)
    data = build.data(parts)
    check_size(data, loaded, args)

    # Of a softmax over classes that are not known, as of CLIP.
    ranks_only = not loaded.classes.names and loaded.classes.exclusive
    ranks_only = ranks_only and not data.val.classes.exclusive
    if ranks_only and calibrated:
        log.warning(
            f"{path} ranks images, and its scores have no threshold of their own: mAP holds, "
            f"precision, recall and F1 do not; python -m mldec.calibrate mends that"
        )

    if getattr(args, "class_list", None):
        from mldec.checkpoint.open_vocabulary import with_class_list

        # Calibration is of the checkpoint's own classes, each by one name.
        thresholds = None if args.threshold is None else [args.threshold]
        network, data = with_class_list(loaded, data, args)
    else:
        loaded, data = with_same_classes(loaded, data, path)
        # This checks the classes, whose thresholds are looked up next.
        network = scorer(loaded, data, path, calibrated=calibrated)
        thresholds = chosen_thresholds(data, loaded, args) if calibrated else None

    setup = EvaluationSetup(path, loaded, config, data, network, device, thresholds, ranks_only)
    if thresholds is not None:
        # Those that the evaluator does not take are refused before the first image is scored.
        setup.evaluator()
    return setup


def chosen_settings(loaded: Loaded, args: argparse.Namespace) -> tuple[Config, build.Parts]:
    """Return the settings of a checkpoint with those of the command line, and the checked data."""
    # data=NAME brings an image size of its own.
    has_own_size = args.image_size is not None or loaded.model.views == "scales"
    size = [f"data.image_size={loaded.transform.image_size}"] if has_own_size else []
    config = override(loaded.config, [*size, *args.settings])
    data = build.check(config, ["data"])["data"]

    # A file that names no data set, such as a model of open_clip, has image settings nevertheless:
    # they take the place of those that data=NAME brings.
    if "_target_" not in loaded.config.data:
        chosen = {setting.partition("=")[0] for setting in args.settings}
        own = {
            name: value
            for name, value in loaded.config.data.items()
            if name in data.arguments and f"data.{name}" not in chosen
        }
        data = replace(data, arguments=data.arguments | own)

    parts = {"data": data}
    return build.recorded(config, parts), parts


def fit_to_device(config: Config, settings: list[str], device: torch.device) -> None:
    """Prepare the device, and choose memory format and precision for it in the config."""
    train = config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)
    # What tensor cores want, whatever the training had.
    train.channels_last = device.type == "cuda"

    recorded = train.precision
    is_chosen = any(setting.startswith("train.precision=") for setting in settings)
    if is_chosen and (slow := recorded.warning(device)):
        log.warning(slow)
    if device.type == "cuda" or (is_chosen and recorded is Precision.bf16):
        return

    # Half precision is slow on a CPU.
    train.precision = Precision.fp32
    if recorded.half:
        log.info(f"evaluated in fp32 on a CPU, not in train.precision={recorded.value}")


def check_size(data: DataModule, loaded: Loaded, args: argparse.Namespace) -> None:
    """Warn of an image size that data=NAME brings, or refuse it if the backbone has one size."""
    trained, evaluated = loaded.transform.image_size, data.transform.image_size
    if evaluated == trained:
        return

    if loaded.config.backbone.get("image_size") is not None:
        raise ConfigError(
            f"data.image_size {evaluated}: {args.checkpoint} takes images of {trained} pixels "
            f"only; pass data.image_size={trained}"
        )
    if not any(setting.startswith("data.image_size=") for setting in args.settings):
        log.warning(
            f"evaluated at {evaluated} pixels, the default of this data; {args.checkpoint} is for "
            f"{trained}: pass data.image_size={trained} for that"
        )


def with_same_classes(
    loaded: Loaded, data: DataModule, path: str | Path
) -> tuple[Loaded, DataModule]:
    """Give model and data the same classes; an encoder makes word vectors that the data lacks."""
    trained, classes = loaded.classes, data.val.classes
    if trained.origin is None or not trained.origin.makes_others:
        return loaded, data

    if classes.queries is None:
        from mldec.data.word_vectors import made_alike

        remedy = "put its weights there again"
        made = made_alike(classes.names, trained.origin, where=str(path), remedy=remedy)
        classes = replace(classes, queries=made.queries, origin=made.origin)
        split = replace(data.val, classes=classes)
        data = replace(data, load_val=lambda: split)

    check_queries(trained, classes, path)
    return (loaded if trained.names else replace(loaded, classes=classes)), data


def scorer(loaded: Loaded, data: DataModule, path: str, *, calibrated: bool = True) -> nn.Module:
    """Return a checkpoint's model with its logits in the order of the data's classes."""
    model: nn.Module = loaded.model
    if calibrated and loaded.calibration is not None:
        model = Calibrated(model, loaded.calibration)
    return scoring(model, loaded.classes, data.val.classes, path)


def stored_thresholds(loaded: Loaded) -> list[float] | None:
    """Return the threshold of each class [K]; None if the checkpoint has none."""
    if loaded.calibration is None or not loaded.calibration.thresholds:
        return None

    thresholds = list(loaded.calibration.thresholds)
    return thresholds * len(loaded.classes) if len(thresholds) == 1 else thresholds


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


def chosen_thresholds(
    data: DataModule, loaded: Loaded, args: argparse.Namespace
) -> list[float] | None:
    """Return the thresholds of --threshold or of the checkpoint; None for `data.threshold`."""
    if args.threshold is not None:
        return [args.threshold]

    calibration = loaded.calibration
    is_chosen = any(setting.startswith("data.threshold=") for setting in args.settings)
    if calibration is None or not calibration.thresholds or is_chosen:
        return None

    origin = thresholds_origin(calibration, data)
    log.info(f"precision, recall and F1 are at the thresholds of {args.checkpoint} {origin}")
    return calibration.thresholds_of(loaded.classes.names, data.val.classes.names)


def thresholds_origin(calibration: Calibration, data: DataModule) -> str:
    """Say what chose the thresholds of a checkpoint, and on which images they were fitted."""
    if calibration.file is not None:
        return calibration.reason
    if calibration.fingerprint == fingerprint(data.val):
        return (
            f"{calibration.reason}, fitted on these images; the metrics are optimistic: "
            f"python -m mldec.calibrate prints those of images outside the fit"
        )
    return f"{calibration.reason}, fitted on {calibration.images:,} other images"


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

    batches: Iterable[Batch] = unwrap(loader)
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


def left_out(bad: Sequence[str], images: int) -> list[str]:
    """Return at most one line, which names images that could not be read; the others count."""
    if not bad:
        return []

    names = "; ".join(bad[:10])
    if len(bad) > 10:
        names += "; ..."
    return [f"{len(bad)} images are left out, {images:,} count: {names}"]


def same_scores(names: Sequence[str]) -> list[str]:
    """Return at most one line, on the classes whose scores are the same for nearly all images."""
    if not names:
        return []

    return [
        f"classes whose scores are the same for nearly all images, and say nothing: "
        f"{listed(names)}; it happens to a class that most images show, or none, with loss=asl to "
        f"any frequent one: train with loss=bce, or with loss.clip=0"
    ]


def report(results: Results, weights: str, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of `--json`, before `to_json`; a value that is undefined is NaN."""
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


def to_csv(results: Results, names: tuple[str, ...]) -> str:
    """Return the content of `--csv`: a heading, and one row per class."""
    columns = [as_text(values, ".6g") for values in results.per_class.values()]
    rows = zip(names, *columns, strict=True)
    return "".join(csv_lines([["class", *results.per_class], *rows]))


def as_text(values: Sequence[float], form: str) -> list[str]:
    """Return the values of a column as text: counts as whole numbers, others in a format."""
    is_whole = all(float(value).is_integer() for value in values)
    return [format(value, ".0f" if is_whole else form) for value in values]
