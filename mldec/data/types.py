"""The types between a file and a batch: classes, images, splits and data modules."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.data.images import load_image, read_content, read_image
from mldec.data.randomness import SampleRandom, sample_seed
from mldec.data.table import Labels, Table, fold_numbers, names_fault, parse_fold
from mldec.data.text_encoder import PREFIX, templates_fault
from mldec.data.transforms import EvalTransform, Transform
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator

_HASH = re.compile("[0-9a-f]{64}")
MAX_SOURCE = 4_096  # characters; a path has no more


@dataclass(frozen=True)
class VectorOrigin:
    """The source of word vectors.

    Attributes:
        source: a text encoder, such as "clip:ViT-B-32:openai", with absolute paths; or the name of
            a file of vectors, without its folder.
        sha256: of the encoder's weights, or of the file.
        templates: sentences with {} for the name, whose vectors were averaged; none for a file.
    """

    source: str
    sha256: str
    templates: tuple[str, ...] = ()

    @property
    def is_encoder(self) -> bool:
        """Whether a text encoder made the vectors, so that it can make others."""
        return self.source.startswith(PREFIX)

    def described(self) -> str:
        """Name the source and its hash, for messages."""
        return f"{self.source} (sha256 {self.sha256[:12]})"

    def fault(self) -> str | None:
        """Return what is wrong with these values, which may be from a stranger's file, or None."""
        if not isinstance(self.source, str) or not 0 < len(self.source) <= MAX_SOURCE:
            return "its source is no text"
        if not isinstance(self.sha256, str) or _HASH.fullmatch(self.sha256) is None:
            return "its sha256 is none"
        if not isinstance(self.templates, tuple) or self.is_encoder is not bool(self.templates):
            return "it has templates without a text encoder, or an encoder without templates"
        return templates_fault(self.templates)


@dataclass(frozen=True)
class Classes:
    """The classes of a dataset, in the order of the target columns; see `names_fault`."""

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


class ImageDataset(Protocol):
    """A finite collection of labelled images, addressed by index."""

    def __len__(self) -> int:
        """Return the number of images."""

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, H, W] and its target int8 [K]: 1, 0 or -1 (not annotated).

        All random choices come from `rng`, which the loader makes for every sample. What takes no
        generator can be called in `seeded(rng.initial_seed)`, see `mldec.data.randomness`. A
        `DataError` that names the file says that the image cannot be read.
        """

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""


class Storage(Protocol):
    """How N images are stored: as files of a folder, in tar shards, or in arrays."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Describe the image in messages: its path, if it has one."""

    @property
    def keys(self) -> np.ndarray:
        """What identifies each image, [N, ...], wherever the data set is stored."""

    def content(self, index: int) -> bytes:
        """Return the bytes of an image file; raise a `DataError` if they cannot be read."""

    def select(self, images: np.ndarray) -> "Storage":
        """Return some of the images: bool [N], or their indices in the wanted order."""

    def absent(self) -> np.ndarray:
        """Return which images do not exist, bool [N], without reading them: by default none."""
        return np.zeros(len(self), bool)

    def verify(self, progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> None:
        """Compare all files with their checksums, if there are any.

        `progress` wraps their indices, as a progress bar does. A `DataError` names the first file
        whose content has changed.
        """
        return


@dataclass(frozen=True, eq=False)
class StoredImages:
    """N stored images with their labels of K classes; see `ImageDataset`.

    The transform, RGB image -> uint8 [3, S, S], is None until `mldec.data.settings.assemble` knows
    what the images are for.
    """

    storage: Storage
    labels: Labels
    classes: tuple[str, ...]
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.storage)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K]; see `ImageDataset`."""
        # The labels first: they refuse an index that is out of range, a storage may not.
        target = self.labels.row(index)

        assert self.transform is not None
        transform, decoder = partial(self.transform, rng=rng), self.transform.decoder
        content = self.storage.content(index)
        return load_image(self.name(index), transform, content, decoder=decoder), target

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


# The threshold of LVIS.
THRESHOLD = 0.001


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which training images an epoch has: settings of a `data` node, the same for every reader.

    Attributes:
        sampler: "shuffle": each image appears once per epoch; "repeat_factor": images of rare
            classes appear more often, see `repeat_factors`.
        repeat_threshold: "repeat_factor": classes that a smaller fraction of the training images
            shows are repeated, in (0, 1]; None is 0.001.
        fold: "i/N": the training images are divided into N folds, of which fold i, from 1 to N, is
            the validation split of the run, and the others are trained on. The validation split of
            the data set is not read. None uses both splits as they are.

    Raises:
        ValueError: for a value out of its range, or one without effect.
    """

    sampler: Literal["shuffle", "repeat_factor"] = "shuffle"
    repeat_threshold: float | None = None
    fold: str | None = None

    def __post_init__(self) -> None:
        if self.fold is not None:
            parse_fold(self.fold)
        if self.repeat_threshold is None:
            return

        if not 0 < self.repeat_threshold <= 1:
            raise ValueError(f"repeat_threshold is {self.repeat_threshold}: it must be in (0, 1]")
        if self.sampler != "repeat_factor":
            raise ValueError(
                f"repeat_threshold has no effect with data.sampler={self.sampler}: "
                f"leave it out, or pass data.sampler=repeat_factor"
            )

    def factors(self, labels: Callable[[], Labels]) -> np.ndarray | None:
        """Return how often each training image appears per epoch on average, float64 [N].

        None if each appears once. The labels of the training images are asked for only if needed.
        """
        if self.sampler == "shuffle":
            return None
        threshold = THRESHOLD if self.repeat_threshold is None else self.repeat_threshold
        return repeat_factors(labels(), threshold)

    def held_out(self, keys: np.ndarray) -> np.ndarray:
        """Return which training images the fold holds out, bool [M]; see `Storage.keys`."""
        assert self.fold is not None
        number, count = parse_fold(self.fold)
        return fold_numbers(keys, count) == number


