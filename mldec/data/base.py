"""The interface of a dataset: its images, targets and classes, and the evaluator that fits them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.images import load_image, read_image
from mldec.data.labels import Labels
from mldec.data.names import names_fault
from mldec.data.randomness import SampleRandom, sample_seed
from mldec.data.sampling import SHUFFLED, Sampling
from mldec.data.transforms import EvalTransform, Transform
from mldec.data.vector_origin import VectorOrigin
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator

BAD_IMAGES = ("stop", "skip")


class ImageDataset(Protocol):
    """A finite collection of labelled images, addressed by index."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, H, W] and its target int8 [K]: 1, 0 or -1 (not annotated).

        Args:
            index: from 0 to the number of images - 1.
            rng: source of all random choices; the loader makes one for every sample. What takes no
                generator can be called in `seeded(rng.initial_seed)`, see `mldec.data.randomness`.

        Raises:
            DataError: if the image cannot be read; the message names the file.
        """
        ...

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        ...


class Storage(Protocol):
    """How N images are stored: as files of a folder, in tar shards, or in arrays."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        ...

    @property
    def keys(self) -> np.ndarray:
        """What identifies each image, [N, ...], wherever the data set is stored."""
        ...

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            DataError: if they cannot be read.
        """
        ...

    def select(self, images: np.ndarray) -> "Storage":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        ...

    def absent(self) -> np.ndarray:
        """Return which images do not exist, bool [N], without reading them."""
        ...

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Compare all bytes with their checksums, if there are any.

        Args:
            progress: wraps the indices of the files, as a progress bar does.

        Raises:
            DataError: for the first file whose content has changed.
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

    def __init__(self, images: LabelledImages, transform: Transform) -> None:
        self.storage = images.storage
        self.labels = images.labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.storage)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K].

        Args:
            index: of the image.
            rng: source of the random choices of the transform.

        Raises:
            IndexError: for an index that is not from 0 to N - 1.
            DataError: if the image cannot be read.
        """
        # The labels first: they refuse an index that is out of range, a storage may not.
        target = self.labels.row(index)

        content = self.storage.content(index)
        transform = partial(self.transform, rng=rng)
        name, decoder = self.storage.name(index), self.transform.decoder
        image = load_image(name, transform, content, decoder=decoder)
        return image, target

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""
        return self.storage.name(index)


@dataclass(frozen=True)
class Classes:
    """The classes of a dataset, in the order of the target columns.

    Raises:
        DataError: for names that a checkpoint cannot hold, see `mldec.data.names.names_fault`.
    """

    names: tuple[str, ...]

    # One label per image (softmax and top-1) or several (sigmoid and mAP).
    exclusive: bool = False

    # Word vectors [K, D] of zero-shot data; None for closed-set data.
    queries: Tensor | None = None

    # How they were made; None if there are none, or it is not known.
    origin: VectorOrigin | None = None

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

    def viewed(self, transform: EvalTransform) -> "Split":
        """Return the split with another transform; generated images have none and stay."""
        dataset = self.dataset
        if not isinstance(dataset, StoredImages):
            return self

        images = LabelledImages(dataset.storage, dataset.labels, self.classes.names)
        return Split(StoredImages(images, transform), self.classes)


def fixed_sample(dataset: ImageDataset, index: int) -> tuple[Tensor, Tensor]:
    """Return an image and its target with random numbers that never change, as for an evaluation.

    Raises:
        DataError: if the image cannot be read.
    """
    return dataset.load(index, SampleRandom(sample_seed(0, 0, index)))


def picture(dataset: ImageDataset, index: int) -> Image.Image:
    """Return an image as it is stored, RGB; one without a file as the model sees it.

    Raises:
        DataError: if it cannot be read.
    """
    if isinstance(dataset, StoredImages):
        return read_image(dataset.name(index), dataset.storage.content(index))
    image, _ = fixed_sample(dataset, index)
    return Image.fromarray(image.permute(1, 2, 0).numpy())


@dataclass(frozen=True)
class DataModule:
    """A dataset ready for training and evaluation.

    A split is read when it is first used, so that an evaluation does not need the training files.

    Raises:
        ConfigError: for an unknown `bad_images`.
    """

    load_train: Callable[[], Split]
    load_val: Callable[[], Split]

    # Called with the validation classes; raises a `ConfigError` for settings that do not fit them.
    make_evaluator: Callable[[Classes], Evaluator]

    # How an image file becomes the model's input; part of the checkpoint.
    transform: EvalTransform

    # What to do with an image that cannot be read: "stop", or "skip": leave it out, name it and
    # count it.
    bad_images: str = "stop"

    # How often each training image appears per epoch.
    sampling: Sampling = SHUFFLED

    # Whether an image takes longer to load than to be handed over by a loader process.
    loads_slowly: bool = True

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
