"""Training of heads that are fitted in closed form, in one pass over cached features.

`HeadFit` takes the place of the `Learner` in `Trainer`, so that checkpoints, logs, evaluation and
resuming are the same as for heads that are trained by gradient descent.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mldec import build
from mldec.checkpoint.loading import load_strict
from mldec.checkpoint.state import Calibration, Checkpoint
from mldec.config.compose import to_dict
from mldec.config.schema import Config
from mldec.data.fingerprint import fingerprint
from mldec.data.sampling import SampleRandom
from mldec.data.types import Split
from mldec.errors import ConfigError, DataError, log
from mldec.evaluators.calibration import MIN_POSITIVES, Choice, Objective, fit
from mldec.losses.base import as_loss
from mldec.model import Classifier
from mldec.names import format_list
from mldec.runtime.console import progress_bar
from mldec.training.step import StepStats

# Settings of training by gradient descent, as prefixes of keys. The values in the files of an
# experiment are ignored, so that `head=ridge` can be added to any experiment. A value that the user
# has typed raises an error, because it has no effect.
UNUSED: tuple[str, ...] = ("loss", "optim.", "schedule.", "mix.", "init.classes", "init.synonyms")
UNUSED += ("data.sampler", "data.repeat_threshold", "train.epochs", "train.min_steps")
UNUSED += ("train.stop_epoch", "train.patience", "train.max_drop", "train.repeats", "train.ema_")
UNUSED += ("train.clip_grad", "train.compile", "train.start_at_frequency", "train.random_queries")

FEW_POSITIVES = 20  # classes with fewer positives have uncertain leave-one-out metrics


def check_settings(config: Config, parts: build.Parts, typed: Sequence[str]) -> None:
    """Validate the settings of a head that is fitted in closed form. Other heads are not checked.

    Raises ConfigError if the features are not cached, or if a setting has no effect that the user
    has typed as key=value.
    """
    if not build.is_fitted(parts):
        return
    name = parts["head"].target.__name__
    for word in typed:
        # The command line adds ++ and quotes to settings of the data for Hydra.
        key, _, value = word.lstrip("+~").replace("'", "").partition("=")
        if key.startswith(UNUSED):
            fault = f"{name} does not use it; remove it, or pass head=csra"
            raise ConfigError(f"{key}={value}: {fault}")
    # All features must be in memory at once, and the backbone must not change after the fit.
    if not config.train.cache_features:
        raise ConfigError(
            f"head: {name} is fitted on a frozen backbone; pass train.freeze=[backbone] "
            f"train.cache_features=true, or head=csra"
        )


class HeadFit:
    """Fits a head in closed form. It has the attributes of a `Learner` that `Trainer` uses.

    The fit counts as a run of one step and one epoch.
    """

    def __init__(
        self, config: Config, model: Classifier, loss: nn.Module, *, device: torch.device
    ) -> None:
        self.config = config
        self.model = model.requires_grad_(False)
        # The backbone in a file of `init` may have blocks that it had not when the head was built.
        sizes = getattr(model.backbone, "block_sizes", None)
        if sizes and model.needs_blocks:
            head: Any = model.head
            head.blocks = dict(sizes)
        self.loss = as_loss(loss).to(device)  # only used for the loss in the evaluation
        self.device = device
        self.precision = config.train.precision.for_device(device)

        # Attributes of `Learner`, which describe a run of one step without a moving average.
        self.step = 0
        self.steps = 1
        self.pieces = config.train.pieces
        self.skipped = 0
        self.average: nn.Module | None = None

    def fit(self, split: Split) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Fit the head to a split with cached features, see `frozen_features.with_tokens`.

        Returns the leave-one-out logits float32 [N, K], which are NaN for unreadable images, the
        indices of the readable images in the order of the fit, and a message per unreadable image.
        Raises DataError if no image is readable.
        """
        dataset = split.dataset
        rows = []
        features = []
        bad = []

        # Images of a series, such as the frames of a video, have neighboring names. Sort them by
        # name, so that the head can detect series. Keys of shards are file sizes and have no order.
        keys = dataset.storage.keys  # type: ignore[attr-defined]
        order = np.arange(len(keys))
        if keys.dtype.kind == "S":
            order = np.argsort(keys, kind="stable")

        for index in progress_bar(order.tolist(), desc="read features"):
            try:
                tokens, _ = dataset.load(index, SampleRandom(0))
            except DataError as error:
                bad.append(str(error))
                continue
            rows.append(index)
            # This conversion is exact, because the files have half precision.
            features.append(tokens[0].half())
        if not rows:
            raise DataError(bad[0])

        # The linear algebra needs float64, which is slow or missing on other devices.
        head: Any = self.model.head.cpu()
        labels = self.labels(split)[rows]
        groups = None if split.groups is None else split.groups[rows]
        exclusive = split.classes.exclusive
        log.info(f"fitting the head to {len(rows):,} images in closed form")
        head.fit(torch.stack(features), labels, groups, exclusive=exclusive)
        self.model.head.to(self.device)
        self.step = 1

        left_out = np.full((len(dataset), len(split.classes)), np.nan, np.float32)
        left_out[rows] = head.left_out
        return left_out, np.array(rows), bad

    @staticmethod
    def labels(split: Split) -> np.ndarray:
        """Return the labels of a split with stored images, int8 [N, K]: 1, 0 or -1 (unknown)."""
        labels: np.ndarray = split.dataset.labels.dense()  # type: ignore[attr-defined]
        return labels

    def read(self) -> list[StepStats]:
        """Return the statistics of finished steps, of which there are none; see `Learner.read`."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint; see `Learner.state`."""
        return {"step": self.step, "model": self.model.state_dict()}

    def load_state(self, saved: Checkpoint, path: Path) -> None:
        """Restore the model from a checkpoint."""
        load_strict(self.model, saved.model, path)
        self.step = saved.step


