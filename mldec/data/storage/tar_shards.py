"""Images packed into tar shards by scripts/pack_shards.py: a few large files instead of millions.

An image is read at its offset in a shard, which the index knows, so that order, resuming and the division over
processes are those of files: no image is lost or repeated. The shards are plain tar files in the layout of WebDataset;
nothing is ever extracted from them, and the labels come from the index.
"""

import hashlib
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.labels import Labels
from mldec.data.names import names_fault
from mldec.errors import DataError
from mldec.files.arrays import read_npz
from mldec.files.text import open_binary

log = logging.getLogger("mldec")

FORMAT = 1  # of the index; raise it when the meaning of an array changes
SHARD = re.compile(r"shard-\d{6}\.tar")  # the only names of shards, in any index
MEMBER = re.compile(r"\d{9}\.[a-z0-9]+")
_SEE = "see DATASETS.md, section Tar shards"


@dataclass(frozen=True)
class Index:
    """Where each of N images lies in S shards, and its labels; field by field what index.npz holds."""

    shards: np.ndarray  # [S] text: names of the files
    sha256: np.ndarray  # [S] text
    bytes: np.ndarray  # [S] int64: sizes of the files
    first: np.ndarray  # [S + 1] int64: the image that each shard starts with, and N
    offsets: np.ndarray  # [N] int64: of the first byte of an image in its shard
    sizes: np.ndarray  # [N] int64: bytes of an image
    starts: np.ndarray  # with the next three: see `Labels`
    label_classes: np.ndarray
    values: np.ndarray
    rest: np.ndarray  # []: the default of the labels
    classes: np.ndarray  # [K] text
    exclusive: np.ndarray  # [] bool
    queries: np.ndarray  # [K, D] float32; D is 0 for closed-set data
    format: np.ndarray  # []


