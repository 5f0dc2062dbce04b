"""Datasets packed into tar shards."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mldec.data.labels import Labels
from mldec.data.source import Source
from mldec.data.tasks import multi_label, partial_labels, single_label
from mldec.data.types import Storage, StoredImages, check_folder
from mldec.errors import DataError, log, naming_errors
from mldec.files.text import open_binary, reading
from mldec.files.torch_files import sha256_of

FORMAT = 1  # version of the index; increase it if the meaning of an array changes


def shards(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    threshold: float = 0.5,
    skip_empty: bool = False,
    top_k: int | None = None,
) -> Source:
    """Return a packed dataset with its original targets and classes.

    `root` has {split}/index.npz and {split}/shard-000000.tar, ... The labels of `val` determine the
    metric: top-1 for single-label data, `mAP_partial` if unlisted labels are not annotated,
    otherwise mAP.
    """
    evaluator = multi_label(threshold, top_k=top_k, skip_empty=skip_empty)
    folder = check_folder(root, "packed shards")
    # The metric depends on the labels, so the index of the validation split is read at once.
    index = read_index(folder / val / "index.npz")
    word_vectors = torch.from_numpy(index.queries).float()
    vectors = (lambda names: (word_vectors, None)) if index.queries.size else None

    # The labels are partial if unlisted labels are -1.
    if index.exclusive:
        evaluator = single_label(top_k)
    elif index.rest == -1:
        evaluator = partial_labels(threshold, top_k=top_k)

    def load(split: str, _: str | None) -> StoredImages:
        return load_shards(folder / split)

    source = Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)
    return replace(source, exclusive=bool(index.exclusive), vectors=vectors)


@dataclass(frozen=True)
class Index:
    """The arrays of index.npz: locations of N images in S shards, and their labels."""

    shards: np.ndarray  # [S] text: file names
    sha256: np.ndarray  # [S] text
    bytes: np.ndarray  # [S] int64: sizes of the files
    first: np.ndarray  # [S + 1] int64: first image of each shard, and N
    offsets: np.ndarray  # [N] int64: offset of each image in its shard, in bytes
    sizes: np.ndarray  # [N] int64: size of each image in bytes

    # Labels and classes, see `Labels` and `mldec.data.types.Classes`.
    starts: np.ndarray
    label_classes: np.ndarray
    values: np.ndarray
    rest: np.ndarray  # []: default value of the labels
    classes: np.ndarray  # [K] text
    exclusive: np.ndarray  # [] bool
    queries: np.ndarray  # [K, D] float32; D is 0 for closed-set data
    format: np.ndarray  # []: `FORMAT` of the index


def read_index(path: Path) -> Index:
    """Read index.npz without executing code of the file."""
    with (
        naming_errors(path, DataError, remedy="pack the split again"),
        np.load(path, allow_pickle=False) as stored,
    ):
        arrays: dict[str, Any] = {name: stored[name] for name in Index.__dataclass_fields__}
        if arrays["format"] != FORMAT:
            raise ValueError(f"it is of format {arrays['format']}, not {FORMAT}")
        return Index(**arrays)


@dataclass(frozen=True, eq=False)
class TarShards(Storage):
    """A subset of n images of a packed split. `numbers` are their indices, int64 [n]."""

    folder: Path
    index: Index
    numbers: np.ndarray

    def name(self, index: int) -> str:
        """Return the name of the image for messages: its shard and its number in the index."""
        return f"{self._shard(index)}, image {self.numbers[index]:09}"

    @property
    def keys(self) -> np.ndarray:
        """Sizes of the image files in bytes, int64 [n], because the images have no names."""
        return self.index.sizes[self.numbers]

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        shard = self._shard(index)
        number = self.numbers[index]
        size = int(self.index.sizes[number])
        with reading(shard), open_binary(shard) as file:
            file.seek(int(self.index.offsets[number]))
            return file.read(size)

    def select(self, images: np.ndarray) -> "TarShards":
        """Return a subset of the images, given as a bool mask [n] or ordered indices."""
        return replace(self, numbers=self.numbers[images])

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Compare the sha256 of all shards with the index. `progress` wraps the iteration."""
        for number in progress(range(len(self.index.shards))):
            shard = self.folder / str(self.index.shards[number])
            with reading(shard):
                sha256 = sha256_of(shard)
            if sha256 != self.index.sha256[number]:
                raise DataError(f"{shard}: the sha256 differs from the index; pack it again")

    def _shard(self, index: int) -> Path:
        number = int(np.searchsorted(self.index.first, self.numbers[index], "right")) - 1
        return self.folder / str(self.index.shards[number])


def load_shards(folder: Path) -> StoredImages:
    """Read the index of a packed split and check the sizes of its shards."""
    index = read_index(folder / "index.npz")

    # Comparing sizes is fast and detects most damage. `verify` compares the content.
    for name, size in zip(index.shards.tolist(), index.bytes.tolist(), strict=True):
        with reading(folder / name):
            actual_size = (folder / name).stat().st_size
        if actual_size != size:
            fault = f"{actual_size:,} bytes instead of {size:,}"
            raise DataError(f"{folder / name}: {fault}; pack it again")

    classes = tuple(index.classes.tolist())
    rest = int(index.rest)
    labels = Labels(index.starts, index.label_classes, index.values, len(classes), rest)
    log.info(f"shards {folder}: {len(index.offsets):,} images, {len(classes)} classes")
    storage = TarShards(folder, index, np.arange(len(index.offsets)))
    return StoredImages(storage, labels, classes)
