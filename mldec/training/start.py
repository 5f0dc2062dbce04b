"""Preparation of a training run."""

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mldec import build
from mldec.checkpoint import loading
from mldec.checkpoint.state import Checkpoint
from mldec.config.schema import Config, MixLabels
from mldec.data.labels import Labels
from mldec.data.loader import labels_of
from mldec.data.types import DataModule
from mldec.errors import CheckpointError, ConfigError
from mldec.files.run_folder import RunFacts, command_line
from mldec.model import Classifier, TokenClassifier, count_parameters, work_per_image
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.runtime.environment import installed
from mldec.runtime.signals import StopRequest
from mldec.training.frozen_features import with_tokens
from mldec.training.memory import ENOUGH_FOR_BATCH_NORM, divide_batch
from mldec.training.trainer import Trainer

log = logging.getLogger("mldec")


def start_at_frequency(head: nn.Module, labels: Labels) -> None:
    """Set the biases of a head to the log-odds of the classes among the training labels.

    One more image with a class and one without are counted, so that no class starts as impossible.
    """
    start_at: Callable[[torch.Tensor], None] | None = getattr(head, "start_at", None)
    if start_at is None:
        raise ConfigError(
            f"train.start_at_frequency: {type(head).__name__} has no bias per class; leave it out"
        )
    positives, negatives = labels.all_counts(1) + 1, labels.all_counts(0) + 1
    start_at(torch.from_numpy(positives / negatives).log().float())


def check_together(config: Config, data: DataModule, loss: nn.Module) -> None:
    """Check that loss, mixing and evaluator fit the data, before anything is trained.

    The attributes `exclusive` and `soft` of a loss, if any, say which targets it takes.
    """
    train, val, loss_name = data.train.classes, data.val.classes, type(loss).__name__

    # A loss without the attribute takes both kinds of data.
    wanted: bool | None = getattr(loss, "exclusive", None)
    if wanted is not None and wanted is not train.exclusive:
        kinds = {True: "one label per image", False: "several labels per image"}
        fix = "loss=asl or bce"
        if train.exclusive:
            fix = "loss=cross_entropy, asl_single_label or bce"
        raise ConfigError(
            f"{loss_name} is for {kinds[wanted]}, the data has {kinds[train.exclusive]}: pass {fix}"
        )

    mix = config.mix
    if mix.on and mix.labels is MixLabels.union and train.exclusive:
        raise ConfigError(
            "mix.labels=union gives an image two labels, in this data it has one: leave it out"
        )
    if mix.soft and not getattr(loss, "soft", False):
        fix = "loss=bce or cross_entropy" if train.exclusive else "loss=bce or asl"
        raise ConfigError(f"mix makes soft labels, {loss_name} wants 0 and 1: choose {fix}")

    # Random queries belong to no class, and each is a positive. A buffer of one number is for all
    # classes, and an estimate of priors has its numbers after the first batch.
    per_class = [name for name, values in loss.named_buffers() if values.ndim]
    if config.loss.get("class_prior") == "estimate":
        per_class.append("estimate")
    if config.train.random_queries and (train.exclusive or per_class):
        reason = "the data has one label per image"
        if not train.exclusive:
            reason = f"{loss_name} has a value per class ({', '.join(per_class)})"
        raise ConfigError(
            f"train.random_queries adds queries that are no class, and {reason}: leave one out"
        )

    # Raises for settings that do not fit the classes, such as top-5 of three.
    data.make_evaluator(val)


