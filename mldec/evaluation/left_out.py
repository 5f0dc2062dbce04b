"""Leave-one-out scores of the training images, which replace their own scores in evaluations."""

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mldec.checkpoint import Loaded
from mldec.config.schema import Config
from mldec.data.sampling import SampleRandom
from mldec.data.table import encode_paths
from mldec.data.types import DataModule, Split, StoredImages
from mldec.errors import naming_errors
from mldec.files.atomic import replacing
from mldec.files.cache import network_hash
from mldec.files.run_folder import LEFT_OUT, RESTORE, folder_of_run

log = logging.getLogger("mldec")

SOURCE = "leave-one-out"


@dataclass(frozen=True, eq=False)
class StoredLogits(StoredImages):
    """Images with stored logits, float32 [N, K], which `Classifier` returns unchanged."""

    logits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the logits [K] and the target int8 [K] of an image."""
        if np.isnan(self.logits[index]).any():
            # The image was unreadable: raise its error again.
            super().load(index, rng)
        return torch.from_numpy(self.logits[index]), self.labels.row(index)


def image_names(split: Split, config: Config) -> np.ndarray:
    """Return the paths of images relative to data.root, bytes [N].

    The keys of a storage would not do: train/cat/1.jpg and val/cat/1.jpg are other images, and both
    have the key cat/1.jpg.
    """
    root = str(config.data.get("root") or os.curdir)
    indices = range(len(split.dataset))
    return encode_paths([os.path.relpath(split.dataset.name(index), root) for index in indices])


def write(folder: Path, head: nn.Module, names: np.ndarray, logits: np.ndarray) -> None:
    """Write the left-out logits [N, K] of images, see `image_names`, to the folder of a run."""
    with replacing(folder / LEFT_OUT, of_run=True) as file:
        np.savez(file, names=names, logits=logits, head=network_hash(head))


def with_left_out(
    split: Split, config: Config, names: np.ndarray, logits: np.ndarray
) -> Split | None:
    """Return a split whose images have their left-out logits, or None if an image has none."""
    images = split.dataset
    assert isinstance(images, StoredImages)
    row_of = {name: row for row, name in enumerate(names.tolist())}
    rows = [row_of.get(name, -1) for name in image_names(split, config).tolist()]
    if min(rows) < 0:
        return None
    fields = (images.storage, images.labels, images.classes, images.transform)
    return replace(split, dataset=StoredLogits(*fields, logits=logits[rows]))


def reuse_left_out(data: DataModule, loaded: Loaded, config: Config) -> DataModule | None:
    """Replace validation images that were training images by their left-out scores.

    Returns None if another image is among them, or for other models and input transforms.
    """
    folder = folder_of_run(loaded.path)
    dataset = data.val.dataset
    if folder is None or not loaded.model.is_fitted or loaded.model.views is not None:
        return None
    path = folder / LEFT_OUT
    same_input = getattr(dataset, "transform", None) == loaded.transform
    if not path.is_file() or not isinstance(dataset, StoredImages) or not same_input:
        return None

    with naming_errors(path, remedy=RESTORE), np.load(path, allow_pickle=False) as stored:
        # The file may be of another training in this folder.
        if str(stored["head"]) != network_hash(loaded.model.head):
            return None
        split = with_left_out(data.val, config, stored["names"], stored["logits"])
    if split is None:
        return None
    log.info(f"{SOURCE} scores of {path} are used, because these images trained the head")
    return replace(data, load_val=lambda: split, loads_slowly=False)
