"""The one path to a number: a checkpoint, the data that it is asked about, and the metrics."""

import argparse
import csv
import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import logit
from torch import Tensor, nn
from tqdm import tqdm

from mldec import build
from mldec.checkpoint import Calibrated, Loaded, check_queries, load_model, scoring
from mldec.checkpoint.classes import can_make, queries_for
from mldec.config.compose import override
from mldec.config.schema import Config
from mldec.data.fingerprint import fingerprint
from mldec.data.loader import Batch, eval_loader, unwrap
from mldec.data.randomness import SampleRandom
from mldec.data.table import check_names
from mldec.data.tasks import warn_of_twins
from mldec.data.types import Classes, DataModule, ImageDataset, Split
from mldec.data.word_vectors import ClassList, lacking, listed, made_alike, read_class_list
from mldec.errors import CheckpointError, ConfigError, DataError, say
from mldec.evaluators import Evaluator, Thresholded
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.files.results import STANDARD_OUTPUT, check_targets, to_json, write_result
from mldec.files.text import read_lines
from mldec.runtime import distributed
from mldec.runtime.cli import chosen_model, on_terminal
from mldec.runtime.devices import Precision, autocast, memory_format
from mldec.runtime.facts import explain_out_of_memory, keep_freed_memory

log = logging.getLogger("mldec")


def stored_thresholds(loaded: Loaded) -> list[float] | None:
    """Return the threshold of each class [K]; None if the checkpoint has none."""
    if loaded.calibration is None or not loaded.calibration.thresholds:
        return None

    thresholds = loaded.calibration.thresholds
    return [*thresholds] * (len(loaded.classes) if len(thresholds) == 1 else 1)


def chosen_thresholds(
    data: DataModule, loaded: Loaded, args: argparse.Namespace
) -> list[float] | None:
    """Return the thresholds of --threshold or of the checkpoint, and say which they are.

    Args:
        data: that is evaluated.
        loaded: the checkpoint.
        args: the command line.

    Returns:
        One threshold for all classes, or one per class of the data; None for `data.threshold`.

    Raises:
        ConfigError: for --threshold where an image has one label.
    """
    if args.threshold is not None:
        if loaded.classes.exclusive:
            raise ConfigError(
                "--threshold has no effect: an image of this data has one label; leave it out"
            )
        return [args.threshold]

    calibration = loaded.calibration
    is_chosen = any(setting.startswith("data.threshold=") for setting in args.settings)
    if calibration is None or not calibration.thresholds or is_chosen:
        return None

    path = args.checkpoint
    if calibration.fingerprint == fingerprint(data.val):
        log.warning(
            f"precision, recall and F1 are at the thresholds of {path} for "
            f"{calibration.objective}, which were fitted on these images: they are too good; "
            f"python -m mldec.calibrate prints those of images outside the fit"
        )
    else:
        log.info(
            f"precision, recall and F1 are at the thresholds of {path} for "
            f"{calibration.objective}, fitted on {calibration.images:,} other images"
        )
    return calibration.thresholds_of(loaded.classes.names, data.val.classes.names)


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


def chosen_data(loaded: Loaded, args: argparse.Namespace) -> tuple[Config, build.Parts]:
    """Return the settings of a checkpoint with those of the command line, and the checked data.

    A file that names no data set, such as a model of open_clip, has image settings nevertheless:
    they take the place of those that data=NAME brings.

    Args:
        loaded: the checkpoint.
        args: the command line, with `settings` and the options of a model.

    Raises:
        ConfigError: for a wrong setting.
    """
    config = override(loaded.config, [*size_setting(args), *args.settings])
    data = build.check(config, ["data"])["data"]

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


def size_setting(args: argparse.Namespace) -> list[str]:
    """Return --image-size as a setting, since data=NAME brings an image size of its own."""
    return [] if args.image_size is None else [f"data.image_size={args.image_size}"]


def check_size(data: DataModule, loaded: Loaded, args: argparse.Namespace) -> None:
    """Warn of an image size that data=NAME brings, and that is not the checkpoint's.

    Raises:
        ConfigError: if the checkpoint takes images of one size only.
    """
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


