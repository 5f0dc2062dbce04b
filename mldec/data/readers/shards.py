"""Images packed into tar shards."""

import hashlib
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mldec.data.cache import TableCache
from mldec.data.settings import Source
from mldec.data.table import Labels, names_fault
from mldec.data.tasks import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.data.types import StoredImages, check_folder
from mldec.errors import DataError
from mldec.files.text import open_binary, reading

log = logging.getLogger("mldec")

FORMAT = 1  # of the index; raise it when the meaning of an array changes
SHARD = re.compile(r"shard-\d{6}\.tar")  # an index may not name any other file
MEMBER = re.compile(r"\d{9}\.[a-z0-9]+")
_SEE = "see DATASETS.md, section Tar shards"


@dataclass(frozen=True)
class Index:
    """The location of N images in S shards and their labels: the arrays of index.npz."""

    # The shards.
    shards: np.ndarray  # [S] text: names of the files
    sha256: np.ndarray  # [S] text
    bytes: np.ndarray  # [S] int64: sizes of the files
    first: np.ndarray  # [S + 1] int64: index of the first image of each shard, and N

    # The images.
    offsets: np.ndarray  # [N] int64: of the first byte of an image in its shard
    sizes: np.ndarray  # [N] int64: bytes of an image

    # Their labels, see `Labels`.
    starts: np.ndarray
    label_classes: np.ndarray
    values: np.ndarray
    rest: np.ndarray  # []: the default of the labels

    # The classes, see `mldec.data.types.Classes`.
    classes: np.ndarray  # [K] text
    exclusive: np.ndarray  # [] bool
    queries: np.ndarray  # [K, D] float32; D is 0 for closed-set data

    # The value of `FORMAT` when the index was written.
    format: np.ndarray  # []


# numpy's kind (U text, i integer, f float, b bool) and the number of dimensions of each array.
FORMS = {
    **dict.fromkeys(("shards", "sha256", "classes"), ("U", 1)),
    **dict.fromkeys(
        ("bytes", "first", "offsets", "sizes", "starts", "label_classes", "values"), ("i", 1)
    ),
    **dict.fromkeys(("rest", "format"), ("i", 0)),
    "exclusive": ("b", 0),
    "queries": ("f", 2),
}


class TarShards:
    """The images of a packed split; see `mldec.data.types.Storage`.

    Args:
        folder: of the shards.
        index: the location of all N images.
        numbers: the images in use, int64 [n] indices into the index; None uses all N in their
            order.
    """

    def __init__(self, folder: Path, index: Index, numbers: np.ndarray | None = None) -> None:
        self.folder = folder
        self.index = index
        self.numbers = np.arange(len(index.offsets)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        """Describe the image in messages: its shard and its number in the index."""
        return f"{self._shard(index)}, image {self.numbers[index]:09}"

    @property
    def keys(self) -> np.ndarray:
        """The sizes of the image files in bytes, int64 [n]: the images have no names."""
        return self.index.sizes[self.numbers]

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            DataError: if the shard cannot be read or is truncated.
        """
        shard, number = self._shard(index), self.numbers[index]
        offset, size = int(self.index.offsets[number]), int(self.index.sizes[number])

        # A link or a named pipe in place of a shard is refused, rather than followed or waited for.
        with reading(shard, _SEE):
            descriptor = os.open(shard, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                content = os.pread(descriptor, size, offset)
            finally:
                os.close(descriptor)

        if len(content) != size:
            raise DataError(f"{shard} is cut short; pack it again, {_SEE}")
        return content

    def select(self, images: np.ndarray) -> "TarShards":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return TarShards(self.folder, self.index, self.numbers[images])

    def absent(self) -> np.ndarray:
        """Return that no image is absent, bool [n]: `load_shards` has checked the shards."""
        return np.zeros(len(self), bool)

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Compare the sha256 of all shards with the index; every member must be a plain file.

        Args:
            progress: wraps the indices of the shards, as a progress bar does.

        Raises:
            DataError: for the first shard whose content has changed.
        """
        for number in progress(range(len(self.index.shards))):
            shard = self.folder / str(self.index.shards[number])
            try:
                sha256 = sha256_of(shard)
                with tarfile.open(shard, "r:") as tar:
                    unexpected = _unexpected_member(tar)
            except (OSError, tarfile.TarError) as error:
                raise DataError(
                    f"{shard} cannot be read as a tar file ({error}); pack it again, {_SEE}"
                ) from error

            if unexpected is not None:
                raise DataError(
                    f"{shard} is refused: its member {unexpected!r} is no plain file of an image; "
                    f"{_SEE}"
                )
            if sha256 != self.index.sha256[number]:
                raise DataError(
                    f"{shard} is damaged: its sha256 is not that of the index; "
                    f"pack it again, {_SEE}"
                )

    def _shard(self, index: int) -> Path:
        """Return the path of the shard that holds an image."""
        number = int(np.searchsorted(self.index.first, self.numbers[index], "right")) - 1
        return self.folder / str(self.index.shards[number])


def _unexpected_member(tar: tarfile.TarFile) -> str | None:
    """Return the name of the first member that is not a plain file of an image, or None.

    All members are read, so that damage anywhere in the shard raises an error.
    """
    unexpected = None
    for member in tar:
        is_image = member.isreg() and MEMBER.fullmatch(member.name)
        if not is_image and unexpected is None:
            unexpected = member.name
    return unexpected


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal digits."""
    with open_binary(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_shards(folder: Path) -> StoredImages:
    """Read the index of a packed split and compare the sizes of the shards with it.

    Raises:
        DataError: if the index or a shard is absent, of another version or damaged, or the index
            names other files than shards.
    """
    path = folder / "index.npz"
    index = read_index(path)
    fault = index_fault(index)
    if fault:
        raise DataError(f"{path} is refused: {fault}; pack the split again, {_SEE}")

    # The sizes find most damage at no cost; `TarShards.verify` compares the content.
    for name, size in zip(index.shards.tolist(), index.bytes.tolist(), strict=True):
        shard = folder / name
        if shard.is_symlink():
            raise DataError(f"{shard} is a link; pack it again, {_SEE}")
        if not shard.is_file():
            raise DataError(f"{shard} is absent; pack it again, {_SEE}")

        actual_size = shard.stat().st_size
        if actual_size != size:
            raise DataError(
                f"{shard} has {actual_size:,} bytes instead of {size:,}; pack it again, {_SEE}"
            )

    classes = tuple(index.classes.tolist())
    log.info("shards %s: %s images, %d classes", folder, f"{len(index.offsets):,}", len(classes))
    return StoredImages(TarShards(folder, index), labels_of(index), classes)


def read_index(path: Path) -> Index:
    """Read index.npz without executing anything in it.

    Raises:
        DataError: if it is absent, damaged, or no index of this version.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays: dict[str, Any] = {name: stored[name] for name in Index.__dataclass_fields__}
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is absent: the split is not packed, or not to its end; {_SEE}"
        ) from error
    except KeyError as error:
        raise DataError(f"{path} is no index of shards: {error.args[0]}; {_SEE}") from error
    except Exception as error:
        raise DataError(f"{path} cannot be read ({error}); pack the split again, {_SEE}") from error

    # The format only after the types: it is compared as a number.
    for name, form in FORMS.items():
        if (arrays[name].dtype.kind, arrays[name].ndim) != form:
            raise DataError(f"{path} is no index of shards: its {name} are of another type; {_SEE}")
    if arrays["format"] != FORMAT:
        raise DataError(
            f"{path} is of format {arrays['format']}, not {FORMAT}; pack the split again, {_SEE}"
        )
    return Index(**arrays)


