"""A dataset of files, packed into tar shards by scripts/pack_shards.py: a few large files instead of millions.

An image is read by its place in a shard, which the index knows, so that order, resuming and the division over processes
are those of files: no image is lost or repeated. The shards are plain tar files in the layout of WebDataset; nothing is
ever extracted from them, and the labels come from the index.
"""

import hashlib
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.data.arrays import read_npz
from mldec.data.base import Classes, DataModule, Split
from mldec.data.files import check_folder, check_same_classes
from mldec.data.labels import Labels
from mldec.data.names import names_fault
from mldec.data.transforms import EvalTransform, TrainTransform, load_image
from mldec.errors import DataError
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.inputs import open_binary

log = logging.getLogger("mldec")

FORMAT = 1  # of the index; raise it when the meaning of an array changes
SHARD = re.compile(r"shard-\d{6}\.tar")  # the only names of shards, in any index
MEMBER = re.compile(r"\d{9}\.[a-z0-9]+")
_SEE = "see DATASETS.md, section Tar shards"


def shards(
    *,
    root: str,
    image_size: int = 448,
    train: str = "train",
    val: str = "val",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    interpolation: str = "bilinear",
    erase: float = 0.0,
    test_crop: float | None = None,
    threshold: float = 0.5,
    top_k: int | None = None,
    bad_images: str = "stop",
) -> DataModule:
    """Return a dataset that was packed into shards, with the images, targets and classes of the files it is made of.

    The labels of `val` decide how it is evaluated: top-1 where each image has one label, `mAP_partial` where what is
    not said of an image is not annotated, else mAP.

    Args:
        root: folder with {split}/index.npz and {split}/shard-000000.tar, ...
        image_size: side of the square input in pixels.
        train: split to learn from.
        val: split to evaluate on.
        augment: this and the next five are described at `mldec.data.transforms.TrainTransform`.
        cutout: see there.
        flip: see there.
        crop: see there.
        interpolation: see there; "random" evaluates with bicubic.
        erase: see there.
        test_crop: side of the evaluated centre as a fraction of the shorter side; None squashes the whole image.
        threshold: of several labels: probability from which on a class counts as predicted.
        top_k: of one label: see `SingleLabelEvaluator`.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(
        image_size=image_size,
        augment=augment,
        cutout=cutout,
        flip=flip,
        crop=crop,
        interpolation=interpolation,
        erase=erase,
    )
    test_interpolation = interpolation.replace("random", "bicubic")
    check = EvalTransform(image_size=image_size, crop=test_crop, interpolation=test_interpolation)
    several, one = partial(MultiLabelEvaluator, threshold=threshold), partial(SingleLabelEvaluator, top_k=top_k)
    several(), one()  # refuse a wrong value now, not after the first epoch
    folder = check_folder(root, "packed shards", _SEE)

    def load_train() -> Split:
        split = read_split(folder / train, learn)
        check_same_classes(split.classes.names, data.val.classes.names, folder, _SEE)
        return split

    def evaluator() -> Evaluator:
        if data.val.classes.exclusive:
            return one()
        unannotated = data.val.dataset.labels.rest == -1  # type: ignore[attr-defined]
        return PartialLabelEvaluator() if unannotated else several()

    data = DataModule(load_train, lambda: read_split(folder / val, check), evaluator, check, bad_images)
    return data


@dataclass(frozen=True)
class Index:
    """Where each of N images lies in S shards, and what is said of it; field by field what index.npz holds."""

    shards: np.ndarray  # [S] text: names of the files
    sha256: np.ndarray  # [S] text
    bytes: np.ndarray  # [S] int64: sizes of the files
    first: np.ndarray  # [S + 1] int64: the image that each shard starts with, and N
    offsets: np.ndarray  # [N] int64: of the first byte of an image in its shard
    sizes: np.ndarray  # [N] int64: bytes of an image
    starts: np.ndarray  # with the next three: see `Labels`
    label_classes: np.ndarray
    values: np.ndarray
    rest: np.ndarray  # []
    classes: np.ndarray  # [K] text
    exclusive: np.ndarray  # [] bool
    queries: np.ndarray  # [K, D] float32; D is 0 for closed-set data
    format: np.ndarray  # []


# Kind of numbers (U text, i whole, f float, b truth) and dimensions of each array.
FORMS = {
    **dict.fromkeys(("shards", "sha256", "classes"), ("U", 1)),
    **dict.fromkeys(("bytes", "first", "offsets", "sizes", "starts", "label_classes", "values"), ("i", 1)),
    **dict.fromkeys(("rest", "format"), ("i", 0)),
    "exclusive": ("b", 0),
    "queries": ("f", 2),
}


class ShardImages:
    """The images of a packed split; see `mldec.data.base.ImageDataset`."""

    def __init__(self, folder: Path, index: Index, transform: Callable[[Image.Image], Tensor]) -> None:
        self.folder, self.index, self.transform = folder, index, transform
        self.image_keys = index.sizes  # see `mldec.data.fingerprint.Identified`: the images have no names
        self.labels = labels_of(index)

    def __len__(self) -> int:
        return len(self.index.offsets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K]."""
        target = self.labels.row(index)
        return load_image(self.name(index), self.transform, self.content(index)), target

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            DataError: if the shard cannot be read or has become shorter.
        """
        shard, size = self._shard(index), int(self.index.sizes[index])
        try:
            descriptor = os.open(shard, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                content = os.pread(descriptor, size, int(self.index.offsets[index]))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"{shard} cannot be read ({error.strerror}); {_SEE}") from error
        if len(content) != size:
            raise DataError(f"{shard} is cut short; pack it again, {_SEE}")
        return content

    def name(self, index: int) -> str:
        """Return the shard and the image's number."""
        return f"{self._shard(index)}, image {index:09}"

    def verify(self, progress: Callable[[list[int]], Iterable[int]] = iter) -> None:
        """Read all shards and hold them to the sha256 of the index; every member must be a plain file.

        Args:
            progress: wraps the numbers of the shards, as a progress bar does.

        Raises:
            DataError: for the first shard that is not what was packed.
        """
        for number in progress(list(range(len(self.index.shards)))):
            shard = self.folder / str(self.index.shards[number])
            try:
                found = sha256_of(shard)
                with tarfile.open(shard, "r:") as tar:
                    strange = [member.name for member in tar if not member.isreg() or not MEMBER.fullmatch(member.name)]
            except (OSError, tarfile.TarError) as error:
                raise DataError(f"{shard} cannot be read as a tar file ({error}); pack it again, {_SEE}") from error
            if strange:
                raise DataError(f"{shard} is refused: its member {strange[0]!r} is no plain file of an image; {_SEE}")
            if found != self.index.sha256[number]:
                raise DataError(f"{shard} is damaged: its sha256 is not that of the index; pack it again, {_SEE}")

    def _shard(self, index: int) -> Path:
        number = int(np.searchsorted(self.index.first, index, "right")) - 1
        return self.folder / str(self.index.shards[number])


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file."""
    with open_binary(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_split(folder: Path, transform: Callable[[Image.Image], Tensor]) -> Split:
    """Read the index of a packed split and hold the shards' sizes to it.

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
            raise DataError(f"{shard} is {'a link' if shard.is_symlink() else 'absent'}; pack it again, {_SEE}")
        if shard.stat().st_size != size:
            raise DataError(f"{shard} has {shard.stat().st_size:,} bytes instead of {size:,}; pack it again, {_SEE}")
    names = tuple(index.classes.tolist())
    log.info("shards %s: %s images, %d classes", folder, f"{len(index.offsets):,}", len(names))
    queries = torch.from_numpy(index.queries).float() if index.queries.size else None
    return Split(ShardImages(folder, index, transform), Classes(names, bool(index.exclusive), queries))