def asked_for(loaded: Loaded, data: DataModule, path: str | Path) -> tuple[Loaded, DataModule]:
    """Ask a model for the classes of the data, if it takes any.

    Word vectors that the data lacks are made by the text encoder that made those of the checkpoint.
    A model that has no classes of its own takes those of the data.

    Args:
        loaded: the checkpoint.
        data: whose validation images it is asked about.
        path: of the checkpoint, for messages.

    Returns:
        Both, with the same classes if the model has none of its own.

    Raises:
        CheckpointError: if the word vectors have another width, or none can be made.
        ConfigError: if the text encoder cannot be had.
    """
    trained, classes = loaded.classes, data.val.classes
    if trained.origin is None or not trained.origin.is_encoder:
        return loaded, data

    if classes.queries is None:
        remedy = "put its weights there again"
        made = made_alike(classes.names, trained.origin, where=str(path), remedy=remedy)
        classes = replace(classes, queries=made.queries, origin=made.origin)
        split = replace(data.val, classes=classes)
        data = replace(data, load_val=lambda: split)

    check_queries(trained, classes, path)
    return (loaded if trained.names else replace(loaded, classes=classes)), data


def warn_of_scores(loaded: Loaded, data: DataModule, path: str | Path) -> None:
    """Warn of scores that have a meaning beside those of other classes only.

    Args:
        loaded: the checkpoint, before `asked_for`.
        data: that it is asked about.
        path: of the checkpoint, for messages.
    """
    if is_relative(loaded, data):
        log.warning(
            f"{path} ranks images, and its scores have no threshold of their own: mAP holds, "
            f"precision, recall and F1 do not; python -m mldec.calibrate --platt mends that"
        )


def is_relative(loaded: Loaded, data: DataModule) -> bool:
    """Tell whether the scores of a softmax are asked for several labels per image.

    The arguments are those of `asked_for`.
    """
    return not loaded.classes.names and loaded.classes.exclusive and not data.val.classes.exclusive


COUNT = "classes_"  # starts the names of metrics that are numbers of classes, not percentages


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


