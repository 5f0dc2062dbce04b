"""Leave-one-out scores of training images, and their contributions to the scores of other images.

In-sample scores are optimistic: the model has seen these labels. The fit of a head in closed form
also gives the score that each training image would have if it had not been used. These scores are
stored in the folder of the run, so that a later `mldec evaluate` or `calibrate` can use them. The
same file has the features of the training images, so that a prediction can be explained by the
training images that contribute most to it. It is never published.
"""

import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mldec.checkpoint import Loaded
from mldec.config.schema import Config
from mldec.data.sampling import SampleRandom
from mldec.data.table import encode_paths
from mldec.data.types import DataModule, ImagesInMemory, Split, StoredImages
from mldec.errors import DataError, log, naming_errors
from mldec.files.atomic import replacing
from mldec.files.cache import network_hash
from mldec.files.run_folder import LEFT_OUT, RESTORE, folder_of_run

SOURCE = "leave-one-out"  # origin of metrics in logs
NUM_CHECKED = 200  # images of a run whose content is compared


@dataclass(frozen=True, eq=False)
class StoredLogits(StoredImages):
    """Images whose logits are stored, float32 [N, K]. `Classifier` returns them unchanged."""

    logits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the logits [K] and the target int8 [K] of an image."""
        if np.isnan(self.logits[index]).any():
            # The image was unreadable: raise its error again, unless it was repaired.
            super().load(index, rng)
            raise DataError(f"{self.name(index)}: it was unreadable in the training; train again")
        return torch.from_numpy(self.logits[index]), self.labels.row(index)


def image_names(split: Split, config: Config) -> np.ndarray:
    """Return the paths of images relative to data.root, bytes [N].

    The keys of a storage are not sufficient: train/cat/1.jpg and val/cat/1.jpg are different images
    that both have the key cat/1.jpg. Absolute paths would change if the data is moved.
    """
    storage = getattr(split.dataset, "storage", None)
    if isinstance(storage, ImagesInMemory):
        # The rows of another data set have the same names. Copies of an image are numbered, because
        # they may have different labels, and so different scores.
        copies: Counter[str] = Counter()
        names = []
        for key in storage.keys:
            digest = key.tobytes().hex()
            names.append(f"{digest} {copies[digest]}" if copies[digest] else digest)
            copies[digest] += 1
        return encode_paths(names)
    root = str(config.data.get("root") or os.curdir)
    indices = range(len(split.dataset))
    return encode_paths([os.path.relpath(split.dataset.name(index), root) for index in indices])


def checksum(images: StoredImages, index: int) -> int:
    """Return the CRC-32 of the content of an image, or 0 if it cannot be read."""
    try:
        return zlib.crc32(images.storage.content(index))
    except DataError:
        return 0


def write(
    folder: Path,
    head: nn.Module,
    images: StoredImages,
    names: np.ndarray,
    logits: np.ndarray,
    fitted: np.ndarray,
) -> None:
    """Write leave-one-out logits [N, K], NaN for unreadable images, to the folder of a run.

    A hash of the head and checksums of a sample of the N images are stored to recognize both later.
    For `names` see `image_names`. `fitted` are indices of the images in the order of the fit.
    """
    arrays: dict[str, Any] = {"names": names, "logits": logits, "head": network_hash(head)}
    checked = np.unique(np.linspace(0, len(images) - 1, NUM_CHECKED).astype(np.int64))
    arrays["checked"] = checked
    arrays["checksums"] = [checksum(images, index) for index in checked.tolist()]
    # A head from a plugin, or a fit to many images, has none.
    if getattr(head, "examples", None) is not None:
        arrays |= {"fitted": fitted, "examples": head.examples, "coefficients": head.coefficients}
    with replacing(folder / LEFT_OUT, of_run=True) as file:
        np.savez(file, **arrays)


@dataclass(frozen=True, eq=False)
class TrainingImages:
    """The training images of a head that was fitted in closed form, see `read_training_images`."""

    names: Sequence[str]  # paths of N images relative to data.root
    examples: Tensor  # float16 [N, E], see `RidgeHead.contributions`
    coefficients: Tensor  # float32 [N, K]

    def speaking_for(
        self,
        head: Any,
        tokens: Tensor,
        classes: Sequence[int],
        *,
        count: int = 3,
        without: str | None = None,
    ) -> list[list[tuple[str, float]]]:
        """Return the training images that raise the logits of an image most.

        `tokens` [1, 1, D] are the output of the backbone for one image. Returns for each class at
        most `count` names and contributions to the logit, which are above 0, in descending order.
        The training image `without`, such as the image itself, is omitted.
        """
        coefficients = self.coefficients[:, list(classes)]
        [shares] = head.contributions(tokens, self.examples, coefficients).cpu()
        # Only images that resemble the image explain a prediction. A product of two negative
        # factors is an unlike image without the class.
        shares = torch.where(coefficients > 0, shares, 0)
        if without in self.names:
            shares[self.names.index(without)] = 0

        found = []
        for column in shares.T:
            highest = column.topk(min(count, len(column)))
            pairs = zip(highest.indices.tolist(), highest.values.tolist(), strict=True)
            found.append([(self.names[row], value) for row, value in pairs if value > 0])
        return found


@contextmanager
def _stored(loaded: Loaded) -> Iterator[Mapping[str, np.ndarray]]:
    """Open the file of the fit of a checkpoint; yield {} if there is none."""
    folder = folder_of_run(loaded.path)
    is_plain = loaded.model.is_fitted and loaded.model.views is None
    if folder is None or not is_plain or not (folder / LEFT_OUT).is_file():
        yield {}
        return
    path = folder / LEFT_OUT
    with naming_errors(path, remedy=RESTORE), np.load(path, allow_pickle=False) as stored:
        # The file may belong to an earlier run in this folder.
        is_same = str(stored["head"]) == network_hash(loaded.model.head)
        yield stored if is_same else {}


def read_training_images(loaded: Loaded) -> TrainingImages | None:
    """Return the training images of a checkpoint in the folder of its run.

    Returns None if the head was not fitted in closed form to at most 5,000 images, if the model has
    several views, or if the file in the folder is missing, older or of another fit.
    """
    with _stored(loaded) as stored:
        if "examples" not in stored:
            return None
        names = list(map(os.fsdecode, stored["names"][stored["fitted"]].tolist()))
        arrays = [torch.from_numpy(stored[name]) for name in ("examples", "coefficients")]
    return TrainingImages(names, *arrays)


def with_left_out(
    split: Split, config: Config, names: np.ndarray, logits: np.ndarray
) -> Split | None:
    """Return a split with leave-one-out logits, or None if they are missing for any of its images.

    The labels of the split are used, so that corrected labels are evaluated. For `names` and
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
    closed form, or if the input transform or the head differs from the fit. Images in another
    folder may have the names of the training images, so the content of a sample is compared, too.
    A warning is logged if only some of the images were training images.
    """
    dataset = data.val.dataset
    if not isinstance(dataset, StoredImages) or dataset.transform != loaded.transform:
        return None
    with _stored(loaded) as stored:
        if "checked" not in stored:
            return None
        row_of = {name: row for row, name in enumerate(image_names(data.val, config).tolist())}
        trained = row_of.keys() & set(stored["names"].tolist())
        if not trained:
            return None
        # A few images of the run may not include a checked one.
        checked_names = stored["names"][stored["checked"]].tolist()
        for name, expected in zip(checked_names, stored["checksums"].tolist(), strict=True):
            if name in row_of and checksum(dataset, row_of[name]) != expected:
                return None
        split = with_left_out(data.val, config, stored["names"], stored["logits"])
        if split is None:
            log.warning(
                f"{loaded.path}: {len(trained):,} of {len(row_of):,} images trained the head and "
                f"have in-sample scores, so the metrics are too high; train again with all images, "
                f"or evaluate the others alone"
            )
            return None
    path = Path(folder_of_run(loaded.path) or "", LEFT_OUT)
    log.info(f"{SOURCE} scores of {path} are used, because these images trained the head")
    return replace(data, load_val=lambda: split, loads_slowly=False)
