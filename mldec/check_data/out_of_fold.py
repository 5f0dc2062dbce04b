"""Score images with models that were not trained on them, and say so where one was."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import nn

from mldec import build
from mldec.checkpoint import Loaded, scoring
from mldec.config.compose import override
from mldec.data.base import DataModule, ImageDataset, picture
from mldec.data.fingerprint import check_same, difference, fingerprint
from mldec.data.folds import parse_fold
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.evaluation import all_scores
from mldec.evaluation.command import fit_to_device
from mldec.runtime import distributed

log = logging.getLogger("mldec")


@dataclass(frozen=True)
class Judged:
    """N images with their labels of K classes, and what a model says of each.

    Attributes:
        datasets: that the images are from, one per model.
        classes: K names.
        models: index of the model and the dataset of each image, int64 [N].
        indices: of the images in their datasets, int64 [N].
        labels: 1 (present), 0 (absent) or -1 (not annotated), int8 [N, K].
        logits: float32 [N, K].
        bad: one message per image that cannot be read; it is not among the N.
    """

    datasets: Sequence[ImageDataset]
    classes: tuple[str, ...]
    models: np.ndarray
    indices: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    bad: Sequence[str]

    def name(self, image: int) -> str:
        """Describe an image: its path, if it has one."""
        return self.datasets[self.models[image]].name(int(self.indices[image]))

    def picture(self, image: int) -> Image.Image:
        """Return an image as it is stored, RGB; one without a file as the model sees it.

        Raises:
            DataError: if it cannot be read.
        """
        return picture(self.datasets[self.models[image]], int(self.indices[image]))


def left_out_folds(paths: Sequence[str], models: Sequence[Loaded]) -> list[str | None]:
    """Return the fold that each model left out of its training; None for a model without folds.

    Raises:
        CheckpointError: if there are several models, and they are not one per fold.
    """
    folds = [model.config.data.get("fold") for model in models]
    if len(paths) == 1:
        return folds

    path_of: dict[str, str] = {}
    for path, fold in zip(paths, folds, strict=True):
        if fold is None:
            raise CheckpointError(
                f"{path} was trained without data.fold: give one --checkpoint, or one per fold, "
                f"trained with data.fold=1/{len(paths)} to {len(paths)}/{len(paths)}"
            )
        if _count(fold, path) != len(paths):
            raise CheckpointError(
                f"{path} left out fold {fold}, and there are {len(paths)} checkpoints: "
                f"give one --checkpoint for each of its folds"
            )
        if fold in path_of:
            raise CheckpointError(
                f"{path} left out fold {fold}, as {path_of[fold]} did: "
                f"give one --checkpoint for each fold"
            )
        path_of[fold] = path
    return folds


def _count(fold: object, path: str) -> int:
    """Return N of a fold "i/N" from a file that may hold anything."""
    try:
        return parse_fold(str(fold))[1]
    except ValueError as error:
        raise CheckpointError(f"the config in {path} cannot be used: data.{error}") from error


def judge(
    paths: Sequence[str], models: Sequence[Loaded], settings: list[str], *, split: str
) -> Judged:
    """Score the images of a split, or of all folds.

    Args:
        paths: of the checkpoints, for messages.
        models: one model, or one per fold, which scores the images that it was not trained on.
        settings: such as data.root=/data/mine; they change the config of the first checkpoint.
        split: "val" or "train"; with several models "val", which is the fold of each.

    Raises:
        CheckpointError: if the models are not one per fold, or one does not fit the data.
        ConfigError: for a wrong setting, or data with one label per image.
        DataError: if the data cannot be read, or a score is not finite.
    """
    folds = left_out_folds(paths, models)
    chooses_fold = any(setting.startswith("data.fold=") for setting in settings)
    if len(models) > 1 and split != "val":
        raise ConfigError(f"--split {split}: the folds are all training images; leave it out")
    if len(models) > 1 and chooses_fold:
        raise ConfigError("data.fold: each checkpoint says which fold it left out; leave it out")

    config = override(models[0].config, settings)
    device = distributed.pick_device(config.device)
    fit_to_device(config, settings, device)

    # What does not fit is refused before the first image is scored.
    judges = []
    for path, model, fold in zip(paths, models, folds, strict=True):
        own_config = config
        if fold is not None and not chooses_fold:
            own_config = replace(config, data={**config.data, "fold": fold})
        data = build.data(build.check(own_config, ["data"]))

        judges.append(_judge(path, model, data, split))
        if len(models) > 1:
            _check_training(path, model, data, allow=config.accepts_changed_data)
        else:
            _warn_of_training(path, model, data, split)

    scores = [
        all_scores(judge.network, judge.data, config, device=device, path=judge.path)
        for judge in judges
    ]
    bad = [message for part in scores for message in part.bad]
    sizes = [len(part.indices) for part in scores]
    if not sum(sizes):
        raise DataError(f"no image can be read; the first message: {bad[0]}")

    return Judged(
        [judge.data.val.dataset for judge in judges],
        judges[0].data.val.classes.names,
        np.repeat(np.arange(len(judges)), sizes),
        np.concatenate([part.indices for part in scores]),
        np.concatenate([part.labels for part in scores]),
        np.concatenate([part.logits for part in scores]),
        bad,
    )


class _Judge(NamedTuple):
    """A model, and the images that it scores."""

    path: str
    network: nn.Module
    data: DataModule  # whose validation images are those to score


def _check_training(path: str, model: Loaded, data: DataModule, *, allow: bool) -> None:
    """Raise a `CheckpointError` if a model was trained on other images than those of its fold."""
    warning = check_same(model.fingerprint, fingerprint(data.train), Path(path), allow=allow)
    if warning is not None:
        log.warning(warning)


def _warn_of_training(path: str, model: Loaded, data: DataModule, split: str) -> None:
    """Warn if a model may have been trained on the images to judge: it learns wrong labels too."""
    doubt = "if these images were among it, their wrong labels were learned and few are found"
    changed = None
    if model.fingerprint is not None:
        changed = difference(model.fingerprint, fingerprint(data.train))

    if model.fingerprint is None:
        log.warning(f"{path} does not say on which data it was trained: {doubt}")
    elif changed is not None:
        log.warning(f"{path} was trained on other data ({changed}): {doubt}")
    elif split == "train":
        log.warning(
            f"{path} was trained on these images, and their wrong labels too: more of them are "
            f"found with one checkpoint per fold, trained with data.fold=1/N to N/N"
        )


def _judge(path: str, model: Loaded, data: DataModule, split: str) -> _Judge:
    """Join a model and the images of a split, which it then sees as in its own evaluation.

    Raises:
        CheckpointError: if the model has other classes than the data.
        ConfigError: if each image has one label: the classes are not independent then.
    """
    judged = data.val if split == "val" else data.train
    if judged.classes.exclusive:
        raise ConfigError(
            "--checkpoint: wrong labels are looked for where an image may have several, "
            "this data has one label per image; leave it out"
        )
    network = scoring(model.model, model.classes, judged.classes, path)

    # The training transform changes images at random, and data=NAME brings a size of its own.
    viewed = judged.viewed(model.transform)
    return _Judge(path, network, replace(data, load_val=lambda: viewed, bad_images="skip"))