def prepare_trainer(
    config: Config, parts: build.Parts, directory: Path, device: torch.device, stop: StopRequest
) -> tuple[Trainer, Path | None]:
    """Build the parts of a run, and resume or initialize it.

    Returns the trainer, and the path of the checkpoint that it resumes from, if any.
    """
    # The newest version of the checkpoint that is not damaged.
    last = distributed.on_main(partial(resume_point, config, directory))
    saved = distributed.on_main(partial(loading.load_newest, last)) if last else None
    path, saved_checkpoint = saved or (None, None)
    precision = used_precision(config.train.precision, saved_checkpoint, device)
    config = replace(config, train=replace(config.train, precision=precision))

    # The weights of a checkpoint replace pretrained ones: those need not be downloaded.
    torch.manual_seed(config.seed)
    data = build.data(parts)
    loss = build.loss(parts, lambda: labels_of(data.train, config.seed))
    check_together(config, data, loss)
    if config.train.fit_memory:
        config, parts = divide_batch(config, parts, data, loss, saved_checkpoint, device)
    model = build.model(parts, data.train.classes, pretrained=not (saved or config.init))
    if config.train.start_at_frequency and not saved:
        start_at_frequency(model.head, labels_of(data.train, config.seed))
    if config.init and not saved:
        log.info(loading.initialise(model, config.start, data.train.classes.names))

    model.to(device)
    if config.train.cache_features:
        # The tokens are those of the weights that the run goes on from.
        if path and saved_checkpoint:
            loading.load_strict(model, saved_checkpoint.model, path)
        data = with_tokens(data, model.backbone, config, device=device, stop=stop)
        model = TokenClassifier(model.backbone, model.head)

    folder = directory / "checkpoints"
    trainer = Trainer(config, model, loss, data, folder=folder, device=device, stop=stop)
    if path and saved_checkpoint:
        trainer.resume(saved_checkpoint, path)
    return trainer, path


def used_precision(wanted: Precision, saved: Checkpoint | None, device: torch.device) -> Precision:
    """Return the precision that a run uses on a device, for its record.

    A resumed run keeps what it has used so far, if that is what the setting meant where it began.
    """
    if saved is not None:
        before = Precision(saved.config["train"]["precision"])
        if wanted.may_mean(before):
            wanted = before
    return wanted.on(device)


def resume_point(config: Config, directory: Path) -> Path | None:
    """Return the path of the checkpoint to resume from, if any; an older version may be there."""
    last = directory / "checkpoints" / "last.pt"
    holds_run = any(last.parent.glob("last*.pt"))

    # torchrun restarts all processes after one of them failed, with the same command.
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if config.resume == "auto" or (is_restarted and holds_run):
        return last if holds_run else None

    # A run is never replaced unless the user says so.
    if config.resume is None:
        if holds_run:
            raise CheckpointError(
                f"{directory} holds a run: pass resume=auto to go on, or name=... for a new run"
            )
        return None

    path = Path(config.resume)
    if not path.is_file() or path.suffix == ".safetensors":
        fault = "there is no such file; pass resume=auto or a checkpoint"
        if config.resume.startswith("hf:") or path.is_file():
            fault = "a published checkpoint holds no training state; start from it by init="
        raise CheckpointError(f"resume={config.resume}: {fault}")
    if holds_run and not is_inside(path, directory):
        raise CheckpointError(
            f"resume={config.resume}: {directory} holds another run, which it would replace; "
            f"pass name=... for a new folder, or resume=auto to go on with the one that is there"
        )
    return path


def is_inside(path: Path, directory: Path) -> bool:
    """Tell whether a file is in the folder of a run; the file may be a link to one elsewhere."""
    return path.parent.resolve().is_relative_to(directory.resolve())


