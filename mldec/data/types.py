"""The types between a file and a batch: classes, images, splits and data modules."""

import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.images import FIX, load_image, read_image
from mldec.data.labels import Labels
from mldec.data.sampling import SHUFFLED, SampleRandom, Sampling, sample_seed
from mldec.data.table import Table
from mldec.data.transforms import EvalTransform, Transform
from mldec.errors import DataError
from mldec.evaluators import Evaluator
from mldec.files.text import read_bytes
from mldec.names import names_fault
from mldec.words.types import VectorOrigin


@dataclass(frozen=True)
class Classes:
    """The classes of a dataset, in the order of the target columns; see `names_fault`."""

    names: tuple[str, ...]

    exclusive: bool = False  # one label per image (softmax and top-1), or several (sigmoid and mAP)
    queries: Tensor | None = None  # word vectors [K, D] of zero-shot data
    origin: VectorOrigin | None = None  # how they were made, if it is known

    def __post_init__(self) -> None:
        if fault := names_fault(self.names):
            raise DataError(f"the names of the classes: {fault}; rename them in the data")

    def __len__(self) -> int:
        return len(self.names)


class ImageDataset(Protocol):
    """A finite collection of labelled images, addressed by index."""

    def __len__(self) -> int:
        """Return the number of images."""

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, H, W] and its target int8 [K]: 1, 0 or -1 (not annotated).

        All random choices come from `rng`, which the loader makes for every sample; see `seeded`
        for libraries that take no generator. A `DataError` says that the image cannot be read.
        """

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""


class Storage(Protocol):
    """How N images are stored: as files of a folder, in tar shards, or in arrays."""

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""

    @property
    def keys(self) -> np.ndarray:
        """What identifies each image, [N, ...], wherever the data set is stored."""

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file; raise a `DataError` if they cannot be read."""

    def select(self, images: np.ndarray) -> "Storage":
        """Return some of the images: bool [N], or their indices in the wanted order."""