def uncertain_classes(labels: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return warnings about classes that cannot be learned or evaluated reliably.

    Labels are [N, K] of 1, 0 or -1 (unknown).
    """
    # A class with only positives or only negatives has the same score for all images. The
    # leave-one-out metrics of a class with few positives depend on a few images.
    positives = (labels == 1).sum(0)
    negatives = (labels == 0).sum(0)
    messages = []
    is_constant = (positives == 0) | (negatives == 0)
    if is_constant.any():
        constant = format_list(list(compress(names, is_constant)))
        messages.append(f"only one kind of label, and so a constant score: {constant}")
    is_rare = ~is_constant & (positives < FEW_POSITIVES)
    if is_rare.any():
        rare = format_list(list(compress(names, is_rare)))
        messages.append(
            f"the leave-one-out metrics of {is_rare.sum()} classes with fewer than {FEW_POSITIVES} "
            f"positives are uncertain: {rare}"
        )
    return messages


def calibrate(left_out: np.ndarray, split: Split, config: Config) -> Calibration | None:
    """Fit thresholds for F1 to leave-one-out logits [N, K], as `mldec calibrate` does.

    The model needs no further calibration images, because these logits are not optimistic.
    Single-label models have no thresholds, and their logits are calibrated by the head. Returns
    None if no image has a positive label.
    """
    labels = HeadFit.labels(split)
    readable = np.isfinite(left_out).all(1)
    if not (labels[readable] == 1).any():
        return None
    calibration = Calibration(
        weights="raw",
        images=int(readable.sum()),
        data=to_dict(config)["data"],
        fingerprint=fingerprint(split),
    )
    if split.classes.exclusive:
        return calibration
    choice = Choice(Objective("f1", "f1", ()), "class", MIN_POSITIVES)
    fitted = fit(left_out, labels, readable, choice)
    return replace(
        calibration,
        objective=choice.objective.text,
        scope=choice.scope,
        thresholds=tuple(fitted.thresholds.tolist()),
        slopes=tuple(fitted.slopes.tolist()),
        offsets=tuple(fitted.offsets.tolist()),
    )
