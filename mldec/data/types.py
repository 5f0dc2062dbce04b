"""Types of datasets: classes, stored images, splits and data modules."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.images import load_image, read_image
from mldec.data.labels import Labels
from mldec.data.photos import PhotoFinder, list_folder
from mldec.data.sampling import SHUFFLED, SampleRandom, Sampling, sample_seed
from mldec.data.table import Table
from mldec.data.transforms import EvalTransform, Transform
from mldec.errors import DataError
from mldec.evaluators import Evaluator
from mldec.files.text import expand_user, read_bytes
from mldec.names import names_fault
from mldec.runtime.console import progress_bar
from mldec.words.types import VectorOrigin


@dataclass(frozen=True)
class Classes:
    """The classes of a dataset, in the order of the target columns.

    Raises:
        DataError: If the names are not valid, see `names_fault`.
    """

    names: tuple[str, ...]

    # True: one label per image (softmax, top-1). False: several labels (sigmoid, mAP).
    exclusive: bool = False
    word_vectors: Tensor | None = None  # [K, D] word vectors of zero-shot data
    origin: VectorOrigin | None = None  # origin of the word vectors, if known

    def __post_init__(self) -> None:
        fault = names_fault(self.names)
        if fault is not None:
            raise DataError(f"the class names: {fault}; rename them in the data")

    def __len__(self) -> int:
        return len(self.names)


class ImageDataset(Protocol):
    """A map-style dataset of labeled images."""

    def __len__(self) -> int:
        """Return the number of images."""

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Load an image uint8 [3, H, W] and its target int8 [K]: 1, 0 or -1 (not annotated).

        `index` is from 0 to N - 1. `rng` is the source of all random numbers, seeded per sample by
        the loader; see `seeded` for libraries that do not accept a generator. Raises DataError if
        the image cannot be read.
        """

    def name(self, index: int) -> str:
        """Return the name of the image for messages: its path, if it has one."""


class Storage(Protocol):
    """Storage of N images: files in a folder, tar shards, or arrays."""

    def name(self, index: int) -> str:
        """Return the name of the image for messages: its path, if it has one."""

    @property
    def keys(self) -> np.ndarray:
        """Keys of the images, [N, ...], independent of the location of the dataset.

        They are unique, except in tar shards, whose images have no names.
        """

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file. Raises DataError if they cannot be read."""

    def select(self, images: np.ndarray) -> "Storage":
        """Return a subset of the images, given as a bool mask [N] or ordered indices."""


@dataclass(frozen=True, eq=False)
class StoredImages:
    """N stored images with their labels of K classes; see `ImageDataset`."""

    storage: Storage
    labels: Labels
    classes: tuple[str, ...]

    # Maps an RGB image to uint8 [3, S, S]. It is None until `assemble` sets it for a split.
    transform: Transform | None = None

    groups: np.ndarray | None = None  # see `Table`
    is_divided: bool = False  # whether `HoldOut` divided the images into splits

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K]; see `ImageDataset`."""
        assert self.transform is not None
        image = load_image(
            self.name(index),
            partial(self.transform, rng=rng),
            self.storage.content(index),
            draft=self.transform.min_side,
            decoder=self.transform.decoder,
        )
        return image, self.labels.row(index)

    def name(self, index: int) -> str:
        """Return the name of the image for messages: its path, if it has one."""
        return self.storage.name(index)

    def select(self, images: np.ndarray) -> "StoredImages":
        """Return a subset of the images, given as a bool mask [N] or ordered indices."""
        storage = self.storage.select(images)
        groups = None if self.groups is None else self.groups[images]
        return replace(self, storage=storage, labels=self.labels.select(images), groups=groups)

    def select_classes(self, columns: Sequence[int]) -> "StoredImages":
        """Return the images with a subset of the classes, given as ordered indices."""
        names = tuple(self.classes[column] for column in columns)
        return replace(self, labels=self.labels.select_classes(columns), classes=names)


@dataclass(frozen=True)
class Split:
    """One part of a dataset."""

    dataset: ImageDataset
    classes: Classes
    # Group of each image, [N], such as a series of photos. Heads that are fitted in closed form
    # leave out a group at once. None: unknown.
    groups: np.ndarray | None = None

    def viewed(self, transform: EvalTransform) -> "Split":
        """Return the split with another transform. Generated images have no transform."""
        if not isinstance(self.dataset, StoredImages):
            return self
        return replace(self, dataset=replace(self.dataset, transform=transform))


def fixed_sample(dataset: ImageDataset, index: int) -> tuple[Tensor, Tensor]:
    """Return an image and its target, with the same random numbers as an evaluation."""
    return dataset.load(index, SampleRandom(sample_seed(0, 0, index)))


def same_images(first: Split, second: Split) -> bool:
    """Return True if two splits have the same stored images in the same order."""
    images = [split.dataset for split in (first, second)]
    if not all(isinstance(each, StoredImages) for each in images):
        return False
    # Images of two folders may have the same keys.
    if any(len(each) == 0 for each in images) or first.dataset.name(0) != second.dataset.name(0):
        return False
    return np.array_equal(*[each.storage.keys for each in images])  # type: ignore[attr-defined]