def index_fault(index: Index) -> str | None:
    """Return what is wrong with an index, or None, so that later code may trust its numbers."""
    for name in map(str, index.shards):
        if not SHARD.fullmatch(name):
            return f"{name!r} is not the name of a shard"

    num_images, num_shards = len(index.offsets), len(index.shards)
    shard_lengths = (len(index.sha256), len(index.bytes), len(index.first) - 1)
    image_lengths = (len(index.sizes), len(index.starts) - 1)
    if shard_lengths != (num_shards,) * 3 or image_lengths != (num_images,) * 2 or not num_images:
        return "its arrays do not fit each other"
    if index.first[0] != 0 or index.first[-1] != num_images or (np.diff(index.first) <= 0).any():
        return "its shards do not add up"

    # Subtracted rather than added: a huge offset plus a size would overflow and pass.
    shard_sizes = np.repeat(index.bytes, np.diff(index.first))
    if (index.offsets < 0).any() or (index.sizes < 0).any():
        return "an image lies outside its shard"
    if (index.offsets > shard_sizes - index.sizes).any():
        return "an image lies outside its shard"

    if fault := names_fault(index.classes.tolist()):
        return fault
    if index.queries.size and (
        len(index.queries) != len(index.classes) or not np.isfinite(index.queries).all()
    ):
        return "its word vectors are not one for each class"

    return None


def labels_of(index: Index) -> Labels:
    """Return the labels in an index."""
    return Labels(
        index.starts,
        index.label_classes,
        index.values,
        num_classes=len(index.classes),
        default=int(index.rest),
    )


def shards(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    threshold: float = 0.5,
    top_k: int | None = None,
) -> Source:
    """Return a data set that was packed into shards, with its original targets and classes.

    The labels of `val` decide the metric: top-1 if each image has exactly one label, `mAP_partial`
    if labels that are not listed are not annotated, else mAP.

    Args:
        root: folder with {split}/index.npz and {split}/shard-000000.tar, ...
        train: split to learn from.
        val: split to evaluate on.
        threshold: with several labels per image, the probability from which on a class counts as
            predicted.
        top_k: with one label per image, see `SingleLabelEvaluator`.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    several, one = MultiLabel(threshold), SingleLabel(top_k)
    folder = check_folder(root, "packed shards", _SEE)

    def load(split: str, cache: TableCache) -> StoredImages:
        return load_shards(folder / split)

    task = _packed_task(folder / val, several, one)
    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _packed_task(folder: Path, several: MultiLabel, one: SingleLabel) -> Task:
    """Return the task of a packed split, as its index states it."""
    index = read_index(folder / "index.npz")
    queries = torch.from_numpy(index.queries).float()
    vectors = (lambda names: (queries, None)) if index.queries.size else None

    # If labels that are not listed are -1, the data set is partially annotated.
    if index.exclusive:
        return replace(one, vectors=vectors)
    if index.rest == -1:
        return PartialLabels(threshold=several.threshold, vectors=vectors)
    return replace(several, vectors=vectors)
