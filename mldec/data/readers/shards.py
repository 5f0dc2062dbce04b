"""Images packed into tar shards."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mldec.data.labels import Labels
from mldec.data.settings import Source
from mldec.data.tasks import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.data.types import Storage, StoredImages, check_folder
from mldec.errors import DataError, refusing
from mldec.files.text import open_binary, reading
from mldec.files.torch_files import sha256_of

log = logging.getLogger("mldec")

FORMAT = 1  # of the index; raise it when the meaning of an array changes
_SEE = "see DATASETS.md, section Tar shards"


def shards(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    threshold: float = 0.5,
    skip_empty: bool = False,
    top_k: int | None = None,
) -> Source:
    """Return a data set that was packed into shards, with its original targets and classes.

    `root` has {split}/index.npz and {split}/shard-000000.tar, ... The labels of `val` decide the
    metric: top-1 if each image has exactly one label, `mAP_partial` if labels that are not listed
    are not annotated, else mAP.
    """
    several, one = MultiLabel(threshold, skip_empty), SingleLabel(top_k)
    folder = check_folder(root, "packed shards", _SEE)
    index = read_index(folder / val / "index.npz")
    queries = torch.from_numpy(index.queries).float()
    vectors = (lambda names: (queries, None)) if index.queries.size else None

    # If labels that are not listed are -1, the data set is partially annotated.
    task: Task = replace(several, vectors=vectors)
    if index.exclusive:
        task = replace(one, vectors=vectors)
    elif index.rest == -1:
        task = PartialLabels(threshold, vectors=vectors)

    def load(split: str, _: str | None) -> StoredImages:
        return load_shards(folder / split)

    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


@dataclass(frozen=True)
class Index:
    """The location of N images in S shards and their labels: the arrays of index.npz."""

    shards: np.ndarray  # [S] text: names of the files
    sha256: np.ndarray  # [S] text
    bytes: np.ndarray  # [S] int64: sizes of the files
    first: np.ndarray  # [S + 1] int64: index of the first image of each shard, and N
    offsets: np.ndarray  # [N] int64: of the first byte of an image in its shard
    sizes: np.ndarray  # [N] int64: bytes of an image

    # Labels and classes, see `Labels` and `mldec.data.types.Classes`.
    starts: np.ndarray
    label_classes: np.ndarray
    values: np.ndarray
    rest: np.ndarray  # []: the default of the labels
    classes: np.ndarray  # [K] text
    exclusive: np.ndarray  # [] bool
    queries: np.ndarray  # [K, D] float32; D is 0 for closed-set data
    format: np.ndarray  # []: `FORMAT` when the index was written


def read_index(path: Path) -> Index:
    """Read index.npz without executing anything in it."""
    remedy = f"pack the split again, {_SEE}"
    with refusing(path, DataError, remedy=remedy), np.load(path, allow_pickle=False) as stored:
        arrays: dict[str, Any] = {name: stored[name] for name in Index.__dataclass_fields__}
        if arrays["format"] != FORMAT:
            raise ValueError(f"it is of format {arrays['format']}, not {FORMAT}")
        return Index(**arrays)


@dataclass(frozen=True, eq=False)
class TarShards(Storage):
    """The n images in use of a packed split, by their numbers in the index, int64 [n]."""

    folder: Path
    index: Index
    numbers: np.ndarray

    def name(self, index: int) -> str:
        """Describe the image in messages: its shard and its number in the index."""
        return f"{self._shard(index)}, image {self.numbers[index]:09}"

    @property
    def keys(self) -> np.ndarray:
        """The sizes of the image files in bytes, int64 [n]: the images have no names."""
        return self.index.sizes[self.numbers]

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        shard, number = self._shard(index), self.numbers[index]
        size = int(self.index.sizes[number])
        with reading(shard, _SEE), open_binary(shard) as file:
            file.seek(int(self.index.offsets[number]))
            return file.read(size)

    def select(self, images: np.ndarray) -> "TarShards":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return replace(self, numbers=self.numbers[images])

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Compare the sha256 of all shards with the index; `progress` wraps their indices."""
        for number in progress(range(len(self.index.shards))):
            shard = self.folder / str(self.index.shards[number])
            with reading(shard, _SEE):
                sha256 = sha256_of(shard)
            if sha256 != self.index.sha256[number]:
                fault = "is damaged: its sha256 is not that of the index"
                raise DataError(f"{shard} {fault}; pack it again, {_SEE}")

    def _shard(self, index: int) -> Path:
        """Return the path of the shard that holds an image."""
        number = int(np.searchsorted(self.index.first, self.numbers[index], "right")) - 1
        return self.folder / str(self.index.shards[number])


def load_shards(folder: Path) -> StoredImages:
    """Read the index of a packed split and compare the sizes of the shards with it."""
    index = read_index(folder / "index.npz")

    # The sizes find most damage at no cost; `verify` compares the content.
    for name, size in zip(index.shards.tolist(), index.bytes.tolist(), strict=True):
        with reading(folder / name, _SEE):
            actual_size = (folder / name).stat().st_size
        if actual_size != size:
            fault = f"has {actual_size:,} bytes instead of {size:,}"
            raise DataError(f"{folder / name} {fault}; pack it again, {_SEE}")

    classes = tuple(index.classes.tolist())
    columns = (index.starts, index.label_classes, index.values)
    labels = Labels(*columns, len(classes), int(index.rest))
    log.info("shards %s: %s images, %d classes", folder, f"{len(index.offsets):,}", len(classes))
    storage = TarShards(folder, index, np.arange(len(index.offsets)))
    return StoredImages(storage, labels, classes)
