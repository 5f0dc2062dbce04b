"""Start of a training run: checks, parts and resume."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mldec import build
from mldec.backbones.openvino_backbone import uses_openvino
from mldec.checkpoint import loading
from mldec.checkpoint.classes import check_classes
from mldec.checkpoint.state import Checkpoint
from mldec.config.compose import diff
from mldec.config.schema import Config, MixLabels, Train
from mldec.data.fingerprint import check_same
from mldec.data.labels import Labels
from mldec.data.loader import labels_of
from mldec.data.types import DataModule
from mldec.errors import CheckpointError, ConfigError, log
from mldec.evaluation.frozen_features import with_tokens
from mldec.files.run_folder import holds_run
from mldec.losses.base import Loss
from mldec.runtime import distributed
from mldec.runtime.devices import EngineName, Precision, has_fast_bf16
from mldec.runtime.signals import StopRequest
from mldec.training.trainer import Trainer, warn


def start_at_frequency(head: nn.Module, labels: Labels, loss: Loss) -> None:
    """Set the biases of a head to the log-odds of the classes in the training labels.

    The logit adjustment of the loss is subtracted, because the loss adds it again.
    """
    set_bias_from_prior: Callable[[torch.Tensor], None] | None = getattr(
        head, "set_bias_from_prior", None
    )
    if set_bias_from_prior is None:
        raise ConfigError(
            f"train.start_at_frequency: {type(head).__name__} has no bias per class; remove it"
        )
    log_odds = build.label_counts(labels).log_odds()
    if loss.logit_adjustment is not None:
        log_odds = log_odds - loss.logit_adjustment
    set_bias_from_prior(log_odds)


def check_together(config: Config, data: DataModule, loss: Loss) -> None:
    """Check that loss, mixing and evaluator fit the data."""
    mix = config.mix
    exclusive = data.train.classes.exclusive
    kind = "multi-label"
    fix = "asl or bce"
    if exclusive:
        kind = "single-label"
        fix = "cross_entropy, asl_single_label or bce"

    if loss.exclusive not in (None, exclusive):
        fault = f"{loss.name} does not support {kind} data"
        raise ConfigError(f"loss: {fault}; pass loss={fix}")
    if mix.enabled and mix.labels is MixLabels.union and exclusive:
        raise ConfigError("mix.labels=union: the data is single-label; remove it")
    if mix.enabled and loss.per_image:
        fault = f"{loss.name} keeps a state per image, and a mixed image has none"
        raise ConfigError(f"mix.mixup, mix.cutmix: {fault}; set both to 0")
    if mix.soft and not loss.soft:
        fix = "cross_entropy" if exclusive else "asl"
        fault = f"{loss.name} does not support the soft labels of mix"
        raise ConfigError(f"loss: {fault}; pass loss=bce or loss={fix}")
    if config.train.random_queries:
        _check_random_queries(config, loss, exclusive=exclusive)

    # This raises ConfigError for settings that do not fit the classes, such as top-5 of three.
    data.make_evaluator(data.val.classes)


def _check_random_queries(config: Config, loss: Loss, *, exclusive: bool) -> None:
    """Raise ConfigError if the data or the loss does not support queries without a class."""
    # A buffer with a dimension has a value per class. Estimated priors have no buffer.
    per_class = [name for name, values in loss.named_buffers() if values.ndim]
    if config.loss.get("class_prior") == "estimate":
        per_class.append("estimate")
    per_class += [name for name, _ in loss.named_parameters()]

    reason = None
    if exclusive:
        reason = "the data is single-label"
    elif per_class:
        reason = f"{loss.name} has a value per class ({', '.join(per_class)})"
    if reason is not None:
        raise ConfigError(f"train.random_queries: random queries have no class, but {reason}")


def prepare_trainer(
    config: Config,
    parts: build.Parts,
    directory: Path,
    device: torch.device,
    stop: StopRequest,
    in_memory: Any = None,
) -> tuple[Trainer, Path | None]:
    """Build the trainer of a run. Returns it with the path of the resumed checkpoint, if any."""
    saved: Checkpoint | None = None
    path = distributed.on_main(partial(resume_point, config, directory))
    if path:
        # Fall back to an older version if the checkpoint is damaged.
        path, saved = distributed.on_main(partial(loading.load_newest, path))
    # Record the format in use instead of "auto", which may select another one on another machine.
    precision = used_precision(config.train, saved, device)
    config = replace(config, train=replace(config.train, precision=precision))

    # The seed determines the initial weights, which must be equal on all ranks.
    torch.manual_seed(config.seed)
    data = build.data(parts, in_memory)
    loss = build.loss(parts, lambda: labels_of(data.train, config.seed), data.train)
    is_fitted = build.is_fitted(parts)
    if is_fitted:
        engine = (
            EngineName.openvino if uses_openvino(config.train.engine, device) else EngineName.torch
        )
        config = replace(config, train=replace(config.train, engine=engine))
    check_together(config, data, loss)
    # Pretrained weights are not downloaded if a checkpoint replaces them.
    model = build.model(parts, data.train.classes, pretrained=not (saved or config.init))
    if config.train.start_at_frequency and not (saved or is_fitted):
        start_at_frequency(model.head, labels_of(data.train, config.seed), loss)
    if config.init and not saved:
        log.info(loading.initialize(model, config.start, data.train.classes.names))

    model.to(device)
    if config.train.cache_features:
        # The tokens depend on the weights, so restore these first.
        if path and saved:
            loading.load_strict(model, saved.model, path)
        data = with_tokens(data, model, config, device=device, stop=stop)

    folder = directory / "checkpoints"
    trainer = Trainer(config, model, loss, data, folder=folder, device=device, stop=stop)
    if path and saved:
        check_same_run(trainer, saved, path)
        trainer.resume(saved, path)
    return trainer, path


def check_same_run(trainer: Trainer, saved: Checkpoint, path: Path) -> None:
    """Raise CheckpointError if settings, classes, steps per epoch or data of a run have changed."""
    config = trainer.config
    changed = diff(loading.saved_config(saved, path, config.plugins), config)
    if changed:
        raise CheckpointError(
            f"{path}: other settings than this run ({'; '.join(changed)}); "
            f"restore them, or start a new run with name=... init={path}"
        )
    data = trainer.data
    check_classes(saved.classes, data.val.classes, path)

    # Otherwise the position in the epoch would not have the same images.
    if saved.steps_per_epoch != trainer.batches.steps:
        raise CheckpointError(
            f"{path}: {saved.steps_per_epoch} steps per epoch, this run has "
            f"{trainer.batches.steps}; use the same training images and processes"
        )

    # Changed labels or images would continue another training than the log shows.
    allow = config.data.get("changed") == "allow"
    train_warning = check_same(saved.fingerprint, trainer.fingerprint, path, allow=allow)
    val_warning = check_same(
        saved.val_fingerprint, trainer.val_fingerprint, path, allow=allow, split="validation"
    )
    for warning in (train_warning, val_warning):
        if warning:
            warn(warning)


def used_precision(train: Train, saved: Checkpoint | None, device: torch.device) -> Precision:
    """Resolve the precision on a device. A resumed run keeps its precision, if still allowed.

    `auto` on a CPU is bf16 with cached tokens if that is fast, else fp32.
    """
    # Autocast has no advantage on a CPU without the instructions: bf16 would be emulated.
    wanted = train.precision
    if wanted is Precision.auto and train.cache_features and has_fast_bf16(device):
        wanted = Precision.bf16
    if saved is not None:
        before = Precision(saved.config["train"]["precision"])
        if train.precision.may_fall_back_to(before):
            wanted = before
    return wanted.for_device(device)


def resume_point(config: Config, directory: Path) -> Path | None:
    """Return the path of the checkpoint to resume from, or None; the file may be damaged."""
    last = directory / "checkpoints" / "last.pt"
    is_run = holds_run(directory)

    # torchrun restarts all processes with the same command if one of them fails.
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if is_run and (config.resume == "auto" or is_restarted):
        return last
    if config.resume == "auto":
        return None

    # A run is never overwritten.
    if config.resume is None:
        if is_run:
            raise CheckpointError(
                f"{directory}: the folder holds a run; pass resume=auto to continue, or name=..."
            )
        return None

    path = Path(config.resume)
    # A published checkpoint is also a file, but has neither optimizer nor position.
    is_published = path.suffix == ".safetensors" and path.is_file()
    if is_published or config.resume.startswith("hf:"):
        raise CheckpointError(
            f"resume={config.resume}: a published checkpoint holds no training state; "
            f"pass init= instead"
        )
    if not path.is_file():
        raise CheckpointError(
            f"resume={config.resume}: file not found; pass resume=auto or a checkpoint"
        )
    # The log of this folder would mix two runs.
    if is_run and not is_inside(path, directory):
        raise CheckpointError(
            f"resume={config.resume}: {directory} holds another run; "
            f"pass name=..., or resume=auto to continue it"
        )
    return path


def is_inside(path: Path, directory: Path) -> bool:
    """Return True if a file is in the folder of a run. The file itself may be a symbolic link."""
    return path.parent.resolve().is_relative_to(directory.resolve())
