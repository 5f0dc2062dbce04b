"""Descriptions of a run: the lines of its log before and after the training, and run.json."""

import dataclasses
import shlex
from pathlib import Path

from mldec.checkpoint.state import Best
from mldec.data.types import same_images
from mldec.files.run_folder import RunFacts, command_line
from mldec.model import count_parameters, work_per_image
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.runtime.environment import installed
from mldec.training.trainer import Trainer


def describe_run(trainer: Trainer, wanted: Precision) -> str:
    """Return the line of the log with model, data, precision, batch, position and weights."""
    config = trainer.config
    learner = trainer.learner
    train = trainer.data.train
    val = trainer.data.val

    # Both counts show at a glance whether the backbone is frozen.
    trainable, total = count_parameters(learner.model)
    parameters = f"{trainable / 1e6:.2f} of {total / 1e6:.2f} M parameters trainable"

    splits = f"{len(train.dataset):,} training and {len(val.dataset):,} validation images"
    if trainer.is_fitted and same_images(train, val):
        # The rule of `HoldOut.val_fraction`.
        splits = f"{len(train.dataset):,} training images, each validated without itself"
        splits += " (data.val_fraction=0)"
    if trainer.batches.factors is not None:
        sampler = f"data.sampler={trainer.data.sampling.sampler}"
        splits += f" ({trainer.batches.num_images:,} images per epoch: {sampler})"

    precision = learner.precision.value
    if learner.precision is not wanted:
        precision += f" (train.precision={wanted.value})"
    device = f"{precision} on {trainer.device} x {distributed.world_size()}"

    position = f"epoch {trainer.epoch + 1} of {config.train.last_epoch}"
    if config.train.stop_epoch is not None:
        position += f" (train.epochs={config.train.epochs})"
    position += f", {trainer.position} of {trainer.batches.steps} steps done"
    if trainer.ended:
        position = f"ended after epoch {trainer.epoch}, nothing is left to train"

    weights = "random"
    if config.init:
        weights = f"init={config.start.path}"
    elif config.backbone.get("pretrained"):
        weights = f"backbone.pretrained={config.backbone['pretrained']}"
    return (
        f"{config.name}: {parameters}, {len(val.classes)} classes, {splits}, {device}, "
        f"batches of {config.train.batch_size:,} images, {position}, start weights: {weights}"
    )


def describe_best(best: Best, epochs: int, path: Path) -> str:
    """Return the line of the log with the best result after a number of epochs."""
    # A best result in the first third is a sign of overfitting.
    line = f"best {best.metric} {best.value:.2f} ({best.weights}, epoch {best.epoch}): {path}"
    if 3 * best.epoch <= epochs:
        line += f"; no later epoch of {epochs} was better, try fewer"
        line += " (train.epochs, train.min_steps)"
    return line


def next_commands(directory: Path, trainer: Trainer) -> str:
    """Return two useful commands after a training, quoted for a shell."""
    # A relative path is shorter, and the commands run in the same folder.
    here = Path.cwd()
    path = directory.relative_to(here) if directory.is_relative_to(here) else directory
    model = [str(path)]
    for plugin in trainer.config.plugins:
        model += ["--plugin", plugin]

    # A multi-label model needs thresholds. Zero-shot metrics are more than the log shows.
    classes = trainer.data.val.classes
    needs_thresholds = not classes.exclusive and classes.word_vectors is None
    needs_thresholds &= trainer.calibration is None
    first = "calibrate" if needs_thresholds else "evaluate"
    commands = [["mldec", first] + model, ["mldec", "predict"] + model + ["photos/"]]
    # A command cannot read a data set that is passed in Python, which has no name.
    if trainer.config.data.get("name", "") is None:
        del commands[0]
    return "; ".join(map(shlex.join, commands))


def run_facts(trainer: Trainer) -> RunFacts:
    """Return the content of run.json for a run that is about to start or to resume."""
    config = trainer.config
    model = trainer.learner.model
    size = trainer.data.transform.image_size
    macs = work_per_image(model, size, trainer.data.val.classes.word_vectors)
    return RunFacts(
        name=config.name,
        command=command_line(),
        versions=installed(),
        commit=trainer.git,
        epochs=config.train.epochs,
        image_size=size,
        parameters=count_parameters(model)[0],
        multiply_accumulates=None if macs is None else round(macs),
        start_epoch=trainer.epoch,
        best={} if trainer.best.metric is None else dataclasses.asdict(trainer.best),
        ended=trainer.ended,
    )
