"""What a run says of itself: the first lines of its log, and run.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from mldec.config.schema import Config
from mldec.files.run_folder import RunFacts, command_line
from mldec.model import Classifier
from mldec.runtime import distributed, provenance
from mldec.runtime.cost import count_parameters, multiply_accumulates
from mldec.runtime.devices import Precision
from mldec.training.trainer import Trainer

# Open Images in the paper: 9,605 classes and 200 queries.
MOST_CLASSES_PER_QUERY = 49
ENOUGH_FOR_BATCH_NORM = 16  # images; with fewer the statistics are noisy (group norm, figure 1)


def opening(trainer: Trainer, wanted: Precision) -> str:
    """Describe what is about to be trained, on which data, and where it starts.

    Args:
        trainer: of the run.
        wanted: the precision that the user asked for.
    """
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
    if (images := images_per_batch_norm(trainer)) is not None:
        batch += f", {images:,} for each batch norm"

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
    """Return of how many images each batch norm takes the statistics in training.

    Returns:
        The number of images, or None for a model without a batch norm in training mode.
    """
    learner, train = trainer.learner, trainer.config.train
    norms = {module for module in learner.model.modules() if isinstance(module, _BatchNorm)}
    if not norms - set(learner.frozen_norms):
        return None

    return train.micro_batch(1 if train.sync_batchnorm else distributed.world_size())


def few_per_batch_norm(trainer: Trainer) -> str | None:
    """Return a warning if the statistics of batch norms come from few images."""
    images, train = images_per_batch_norm(trainer), trainer.config.train
    if images is None or images >= ENOUGH_FOR_BATCH_NORM or train.sync_batchnorm:
        return None

    advice = "raise train.batch_size, lower train.accumulate,"
    if train.batch_per_gpu is not None:
        advice = "raise train.batch_per_gpu,"
    return (
        f"each batch norm sees only {images} images at a time, and results may suffer below "
        f"{ENOUGH_FOR_BATCH_NORM}: {advice} or on several GPUs pass train.sync_batchnorm=true"
    )


def groups(head: Mapping[str, Any], num_classes: int) -> str | None:
    """Describe how the classes share the group queries of a head, for the log of a run.

    Args:
        head: its node, with all arguments.
        num_classes: of training.

    Returns:
        One line; None for a head without groups, or with one query per class as asked for.
    """
    wanted = head.get("num_groups")
    if wanted is None:
        return None
    if wanted >= num_classes:
        return f"head.num_groups={wanted}: one query for each of the {num_classes:,} classes"

    classes_per_query = math.ceil(num_classes / wanted)
    queries = math.ceil(num_classes / classes_per_query)
    line = (
        f"head.num_groups={wanted}: {queries:,} queries for {num_classes:,} classes, "
        f"{classes_per_query:,} per query"
    )
    if classes_per_query > MOST_CLASSES_PER_QUERY:
        line += (
            f"; the paper has at most {MOST_CLASSES_PER_QUERY} per query, "
            f"and with more of them a head looks at fewer places of the image"
        )
    return line


def start_weights(config: Config, resumed: Path | None = None) -> str:
    """Name the weights that a run starts from, for its log.

    Args:
        config: with all arguments of the backbone; of a resumed run its `init` is the one that the
            run began with.
        resumed: the checkpoint that the run goes on from; None for a new run.
    """
    backbone = config.backbone
    if config.init:
        weights = f"init={config.init}"
    elif "pretrained" not in backbone:
        weights = f"those that {backbone['_target_']} is built with; the head is random"
    elif backbone["pretrained"] is True:
        weights = f"the published {backbone['name']}; the head is random"
    elif backbone["pretrained"]:
        weights = f"backbone.pretrained={backbone['pretrained']}; the head is random"
    else:
        weights = "random"

    if resumed is None:
        return f"start weights: {weights}"
    return f"start weights: {resumed}, of a run that began with: {weights}"


def facts(trainer: Trainer) -> RunFacts:
    """Return the content of run.json for a run that is about to start or to resume."""
    config, classes, model = trainer.config, trainer.data.val.classes, trainer.learner.model
    size = trainer.data.transform.image_size
    queries = None if classes.queries is None else (len(classes), classes.queries.shape[1])

    # A part of the user's own may fail on tensors without values. The number is for the summary
    # only, so no error in it ends a run.
    products: int | None
    try:
        classifier = Classifier(model.backbone, model.head)
        products = round(multiply_accumulates(classifier, size, queries))
    except Exception:
        products = None

    trainable, total = count_parameters(model)
    return RunFacts(
        name=config.name,
        command=command_line(),
        versions=provenance.installed(),
        commit=trainer.git,
        epochs=config.train.epochs,
        image_size=size,
        parameters=trainable,
        all_parameters=total,
        multiply_accumulates=products,
        start_epoch=trainer.epoch,
        best={} if trainer.best.metric is None else asdict(trainer.best),
        ended=trainer.ended,
    )
