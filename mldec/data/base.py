"""What a dataset gives to the rest: images, targets, class names, and the evaluator that is right for it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.labels import Labels
from mldec.data.names import names_fault
from mldec.data.transforms import EvalTransform, load_image
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator

BAD_IMAGES = ("stop", "skip")


class ImageDataset(Protocol):
    """A finite collection of labelled images, addressed by index."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, H, W] and its target int8 [K]: 1, 0 or -1 (not annotated).

        Random choices come from the global generators of torch, numpy or random: the loader seeds them for every
        sample. Raises `DataError` naming the file if the image cannot be read.
        """
        ...

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        ...


class Storage(Protocol):
    """Where N images lie: files of a folder, tar shards, or arrays."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        ...

    @property
    def keys(self) -> np.ndarray:
        """What tells each image from another, [N, ...]; it does not depend on where the data set lies."""
        ...

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file. Raises `DataError` if they cannot be read."""
        ...

    def select(self, images: np.ndarray) -> "Storage":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        ...

    def absent(self) -> np.ndarray:
        """Tell which images are not there, bool [N], without reading them."""
        ...

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Compare all bytes with their checksums, where there are such; `progress` wraps the numbers of the files.

        Raises `DataError` for the first file that is not what was stored.
        """
        ...


@dataclass(frozen=True)
class LabelledImages:
    """N stored images and their labels of K classes."""

    storage: Storage
    labels: Labels
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.storage)

    def select(self, images: np.ndarray) -> "LabelledImages":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return LabelledImages(self.storage.select(images), self.labels.select(images), self.classes)

    def select_classes(self, columns: Sequence[int]) -> "LabelledImages":
        """Return some of the classes: their indices in the wanted order."""
        names = tuple(self.classes[column] for column in columns)
        return LabelledImages(self.storage, self.labels.select_classes(columns), names)


class StoredImages:
    """The images of a split that is stored as files, and their targets; see `ImageDataset`.

    Args:
        images: N images with labels of K classes.
        transform: RGB image -> uint8 [3, S, S].
    """

    def __init__(self, images: LabelledImages, transform: Callable[[Image.Image], Tensor]) -> None:
        self.storage = images.storage
        self.labels = images.labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.storage)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K].

        Raises:
            IndexError: for an index that is not from 0 to N - 1.
            DataError: if the image cannot be read.
        """
        target = self.labels.row(index)
        return load_image(
            self.storage.name(index), self.transform, self.storage.content(index)
        ), target

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        return self.storage.name(index)


@dataclass(frozen=True)
class Classes:
    """The classes of a dataset, in the order of the target columns.

    Raises:
        DataError: for names that a checkpoint could not hold, see `mldec.data.names.names_fault`.
    """

    names: tuple[str, ...]
    exclusive: bool = False  # one label per image: softmax and top-1; else sigmoid and mAP
    queries: Tensor | None = (
        None  # [K, D] word vectors for zero-shot data; None for closed-set data
    )

    def __post_init__(self) -> None:
        if fault := names_fault(self.names):
            raise DataError(f"the names of the classes: {fault}; rename them in the data")

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Split:
    """One part of a dataset."""

    dataset: ImageDataset
    classes: Classes


@dataclass(frozen=True)
class DataModule:
    """A dataset ready for training and evaluation.

    A split is read when it is first used, so that an evaluation does not need the training files.
    """

    load_train: Callable[[], Split]
    load_val: Callable[[], Split]
    make_evaluator: Callable[
        [Classes], Evaluator
    ]  # for the classes of validation; refuses settings that do not fit
    transform: (
        EvalTransform  # how an image file becomes the model's input; travels in the checkpoint
    )
    bad_images: str = (
        "stop"  # at an image that cannot be read; or "skip": leave it out, name it and count it
    )

    def __post_init__(self) -> None:
        if self.bad_images not in BAD_IMAGES:
            raise ConfigError(
                f"data.bad_images {self.bad_images!r} is not known: choose stop or skip"
            )

    @cached_property
    def train(self) -> Split:
        """Return the training split."""
        return self.load_train()

    @cached_property
    def val(self) -> Split:
        """Return the validation split."""
        return self.load_val()

    def evaluator(self) -> Evaluator:
        """Return a new evaluator for the classes of the validation split.

        Raises:
            ConfigError: if a setting does not fit these classes, such as top-5 of three.
        """
        return self.make_evaluator(self.val.classes)