def picture(dataset: ImageDataset, index: int, draft: int | None = None) -> Image.Image:
    """Return the stored image in RGB, or the model input if the image is generated.

    For `draft` see `read_image`.
    """
    if isinstance(dataset, StoredImages):
        return read_image(dataset.name(index), dataset.storage.content(index), draft=draft)
    image, _ = fixed_sample(dataset, index)
    return Image.fromarray(image.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class DataModule:
    """A dataset ready for training and evaluation.

    A split is read on first use, so an evaluation does not need the training files.
    """

    load_train: Callable[[], Split]
    load_val: Callable[[], Split]

    # Maps the validation classes to an evaluator. Raises ConfigError if settings do not fit them.
    make_evaluator: Callable[[Classes], Evaluator]

    transform: EvalTransform  # maps an image file to the model input
    bad_images: Literal["stop", "skip"] = "stop"  # see `FileSettings`
    sampling: Sampling = SHUFFLED

    # Whether loading an image takes longer than the transfer from a worker process.
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
    """Image files in a folder. `files` are their paths, bytes [N], see `Table.files`."""

    folder: Path
    files: np.ndarray

    def name(self, index: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / os.fsdecode(self.files[index]))

    @property
    def keys(self) -> np.ndarray:
        """The paths inside the folder, bytes [N]."""
        return self.files

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file. Raises DataError if it cannot be read."""
        return read_bytes(Path(self.name(index)))

    def select(self, images: np.ndarray) -> "ImageFiles":
        """Return a subset of the files; see `Storage`."""
        return replace(self, files=self.files[images])

    def absent(self) -> np.ndarray:
        """Return a mask of the files that do not exist, bool [N].

        Each folder is listed once. One query per file takes minutes for millions of files.
        """
        listings: dict[str, set[str]] = {}
        absent = np.zeros(len(self.files), bool)
        for index, path in enumerate(map(os.fsdecode, self.files)):
            parent, _, name = path.rpartition("/")
            if parent not in listings:
                folder = self.folder / parent
                # All files of a missing folder are absent.
                entries = list_folder(folder) if folder.exists() else ()
                listings[parent] = {entry.name for entry in entries}
            absent[index] = name not in listings[parent]
        return absent

    def located(self, absent: np.ndarray) -> "ImageFiles":
        """Replace absent paths (bool [N]) by the file that `PhotoFinder` finds, if any.

        Raises DataError if several files may be meant, or if two paths are the same file.
        """
        finder = PhotoFinder(self.folder)
        files = self.files.tolist()
        present = set(self.files[~absent].tolist())
        for index in np.flatnonzero(absent):
            path = os.fsdecode(files[index])
            found = finder.find(path, self.folder)
            if found is not None:
                files[index] = os.fsencode(found)
                if files[index] in present:
                    fault = f"{path!r} and another listed path are the photo {found}"
                    raise DataError(f"{self.folder}: {fault}; remove one")
                present.add(files[index])
        return replace(self, files=np.array(files, np.bytes_))


@dataclass(frozen=True, eq=False)
class ImagesInMemory(Storage):
    """A subset of n images of a data set in memory. They are identified by their content."""

    contents: Any  # maps 0 to N - 1 to the bytes of an image file, or raises DataError
    names: np.ndarray  # names of all images for messages, bytes [N]
    digests: np.ndarray  # sha256 of all images, uint8 [N, 32]; 0 until it is needed
    numbers: np.ndarray  # numbers of the images in the subset, int64 [n]

    def name(self, index: int) -> str:
        """Return the split and the row of the image, such as train[12]."""
        return os.fsdecode(self.names[self.numbers[index]])

    @property
    def keys(self) -> np.ndarray:
        """The sha256 of the images, uint8 [n, 32]. They are computed once for all subsets."""
        absent = np.flatnonzero(~self.digests[self.numbers].any(axis=1))
        for index in progress_bar(absent.tolist(), desc="hash images"):
            try:
                content = self.content(index)
            except DataError as error:
                # The loader gets the same error, and stops or skips the image.
                content = str(error).encode(errors="surrogateescape")
            self.digests[self.numbers[index]] = np.frombuffer(sha256(content).digest(), np.uint8)
        return self.digests[self.numbers]

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file. Raises DataError if they cannot be read."""
        return self.contents[int(self.numbers[index])]

    def select(self, images: np.ndarray) -> "ImagesInMemory":
        """Return a subset of the images; see `Storage`."""
        return replace(self, numbers=self.numbers[images])


def in_folder(table: Table, folder: Path) -> StoredImages:
    """Return the images of a table with paths relative to a folder."""
    files = ImageFiles(folder, table.files)
    return StoredImages(files, table.labels, table.classes, groups=table.groups)


@dataclass(frozen=True)
class Annotations:
    """The images of all used splits in a parsed table."""

    table: Table
    splits: np.ndarray  # name of the split of each image in lower case, or ""
    folder: Path  # folder of the images
    by_column: bool  # whether the table has a column per class
    storage: Storage | None = None  # of images that are not files in the folder
    others: Mapping[str, int] = field(default_factory=dict)  # images of the unused splits

    def images(self, rows: np.ndarray) -> StoredImages:
        """Return the images of some rows of the table, given as ordered indices."""
        images = in_folder(self.table.select(rows), self.folder)
        if self.storage is None:
            return images
        return replace(images, storage=self.storage.select(rows))


def check_folder(root: str, what: str) -> Path:
    """Return the absolute path of `data.root`, the folder of the dataset `what`.

    Raises DataError if it is not a folder, is empty or cannot be listed.
    """
    folder = expand_user(root).absolute()
    # An empty folder often means that a disk is not mounted.
    if not folder.is_dir() or not any(list_folder(folder)):
        fault = "is empty" if folder.is_dir() else "is not a folder"
        raise DataError(f"data.root: {folder} {fault}; set it to the folder of {what}")
    return folder