def describe_run(trainer: Trainer, wanted: Precision) -> str:
    """Describe what is about to be trained, on which data, and where it starts."""
    config, learner = trainer.config, trainer.learner
    train, val = trainer.data.train, trainer.data.val

    trainable, total = count_parameters(learner.model)
    parameters = f"{trainable / 1e6:.2f} M trainable parameters"
    if config.train.freeze or config.train.freeze_batchnorm:
        parameters = f"{trainable / 1e6:.2f} of {total / 1e6:.2f} M parameters train"

    precision = learner.precision.value
    if learner.precision is not wanted:
        precision += f" (train.precision={wanted.value})"
    batch = f"batches of {config.train.batch_size:,} images"
    if config.train.batch_per_gpu is not None:
        batch += (
            f" (train.batch_per_gpu {config.train.batch_per_gpu} x {distributed.world_size()} "
            f"processes x train.accumulate {config.train.accumulate}, in place of train.batch_size)"
        )
    images = images_per_batch_norm(trainer)
    if images not in (None, config.train.batch_size):
        batch += f", batch norms see {images:,} at a time"

    splits = f"{len(train.dataset):,} training and {len(val.dataset):,} validation images"
    if trainer.batches.factors is not None:
        splits += f" ({trainer.batches.num_images:,} images per epoch: data.sampler=repeat_factor)"

    if trainer.ended:
        moment = f"ended after epoch {trainer.epoch}, nothing is left to train"
    else:
        moment = f"epoch {trainer.epoch + 1} of {config.train.last_epoch}"
        if config.train.stop_epoch is not None:
            moment += f" ({config.train.epochs} are planned)"
        moment += f", {trainer.position} of {trainer.batches.steps} steps done"

    return (
        f"{config.name}: {parameters}, {len(val.classes)} classes, "
        f"{splits}, {precision} on {trainer.device} x {distributed.world_size()}, {batch}, {moment}"
    )


def images_per_batch_norm(trainer: Trainer) -> int | None:
    """Return of how many images each batch norm in training mode takes the statistics, if any."""
    learner, train = trainer.learner, trainer.config.train
    norms = {module for module in learner.model.modules() if isinstance(module, _BatchNorm)}
    if not norms - set(learner.frozen_norms):
        return None
    return train.micro_batch(1 if train.sync_batchnorm else distributed.world_size())


def few_per_batch_norm(trainer: Trainer) -> str | None:
    """Return a warning if the statistics of batch norms come from few images."""
    images = images_per_batch_norm(trainer)
    if images is None or images >= ENOUGH_FOR_BATCH_NORM:
        return None

    return (
        f"each batch norm sees only {images} images at a time, and results may suffer below "
        f"{ENOUGH_FOR_BATCH_NORM}: raise the batch, lower train.accumulate, pass "
        f"train.sync_batchnorm=true on several GPUs, or choose a network without batch norm"
    )


def start_weights(config: Config, resumed: Path | None = None) -> str:
    """Name the weights that a run starts from, or began with and the checkpoint it resumes from."""
    pretrained = config.backbone.get("pretrained")
    if config.init:
        weights = f"init={config.start.path}"
        if config.start.classes:
            weights += " init.classes=by_name"
    elif "pretrained" not in config.backbone:
        weights = f"those that {config.backbone['_target_']} is built with; the head is random"
    elif pretrained is True:
        weights = f"the published {config.backbone.get('name', 'weights')}; the head is random"
    elif pretrained:
        weights = f"backbone.pretrained={pretrained}; the head is random"
    else:
        weights = "random"

    if resumed is None:
        return f"start weights: {weights}"
    return f"start weights: {resumed}, of a run that began with: {weights}"


def run_facts(trainer: Trainer) -> RunFacts:
    """Return the content of run.json for a run that is about to start or to resume."""
    config, model, size = trainer.config, trainer.learner.model, trainer.data.transform.image_size
    classifier = Classifier(model.backbone, model.head)
    products = work_per_image(classifier, size, trainer.data.val.classes.queries)
    return RunFacts(
        name=config.name,
        command=command_line(),
        versions=installed(),
        commit=trainer.git,
        epochs=config.train.epochs,
        image_size=size,
        parameters=count_parameters(model)[0],
        multiply_accumulates=None if products is None else round(products),
        start_epoch=trainer.epoch,
        best={} if trainer.best.metric is None else dataclasses.asdict(trainer.best),
        ended=trainer.ended,
    )