# Each image once per epoch.
SHUFFLED = Sampling()


def repeat_factors(labels: Labels, threshold: float) -> np.ndarray:
    """Return the repeat factor of each image, float64 [N].

    A class that a fraction f of the images shows has the factor max(1, sqrt(threshold / f)), and an
    image has the largest factor of its positives, or 1 without any.

    Source: Gupta et al., LVIS (arXiv 1908.03195), repeat factor sampling.
    """
    # A class without a positive repeats no image.
    fractions = labels.counts().clip(min=1) / len(labels)
    per_class = np.sqrt(threshold / fractions).clip(min=1)

    positive = labels.values == 1
    factors = np.ones(len(labels))
    np.maximum.at(factors, labels.images()[positive], per_class[labels.classes[positive]])
    return factors


def epoch_length(factors: np.ndarray) -> int:
    """Return the number of images per epoch, which is fixed: the sum of the factors, rounded up."""
    return math.ceil(factors.sum())


def draw(factors: np.ndarray, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the images of an epoch by factors float64 [N] of 1 or more.

    Each image appears as often as its factor says, rounded down or up at random, and in the mean of
    many epochs exactly so, but for the rounding of the epoch's length. The factors are laid end to
    end in a random order, and marks at distance 1, which start at a random point below 1, count for
    the images that they fall on ("systematic sampling"), so that their number is fixed.

    Returns the index of each drawn image, and the number of its appearances before: int64 [L], in
    the same random order.
    """
    length = epoch_length(factors)
    images = torch.randperm(len(factors), generator=generator)
    offset = torch.rand((), generator=generator, dtype=torch.float64)

    ends = torch.from_numpy(factors)[images].cumsum(0)
    marks = (ends * (length / ends[-1]) + offset).floor().long()
    marks[-1] = length
    counts = marks.diff(prepend=marks.new_zeros(1))

    starts = torch.repeat_interleave(marks - counts, counts)
    appearances = torch.arange(length) - starts
    order = torch.randperm(length, generator=generator)
    return torch.repeat_interleave(images, counts)[order], appearances[order]


@dataclass(frozen=True)
class DataModule:
    """A dataset ready for training and evaluation.

    A split is read when it is first used, so that an evaluation does not need the training files.
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
        if self.bad_images not in ("stop", "skip"):
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

        Raises a `ConfigError` if a setting does not fit these classes, such as top-5 of three.
        """
        return self.make_evaluator(self.val.classes)


@dataclass(frozen=True, eq=False)
class ImageFiles(Storage):
    """Image files inside a folder, by their paths, bytes [N] as in `Table.files`; see `Storage`."""

    folder: Path
    files: np.ndarray
    see: str

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / os.fsdecode(self.files[index]))

    @property
    def keys(self) -> np.ndarray:
        """The paths inside the folder, bytes [N]."""
        return self.files

    def content(self, index: int) -> bytes:
        """Return the bytes of the image file; raise a `DataError` if it cannot be read."""
        return read_content(self.name(index))

    def select(self, images: np.ndarray) -> "ImageFiles":
        """Return some of the images: bool [N], or their indices in the wanted order."""
        return replace(self, files=self.files[images])

    def absent(self) -> np.ndarray:
        """Return which files do not exist, bool [N].

        Each folder is listed once, because a query per file would take minutes for millions.
        """
        listings: dict[str, set[str]] = {}
        absent = np.zeros(len(self.files), bool)

        # In chunks: millions of names, decoded at once, would be gigabytes of strings.
        for start in range(0, len(self.files), 65536):
            paths = map(os.fsdecode, self.files[start : start + 65536].tolist())
            for index, path in enumerate(paths, start):
                inner_folder, _, name = path.rpartition("/")
                if inner_folder not in listings:
                    entries = list_folder(self.folder / inner_folder, self.see)
                    listings[inner_folder] = {entry.name for entry in entries}

                absent[index] = name not in listings[inner_folder]
        return absent

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