# Kind of numbers (U text, i whole, f float, b truth) and dimensions of each array.
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
    """The images of a packed split; see `mldec.data.base.Storage`.

    Args:
        folder: of the shards.
        index: where the images lie.
        numbers: of the images in the index, int64 [n]; None takes all N in their order.
    """

    def __init__(self, folder: Path, index: Index, numbers: np.ndarray | None = None) -> None:
        self.folder = folder
        self.index = index
        self.numbers = np.arange(len(index.offsets)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        """Describe the image in messages: its shard and its number."""
        return f"{self._shard(index)}, image {self.numbers[index]:09}"

    @property
    def keys(self) -> np.ndarray:
        """The sizes of the image files in bytes, int64 [n]: the images have no names."""
        return self.index.sizes[self.numbers]

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            DataError: if the shard cannot be read or has become shorter.
        """
        shard, number = self._shard(index), self.numbers[index]
        offset, size = int(self.index.offsets[number]), int(self.index.sizes[number])
        try:
            descriptor = os.open(shard, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                content = os.pread(descriptor, size, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"{shard} cannot be read ({error.strerror}); {_SEE}") from error
        if len(content) != size:
            raise DataError(f"{shard} is cut short; pack it again, {_SEE}")
        return content

    def select(self, images: np.ndarray) -> "TarShards":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return TarShards(self.folder, self.index, self.numbers[images])

    def absent(self) -> np.ndarray:
        """Tell which images are not there: none, bool [N]; the shards were looked at when the index was read."""
        return np.zeros(len(self), bool)

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Read all shards and compare them with the sha256 of the index; every member must be a plain file.

        Args:
            progress: wraps the numbers of the shards, as a progress bar does.

        Raises:
            DataError: for the first shard that is not what was packed.
        """
        for number in progress(range(len(self.index.shards))):
            shard = self.folder / str(self.index.shards[number])
            try:
                sha256 = sha256_of(shard)
                with tarfile.open(shard, "r:") as tar:
                    strange = [
                        member.name
                        for member in tar
                        if not member.isreg() or not MEMBER.fullmatch(member.name)
                    ]
            except (OSError, tarfile.TarError) as error:
                raise DataError(
                    f"{shard} cannot be read as a tar file ({error}); pack it again, {_SEE}"
                ) from error
            if strange:
                raise DataError(
                    f"{shard} is refused: its member {strange[0]!r} is no plain file of an image; {_SEE}"
                )
            if sha256 != self.index.sha256[number]:
                raise DataError(
                    f"{shard} is damaged: its sha256 is not that of the index; pack it again, {_SEE}"
                )

    def _shard(self, index: int) -> Path:
        number = int(np.searchsorted(self.index.first, self.numbers[index], "right")) - 1
        return self.folder / str(self.index.shards[number])


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file."""
    with open_binary(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_shards(folder: Path) -> LabelledImages:
    """Read the index of a packed split and compare the sizes of the shards with it.

    Raises:
        DataError: if the index or a shard is absent, of another version, damaged, or names anything but shards.
    """
    path = folder / "index.npz"
    index = read_index(path)
    fault = index_fault(index)
    if fault:
        raise DataError(f"{path} is refused: {fault}; pack the split again, {_SEE}")

    for name, size in zip(index.shards.tolist(), index.bytes.tolist(), strict=True):
        shard = folder / name
        if shard.is_symlink() or not shard.is_file():
            raise DataError(
                f"{shard} is {'a link' if shard.is_symlink() else 'absent'}; pack it again, {_SEE}"
            )
        if shard.stat().st_size != size:
            raise DataError(
                f"{shard} has {shard.stat().st_size:,} bytes instead of {size:,}; pack it again, {_SEE}"
            )

    classes = tuple(index.classes.tolist())
    log.info("shards %s: %s images, %d classes", folder, f"{len(index.offsets):,}", len(classes))
    return LabelledImages(TarShards(folder, index), labels_of(index), classes)


def read_index(path: Path) -> Index:
    """Read index.npz; nothing in it is run.

    Raises:
        DataError: if it is absent, damaged, or no index of this version.
    """
    try:
        arrays: dict[str, Any] = read_npz(path, Index.__dataclass_fields__)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is absent: the split is not packed, or not to its end; {_SEE}"
        ) from error
    except KeyError as error:
        raise DataError(f"{path} is no index of shards: {error.args[0]}; {_SEE}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); pack the split again, {_SEE}") from error
    odd = [
        name for name, form in FORMS.items() if (arrays[name].dtype.kind, arrays[name].ndim) != form
    ]
    if odd:
        raise DataError(f"{path} is no index of shards: its {odd[0]} are of another type; {_SEE}")
    if arrays["format"] != FORMAT:
        raise DataError(
            f"{path} is of format {arrays['format']}, not {FORMAT}; pack the split again, {_SEE}"
        )
    return Index(**arrays)


def index_fault(index: Index) -> str | None:
    """Return what cannot be about an index, so that no number in it is trusted further on."""
    images, count = len(index.offsets), len(index.shards)
    odd = [name for name in map(str, index.shards) if not SHARD.fullmatch(name)]
    if odd:
        return f"{odd[0]!r} is not the name of a shard"
    lengths = (len(index.sha256), len(index.bytes), len(index.first) - 1)
    if (
        lengths != (count,) * 3
        or len(index.sizes) != images
        or len(index.starts) != images + 1
        or not images
    ):
        return "its arrays do not fit each other"
    if index.first[0] != 0 or index.first[-1] != images or (np.diff(index.first) <= 0).any():
        return "its shards do not add up"
    ends = np.repeat(index.bytes, np.diff(index.first))
    if (
        (index.offsets < 0).any()
        or (index.sizes < 0).any()
        or (index.offsets > ends - index.sizes).any()
    ):
        return "an image lies outside its shard"
    if fault := names_fault(index.classes.tolist()):
        return fault
    if index.queries.size and (
        len(index.queries) != len(index.classes) or not np.isfinite(index.queries).all()
    ):
        return "its word vectors are not one for each class"
    return labels_of(index).fault(range(-1, 2))


def labels_of(index: Index) -> Labels:
    """Return the labels in an index."""
    return Labels(
        index.starts, index.label_classes, index.values, len(index.classes), int(index.rest)
    )
