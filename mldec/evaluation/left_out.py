"""Leave-one-out scores of training images, which replace their in-sample scores in evaluations.

In-sample scores are optimistic: the model has seen these labels. The fit of a head in closed form
also gives the score that each training image would have if it had not been used. These scores are
stored in the folder of the run, so that a later `mldec evaluate` or `calibrate` can use them.
"""

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
from mldec.data.types import DataModule, ImagesInMemory, Split, StoredImages
from mldec.errors import naming_errors
from mldec.files.atomic import replacing
from mldec.files.cache import network_hash
from mldec.files.run_folder import LEFT_OUT, RESTORE, folder_of_run

log = logging.getLogger("mldec")

SOURCE = "leave-one-out"  # origin of metrics in logs


@dataclass(frozen=True, eq=False)
class StoredLogits(StoredImages):
    """Images whose logits are stored, float32 [N, K]. `Classifier` returns them unchanged."""

    logits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the logits [K] and the target int8 [K] of an image."""
        if np.isnan(self.logits[index]).any():
            # The image was unreadable: raise its error again.
            super().load(index, rng)
        return torch.from_numpy(self.logits[index]), self.labels.row(index)


def image_names(split: Split, config: Config) -> np.ndarray:
    """Return the paths of images relative to data.root, bytes [N].

    The keys of a storage are not sufficient: train/cat/1.jpg and val/cat/1.jpg are different images
    that both have the key cat/1.jpg. Absolute paths would change if the data is moved.
    """
    storage = getattr(split.dataset, "storage", None)
    if isinstance(storage, ImagesInMemory):
        # The rows of another data set have the same names.
        return encode_paths([key.tobytes().hex() for key in storage.keys])
    root = str(config.data.get("root") or os.curdir)
    indices = range(len(split.dataset))
    return encode_paths([os.path.relpath(split.dataset.name(index), root) for index in indices])


def write(folder: Path, head: nn.Module, names: np.ndarray, logits: np.ndarray) -> None:
    """Write leave-one-out logits [N, K] to the folder of a run.

    Args:
        folder: Folder of the run.
        head: The fitted head. A hash of its state is stored to recognize it later.
        names: Names of the images, see `image_names`.
        logits: Logits, which are NaN for unreadable images.
    """
    with replacing(folder / LEFT_OUT, of_run=True) as file:
        np.savez(file, names=names, logits=logits, head=network_hash(head))


def with_left_out(
    split: Split, config: Config, names: np.ndarray, logits: np.ndarray
) -> Split | None:
    """Return a split with leave-one-out logits, or None if they are missing for any of its images.

    The labels are those of the split, so that corrected labels are evaluated. For `names` and
    `logits` see `write`.
    """
    images = split.dataset
    assert isinstance(images, StoredImages)
    row_of = {name: row for row, name in enumerate(names.tolist())}
    rows = [row_of.get(name, -1) for name in image_names(split, config).tolist()]
    if min(rows) < 0:
        return None
    fields = (images.storage, images.labels, images.classes, images.transform)
    return replace(split, dataset=StoredLogits(*fields, logits=logits[rows]))


def reuse_left_out(data: DataModule, loaded: Loaded, config: Config) -> DataModule | None:
    """Replace the validation images by their leave-one-out scores if the head was fitted to them.

    Returns None if any validation image was not a training image, if the head was not fitted in
    closed form, or if the input transform or the head differs from the fit.
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
        # The file may belong to an earlier run in this folder.
        if str(stored["head"]) != network_hash(loaded.model.head):
            return None
        split = with_left_out(data.val, config, stored["names"], stored["logits"])
    if split is None:
        return None
    log.info(f"{SOURCE} scores of {path} are used, because these images trained the head")
    return replace(data, load_val=lambda: split, loads_slowly=False)