@dataclass(frozen=True, eq=False)
class StoredImages:
    """N stored images with their labels of K classes; see `ImageDataset`."""

    storage: Storage
    labels: Labels
    classes: tuple[str, ...]

    # RGB image -> uint8 [3, S, S]; None until `assemble` knows what the images are for.
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K]; see `ImageDataset`."""
        assert self.transform is not None
        transform, decoder = partial(self.transform, rng=rng), self.transform.decoder
        content = self.storage.content(index)
        image = load_image(self.name(index), transform, content, decoder=decoder)
        return image, self.labels.row(index)

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        return self.storage.name(index)

    def select(self, images: np.ndarray) -> "StoredImages":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return replace(self, storage=self.storage.select(images), labels=self.labels.select(images))

    def select_classes(self, columns: Sequence[int]) -> "StoredImages":
        """Return the images with some of the classes: their indices in the wanted order."""
        names = tuple(self.classes[column] for column in columns)
        return replace(self, labels=self.labels.select_classes(columns), classes=names)


@dataclass(frozen=True)
class Split:
    """One part of a dataset."""

    dataset: ImageDataset
    classes: Classes

    def viewed(self, transform: EvalTransform) -> "Split":
        """Return the split with another transform; generated images have none and stay."""
        if not isinstance(self.dataset, StoredImages):
            return self
        return replace(self, dataset=replace(self.dataset, transform=transform))


def fixed_sample(dataset: ImageDataset, index: int) -> tuple[Tensor, Tensor]:
    """Return an image and its target with fixed random numbers, as for an evaluation."""
    return dataset.load(index, SampleRandom(sample_seed(0, 0, index)))


def picture(dataset: ImageDataset, index: int) -> Image.Image:
    """Return an image as it is stored, RGB; one without a file as the model sees it."""
    if isinstance(dataset, StoredImages):
        return read_image(dataset.name(index), dataset.storage.content(index))
    image, _ = fixed_sample(dataset, index)
    return Image.fromarray(image.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class DataModule:
    """A dataset ready for training and evaluation.

    A split is read when it is first used, so that an evaluation does not need the training files.
    """

    load_train: Callable[[], Split]
    load_val: Callable[[], Split]

    # Called with the validation classes; raises a `ConfigError` for settings that do not fit them.
    make_evaluator: Callable[[Classes], Evaluator]

    transform: EvalTransform  # how an image file becomes the model's input
    bad_images: Literal["stop", "skip"] = "stop"  # see `FileSettings`
    sampling: Sampling = SHUFFLED

    # Whether an image takes longer to load than to be handed over by a loader process.
    loads_slowly: bool = True

    @cached_property
    def train(self) -> Split:
        """Return the training split."""
        return self.load_train()

    @cached_property
    def val(self) -> Split:
        """Return the validation split."""
        return self.load_val()

    def evaluator(self) -> Evaluator:
        """Return a new evaluator for the classes of the validation split."""
        return self.make_evaluator(self.val.classes)


@dataclass(frozen=True, eq=False)
class ImageFiles(Storage):
    """Image files inside a folder, by their paths, bytes [N] as in `Table.files`; see `Storage`."""

    folder: Path
    files: np.ndarray
    see: str

    def name(self, index: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / os.fsdecode(self.files[index]))

    @property
    def keys(self) -> np.ndarray:
        """The paths inside the folder, bytes [N]."""
        return self.files

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file; raise a `DataError` if it cannot be read."""
        return read_bytes(Path(self.name(index)), FIX)

    def select(self, images: np.ndarray) -> "ImageFiles":
        """Return some of the files; see `Storage`."""
        return replace(self, files=self.files[images])

    def absent(self) -> np.ndarray:
        """Return which files do not exist, bool [N].

        Each folder is listed once, because a query per file would take minutes for millions.
        """
        listings: dict[str, set[str]] = {}
        absent = np.zeros(len(self.files), bool)
        for index, path in enumerate(map(os.fsdecode, self.files)):
            inner_folder, _, name = path.rpartition("/")
            if inner_folder not in listings:
                folder = self.folder / inner_folder
                # Of an absent folder, as of one of a Mac, all files are absent.
                is_listed = folder.exists() or not self.folder.exists()
                entries = list_folder(folder, self.see) if is_listed else ()
                listings[inner_folder] = {entry.name for entry in entries}
            absent[index] = name not in listings[inner_folder]
        return absent

    def renormalized(self, absent: np.ndarray) -> "ImageFiles":
        """Return the files with other Unicode forms of absent paths (bool [N]) that exist.

        Macs write an accent as a character of its own (NFD), and other systems do not (NFC).
        """
        files = self.files.tolist()
        for index in np.flatnonzero(absent):
            path = os.fsdecode(files[index])
            for form in ("NFC", "NFD"):
                other = unicodedata.normalize(form, path)
                if other != path and (self.folder / other).is_file():
                    files[index] = os.fsencode(other)
        return replace(self, files=np.array(files, np.bytes_))

    def find_inside(self, index: int) -> str | None:
        """Return the name of an inner folder in which the path of an image exists, or None."""
        path = os.fsdecode(self.files[index])
        for name in sorted(entry.name for entry in list_folder(self.folder, self.see)):
            if (self.folder / name / path).is_file():
                return name
        return None


def in_folder(table: Table, folder: Path, see: str) -> StoredImages:
    """Return the images of a table whose paths are relative to a folder."""
    return StoredImages(ImageFiles(folder, table.files, see), table.labels, table.classes)


def list_folder(folder: Path, see: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders in a folder, in any order."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}); {see}") from error


def check_folder(root: str, what: str, see: str) -> Path:
    """Return the absolute path of `data.root`, the folder of the data set `what`."""
    folder = Path(root).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; set data.root to the folder of {what} or {see}")

    # An empty folder is often a disk that is not mounted.
    if not any(list_folder(folder, see)):
        raise DataError(f"{folder} is empty; {see}")
    return folder
