"""The work of the command `mldec.evaluate`, and what other commands share with it."""

import argparse
import csv
import io
import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.special import logit
from torch import nn
from tqdm import tqdm

from mldec import build
from mldec.calibration.stored import chosen_thresholds
from mldec.checkpoint import Calibrated, Loaded, load_model, scoring
from mldec.cli import chosen_model
from mldec.config.schema import Config
from mldec.data.base import DataModule
from mldec.errors import CheckpointError, ConfigError, say
from mldec.evaluation.evaluating import Results, evaluate, left_out, memory_advice
from mldec.evaluation.open_vocabulary import open_vocabulary, read_vocabulary
from mldec.evaluation.opening import asked_for, check_size, chosen_data, warn_of_scores
from mldec.files.results import STANDARD_OUTPUT, check_targets, to_json, write_result
from mldec.runtime import distributed
from mldec.runtime.console import on_terminal
from mldec.runtime.devices import Precision, memory_format
from mldec.runtime.facts import explain_out_of_memory
from mldec.runtime.memory import keep_freed_memory

log = logging.getLogger("mldec")

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
