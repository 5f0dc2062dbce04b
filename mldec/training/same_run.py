"""Whether a checkpoint is of this run, so that training can go on from it."""

from pathlib import Path

from mldec import checkpoint
from mldec.checkpoint import Checkpoint, check_classes
from mldec.config.compose import diff
from mldec.config.schema import Config
from mldec.data.base import Classes
from mldec.data.fingerprint import Fingerprint, check_same
from mldec.errors import CheckpointError


def check_same_run(
    saved: Checkpoint,
    path: Path,
    *,
    config: Config,
    classes: Classes,
    steps_per_epoch: int,
    fingerprint: Fingerprint,
) -> str | None:
    """Compare a checkpoint with the run that is to go on from it.

    Args:
        saved: the checkpoint.
        path: that it was read from, for messages.
        config: of the run.
        classes: of its validation images.
        steps_per_epoch: optimiser steps per epoch.
        fingerprint: of its training images and labels.

    Returns:
        A warning if the training data differs and the config allows that, else None.

    Raises:
        CheckpointError: if settings, classes, the number of steps or the training data differ.
    """
    changed = diff(checkpoint.saved_config(saved, path, config.plugins), config)
    if changed:
        raise CheckpointError(
            f"{path} is of a run with other settings ({'; '.join(changed)}): "
            f"put them back, or start a new run with name=... init={path}"
        )
    check_classes(saved.classes, classes, path)

    # A step in the middle of an epoch must stand for the same images as before.
    if saved.steps_per_epoch != steps_per_epoch:
        raise CheckpointError(
            f"{path} has {saved.steps_per_epoch} steps per epoch, this run {steps_per_epoch}: "
            f"use the same training images, "
            f"and a number of processes that divides their last batch as before"
        )
    return check_same(saved.fingerprint, fingerprint, path, allow=config.accepts_changed_data)