def fit_to_device(config: Config, settings: list[str], device: torch.device) -> None:
    """Prepare the device of an evaluation, and choose memory format and precision for it.

    On a CPU the precision is fp32 unless the user chooses another one: half precision is slow.

    Args:
        config: of the checkpoint, with the settings of the command line; it is changed.
        settings: of the command line, as key=value.
        device: that evaluates.
    """
    distributed.prepare_device(device, tf32=config.train.tf32)
    # What tensor cores want, whatever the training had.
    config.train.channels_last = device.type == "cuda"

    recorded = config.train.precision
    is_chosen = any(setting.startswith("train.precision=") for setting in settings)
    if is_chosen and (slow := recorded.warning(device)):
        log.warning(slow)
    if device.type == "cuda" or (is_chosen and recorded is Precision.bf16):
        return

    config.train.precision = Precision.fp32
    if recorded.half:
        log.info(f"evaluated in fp32 on a CPU, not in train.precision={recorded.value}")


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.evaluate`: load, evaluate, print, and write the files.

    Args:
        args: the command line; see `mldec.evaluate.parser`.

    Raises:
        UserError: for a wrong setting, or a checkpoint or data that cannot be used.
    """
    keep_freed_memory()

    # Everything that can be refused at once comes before the data.
    check_targets(args.json, args.csv, args.write_classes)
    is_evaluation = args.json or args.csv or args.settings or args.class_list
    if args.write_classes and is_evaluation:
        raise ConfigError(
            "--write-classes evaluates nothing: leave out the settings, --json, --csv and "
            "--class-list"
        )
    vocabulary = read_vocabulary(args)
    loaded = load_model(**chosen_model(args))
    if args.write_classes:
        write_classes(loaded, args)
        return
    check_class_names(loaded, args)

    config, parts = chosen_data(loaded, args)
    device = distributed.pick_device(config.device)
    fit_to_device(config, args.settings, device)

    with distributed.processes(device):
        data = build.data(parts)
        check_size(data, loaded, args)
        warn_of_scores(loaded, data, args.checkpoint)
        if vocabulary is None:
            loaded, data = asked_for(loaded, data, args.checkpoint)
            thresholds = chosen_thresholds(data, loaded, args)
            model = scorer(loaded, data, args.checkpoint)
        else:
            # Calibration is of the checkpoint's own classes, each by one name.
            thresholds = None if args.threshold is None else [args.threshold]
            model, data = open_vocabulary(loaded, data, vocabulary, args.checkpoint)

        is_hidden = not (on_terminal() and distributed.is_main())
        bar = partial(tqdm, desc="evaluate", leave=False, disable=is_hidden)
        order = memory_format(channels_last=config.train.channels_last)
        with explain_out_of_memory(lambda: memory_advice(config, device)):
            results = evaluate(
                model.to(device).to(memory_format=order),
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
        if args.class_list:
            content |= {"class_list": args.class_list, "vectors": args.vectors}
        write_result(args.json, to_json(content, indent=1) + "\n")
    if args.csv:
        write_result(args.csv, to_csv(results, names))


_SEE = "see docs/zero_shot.md, section Any class list"


class BestName(nn.Module):
    """Score each class by the best of its names.

    Args:
        model: images [B, 3, H, W] and word queries [N, D_w] -> logits [B, N].
        vectors: of the N names, [N, D_w].
        class_of_name: the class of each name, from 0 to K - 1; every class has one.
    """

    vectors: Tensor
    class_of_name: Tensor

    def __init__(self, model: nn.Module, vectors: Tensor, class_of_name: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.num_classes = max(class_of_name) + 1
        self.register_buffer("vectors", vectors, persistent=False)
        self.register_buffer("class_of_name", torch.tensor(class_of_name), persistent=False)

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, K]; its own vectors replace the queries."""
        logits = self.model(images, self.vectors)
        best = logits.new_full((len(logits), self.num_classes), -torch.inf)
        return best.scatter_reduce(1, self.class_of_name.expand_as(logits), logits, "amax")


class SomeClasses:
    """A dataset with the targets of some of its classes; see `ImageDataset`.

    Args:
        dataset: its targets are [K], of 1, 0 and -1.
        columns: of the wanted classes, in the wanted order.
    """

    def __init__(self, dataset: ImageDataset, columns: Sequence[int]) -> None:
        self.dataset = dataset
        self.columns = torch.tensor(columns)

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, H, W] and its target int8 [number of columns]."""
        image, target = self.dataset.load(index, rng)
        return image, target[self.columns]

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        return self.dataset.name(index)


@dataclass(frozen=True)
class Vocabulary:
    """The classes to evaluate, and what the command line says of them.

    Attributes:
        class_list: the K classes and their N names.
        vectors: source of the names' word vectors, see `word_vectors`; None for those of the data
            and of the checkpoint, by name, or by the text encoder of the training.
        seen: names of the classes of the training; None for what the checkpoint says.
    """

    class_list: ClassList
    vectors: str | None = None
    seen: tuple[str, ...] | None = None


def read_vocabulary(args: argparse.Namespace) -> Vocabulary | None:
    """Return what --class-list, --vectors and --seen stand for; None for the classes of the data.

    Raises:
        ConfigError: for --vectors or --seen without --class-list.
        DataError: if a file cannot be read, or has a fault.
    """
    if args.class_list is None:
        for option, value in (("--vectors", args.vectors), ("--seen", args.seen)):
            if value is not None:
                raise ConfigError(f"{option} has no effect without --class-list: leave it out")
        return None

    seen = None
    if args.seen is not None:
        seen = check_names(read_lines(Path(args.seen), _SEE), args.seen, _SEE)
    return Vocabulary(read_class_list(Path(args.class_list)), args.vectors, seen)


def open_vocabulary(
    loaded: Loaded, data: DataModule, vocabulary: Vocabulary, path: str
) -> tuple[nn.Module, DataModule]:
    """Return a model that scores a class list, and the data with these classes.

    A class counts as seen if the checkpoint was trained on it, under any of its names. The metrics
    are those of `ZeroShotEvaluator` over all images of the data.

    Args:
        loaded: the checkpoint, of a zero-shot model.
        data: whose validation images have several labels each; its other classes are left out.
        vocabulary: the K classes and their N names.
        path: of the checkpoint, for messages.

    Returns:
        The model, images -> logits [B, K], and the data.

    Raises:
        CheckpointError: if the model takes no word vectors or has others, or the classes of its
            training are not known.
        ConfigError: if an image of the data has one label.
        DataError: if the data does not have a class, or a name has no vector.
    """
    if loaded.classes.queries is None:
        raise CheckpointError(
            f"--class-list: {path} knows its own classes only, it was not trained by word vectors; "
            f"leave it out"
        )
    class_list = vocabulary.class_list
    trained_names = _trained_names(loaded, path, vocabulary.seen)

    classes = data.val.classes
    if classes.exclusive:
        raise ConfigError(
            "--class-list: an image of this data has one label, and the metrics of seen and unseen "
            "classes are those of several; leave it out"
        )
    columns = class_list.columns(classes.names)
    queries = _queries(class_list, vocabulary.vectors, loaded.classes, classes, path)

    unseen = _unseen(class_list, trained_names)
    _report(class_list, classes, trained_names, unseen, path)

    names = tuple(classes.names[column] for column in columns)
    split = Split(SomeClasses(data.val.dataset, columns), Classes(names))
    own_evaluator = data.evaluator()

    def evaluator(classes: Classes) -> Evaluator:
        zero_shot = ZeroShotEvaluator(len(classes), unseen=unseen, images="all")
        if isinstance(own_evaluator, Thresholded):
            zero_shot.logit_threshold = own_evaluator.logit_threshold
        return zero_shot

    model = BestName(loaded.model, queries, class_list.class_of_name)
    return model, replace(data, load_val=lambda: split, make_evaluator=evaluator)


def _trained_names(loaded: Loaded, path: str, seen: Sequence[str] | None) -> set[str]:
    """Return the names of the classes of a training, without differences of case."""
    if seen is not None:
        return {name.casefold() for name in seen}

    # Neither the authors' files nor a tagger without a training name any class.
    if not loaded.classes.names:
        return set()
    if loaded.unseen is None:
        raise CheckpointError(
            f"--class-list: {path} is of an earlier version, which did not save the classes of the "
            f"training: pass --seen FILE, with one of their names per line"
        )
    return {name.casefold() for name in set(loaded.classes.names) - set(loaded.unseen)}


def _queries(
    class_list: ClassList, vectors: str | None, trained: Classes, data: Classes, path: str
) -> Tensor:
    """Return the word vectors of all names, [N, D_w], of the kind of the training.

    Without a source they are those of the checkpoint and of the data, by name, or else made by the
    text encoder of the training.

    Raises:
        ConfigError: if the text encoder cannot be had.
        CheckpointError: if they are of another kind.
        DataError: if a name has no vector.
    """
    vector_of: dict[str, Tensor] = {}
    for classes in (data, trained):
        if classes.queries is not None:
            vector_of |= dict(zip(classes.names, classes.queries, strict=True))
    missing = [name for name in class_list.names if name not in vector_of]

    if vectors is not None or (missing and can_make(trained)):
        made = queries_for(class_list.names, vectors, trained, option="--class-list")
        assert made.queries is not None
        return made.queries

    if missing:
        raise DataError(
            f"{class_list.path}: in the checkpoint and the data, "
            f"{lacking(missing, len(class_list.names))}; "
            f"pass --vectors, the word vectors of the training, {_SEE}"
        )
    queries = torch.stack([vector_of[name] for name in class_list.names])
    check_queries(trained, Classes(class_list.names, queries=queries), path)
    return queries


def _unseen(class_list: ClassList, trained_names: set[str]) -> list[int]:
    """Return the indices of the classes of which no name was trained."""
    return [
        index
        for index, names in enumerate(class_list.classes)
        if not any(name.casefold() in trained_names for name in names)
    ]


def _report(
    class_list: ClassList,
    classes: Classes,
    trained_names: Collection[str],
    unseen: Sequence[int],
    path: str,
) -> None:
    """Log which classes are evaluated, and which numbers there cannot be.

    Args:
        class_list: the classes.
        classes: those of the data.
        trained_names: see `_trained_names`.
        unseen: see `_unseen`.
        path: of the checkpoint.
    """
    own_names = [names[0] for names in class_list.classes]
    left_out = [name for name in classes.names if name not in set(own_names)]
    if left_out:
        log.info(
            f"{class_list.path} leaves out {len(left_out):,} of {len(classes):,} classes of the "
            f"data: {listed(left_out)}"
        )

    seen = len(class_list) - len(unseen)
    log.info(
        f"{class_list.path}: {len(class_list):,} classes by {len(class_list.names):,} names, "
        f"{seen:,} seen and {len(unseen):,} unseen by {path}"
    )
    warn_of_twins(trained_names, [own_names[index] for index in unseen])

    # The evaluator leaves these numbers out.
    if not unseen:
        log.warning("no class is unseen: there is no metric zsl, zsl_all and harmonic_mAP")
    if not seen:
        log.warning("no class is seen: there is no seen_mAP and no harmonic_mAP")
