"""Score images with models that were not trained on them, and say so where one was."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

from mldec import build
from mldec.checkpoint import Loaded, scoring
from mldec.config.compose import override
from mldec.config.schema import Config
from mldec.data.base import DataModule, ImageDataset, LabelledImages, Split, StoredImages
from mldec.data.fingerprint import check_same, difference, fingerprint
from mldec.data.folds import parse_fold
from mldec.data.images import read_image
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.evaluation import choose_precision, memory_advice, score
from mldec.runtime import distributed, out_of_memory
from mldec.runtime.console import on_terminal

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
        dataset, index = self.datasets[self.models[image]], int(self.indices[image])
        if isinstance(dataset, StoredImages):
            return read_image(dataset.name(index), dataset.storage.content(index))
        return Image.fromarray(dataset[index][0].permute(1, 2, 0).numpy())


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
    several = len(models) > 1
    folds = left_out_folds(paths, models)
    chosen = any(setting.startswith("data.fold=") for setting in settings)
    if several and split != "val":
        raise ConfigError(f"--split {split}: the folds are all training images; leave it out")
    if several and chosen:
        raise ConfigError("data.fold: each checkpoint says which fold it left out; leave it out")

    config = override(models[0].config, settings)
    device = distributed.pick_device(config.device)
    choose_precision(config, settings, device)

    # All of them first: what does not fit is refused before an image is scored.
    data, networks = [], []
    for path, model, fold in zip(paths, models, folds, strict=True):
        # data=NAME among the settings chooses no fold.
        own = config
        if fold is not None and not chosen:
            own = replace(config, data={**config.data, "fold": fold})
        module = build.data(build.check(own, ["data"]))

        judged = module.val if split == "val" else module.train
        _check_several_labels(judged)
        networks.append(scoring(model.model, model.classes, judged.classes, path))
        if several:
            _check_fold(path, model, module, allow=config.accepts_changed_data)
        else:
            _warn_of_training(path, model, module, split)
        data.append(_as_validation(judged, module, model))

    columns = []
    for network, module, fold in zip(networks, data, folds, strict=True):
        title = "score" if fold is None else f"score fold {fold}"
        columns.append(_scored(network, module, config, device, title))
    indices, labels, logits, bad = zip(*columns, strict=True)

    if not any(map(len, indices)):
        raise DataError(f"no image can be read; the first message: {bad[0][0]}")
    finite = [np.isfinite(part).all() for part in logits]
    if not all(finite):
        path = paths[finite.index(False)]
        raise DataError(f"{path}: a score is not finite; look at the weights of the checkpoint")

    return Judged(
        [module.val.dataset for module in data],
        data[0].val.classes.names,
        np.repeat(np.arange(len(models)), [len(part) for part in indices]),
        np.concatenate(indices),
        np.concatenate(labels),
        np.concatenate(logits),
        [message for messages in bad for message in messages],
    )


def _check_several_labels(split: Split) -> None:
    """Raise a `ConfigError` if each image has one label: the classes are not independent then."""
    if split.classes.exclusive:
        raise ConfigError(
            "--checkpoint: wrong labels are looked for where an image may have several, "
            "this data has one label per image; leave it out"
        )


def _check_fold(path: str, model: Loaded, data: DataModule, *, allow: bool) -> None:
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


def _as_validation(judged: Split, data: DataModule, model: Loaded) -> DataModule:
    """Return a dataset whose validation images are those to judge, as the model takes them."""
    # The training transform changes images at random, and data=NAME brings a size of its own.
    dataset = judged.dataset
    if isinstance(dataset, StoredImages):
        images = LabelledImages(dataset.storage, dataset.labels, judged.classes.names)
        dataset = StoredImages(images, model.transform)

    split = Split(dataset, judged.classes)
    return replace(data, load_val=lambda: split, bad_images="skip")


def _scored(
    network: nn.Module, data: DataModule, config: Config, device: torch.device, title: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Return indices [n], labels [n, K] and logits [n, K] of the images, and what is unreadable."""
    # An empty batch first, since perhaps no image can be read.
    nothing = torch.zeros(0, len(data.val.classes))
    indices, labels, logits = [torch.zeros(0, dtype=torch.int64)], [nothing], [nothing]
    bad: list[str] = []

    bar = partial(tqdm, desc=title, leave=False, disable=not on_terminal())
    with out_of_memory.explained(lambda: memory_advice(config, device)):
        network.to(device).eval()
        for batch, scores in score(network, data, config, device=device, progress=bar):
            bad += batch.bad
            if len(batch.images):
                indices.append(batch.indices)
                labels.append(batch.targets)
                logits.append(scores.cpu())
    network.cpu()

    # With data.sizes=true a label is a code of the sizes of objects; each of them means present.
    return (
        torch.cat(indices).numpy(),
        torch.cat(labels).clamp(max=1).numpy().astype(np.int8),
        torch.cat(logits).numpy(),
        bad,
    )
