"""What a dataset gives to the rest: images, targets, class names, and the evaluator that is right for it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from mldec.data.names import names_fault
from mldec.data.transforms import EvalTransform
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
        """Return what finds the image again: its path, or a phrase. Used in messages only."""
        ...


@dataclass(frozen=True)
class Classes:
    """The classes of a dataset, in the order of the target columns.

    Raises:
        DataError: for names that a checkpoint could not hold, see `mldec.data.names.names_fault`.
    """

    names: tuple[str, ...]
    exclusive: bool = False  # one label an image: softmax and top-1; else sigmoid and mAP
    queries: Tensor | None = None  # [K, D] word vectors for zero-shot data; None for closed-set data

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
    evaluator: Callable[[], Evaluator]
    transform: EvalTransform  # how an image file becomes the model's input; travels in the checkpoint
    bad_images: str = "stop"  # at an image that cannot be read; or "skip": leave it out, name it and count it

    def __post_init__(self) -> None:
        if self.bad_images not in BAD_IMAGES:
            raise ConfigError(f"data.bad_images {self.bad_images!r} is not known: choose stop or skip")

    @cached_property
    def train(self) -> Split:
        """Return the training split."""
        return self.load_train()

    @cached_property
    def val(self) -> Split:
        """Return the validation split."""
        return self.load_val()