def read_index(path: Path) -> Index:
    """Read index.npz; nothing in it is run.

    Raises:
        DataError: if it is absent, damaged, or no index of this version.
    """
    try:
        arrays: dict[str, Any] = read_npz(path, Index.__dataclass_fields__)
    except FileNotFoundError as error:
        raise DataError(f"{path} is absent: the split is not packed, or not to its end; {_SEE}") from error
    except KeyError as error:
        raise DataError(f"{path} is no index of shards: {error.args[0]}; {_SEE}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); pack the split again, {_SEE}") from error
    odd = [name for name, form in FORMS.items() if (arrays[name].dtype.kind, arrays[name].ndim) != form]
    if odd:
        raise DataError(f"{path} is no index of shards: its {odd[0]} are of another type; {_SEE}")
    if arrays["format"] != FORMAT:
        raise DataError(f"{path} is of format {arrays['format']}, not {FORMAT}; pack the split again, {_SEE}")
    return Index(**arrays)


def index_fault(index: Index) -> str | None:
    """Return what cannot be about an index, so that no number in it is trusted further on."""
    images, count = len(index.offsets), len(index.shards)
    odd = [name for name in map(str, index.shards) if not SHARD.fullmatch(name)]
    if odd:
        return f"{odd[0]!r} is not the name of a shard"
    lengths = (len(index.sha256), len(index.bytes), len(index.first) - 1)
    if lengths != (count,) * 3 or len(index.sizes) != images or len(index.starts) != images + 1 or not images:
        return "its arrays do not fit each other"
    if index.first[0] != 0 or index.first[-1] != images or (np.diff(index.first) <= 0).any():
        return "its shards do not add up"
    ends = np.repeat(index.bytes, np.diff(index.first))
    if (index.offsets < 0).any() or (index.sizes < 0).any() or (index.offsets > ends - index.sizes).any():
        return "an image lies outside its shard"
    if fault := names_fault(index.classes.tolist()):
        return fault
    if index.queries.size and (len(index.queries) != len(index.classes) or not np.isfinite(index.queries).all()):
        return "its word vectors are not one for each class"
    return labels_of(index).fault(range(-1, 2))


def labels_of(index: Index) -> Labels:
    """Return the labels in an index."""
    return Labels(index.starts, index.label_classes, index.values, len(index.classes), int(index.rest))
