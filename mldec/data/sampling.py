"""Seeding of samples and sampling of the images of an epoch."""

import math
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mldec.data.labels import Labels
from mldec.errors import DataError


def parse_fold(fold: str) -> tuple[int, int]:
    """Return i and N of "i/N". Raises ValueError unless 1 <= i <= N and N >= 2."""
    # `int` would also accept other digits, spaces and underscores.
    form = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", fold)
    if form and int(form[1]) <= int(form[2]) and int(form[2]) >= 2:
        return int(form[1]), int(form[2])
    raise ValueError(f"fold is {fold!r}; pass i/N with i from 1 to N and N >= 2, such as 1/5")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of a `data` node, shared by all readers."""

    # "repeat_factor": images of rare classes are repeated within an epoch. "class_aware": each
    # class is drawn equally often, see `class_aware_factors`.
    sampler: Literal["shuffle", "repeat_factor", "class_aware"] = "shuffle"

    # Threshold of `repeat_factors`, in (0, 1]. None means 0.001, as in LVIS.
    repeat_threshold: float | None = None

    # Text file with one image id per line. Only these images of the training split are used. An id
    # is a file name without folder, extension and leading zeros.
    train_list: str | None = None

    # "i/N": fold i of N (1-based) of the training images is the validation split, and the other
    # folds are the training split. The validation split of the dataset is not read.
    fold: str | None = None

    def __post_init__(self) -> None:
        if self.fold is not None:
            parse_fold(self.fold)
        if self.repeat_threshold is not None and not 0 < self.repeat_threshold <= 1:
            raise ValueError(f"repeat_threshold is {self.repeat_threshold}; it must be in (0, 1]")

    def factors(self, labels: Callable[[], Labels]) -> np.ndarray | None:
        """Return the mean number of appearances of each training image per epoch, float64 [N].

        Returns None if each image appears once. `labels` is called only if necessary.
        """
        if self.sampler == "shuffle":
            return None
        if self.sampler == "class_aware":
            return class_aware_factors(labels())
        return repeat_factors(labels(), self.repeat_threshold or 0.001)


SHUFFLED = Sampling()  # each image once per epoch


def repeat_factors(labels: Labels, threshold: float) -> np.ndarray:
    """Return the repeat factor of each image, float64 [N].

    The factor of a class with frequency f is max(1, sqrt(threshold / f)). The factor of an image is
    the maximum over its positives, or 1 without positives.

    Source: Gupta et al., LVIS (arXiv 1908.03195), repeat factor sampling.
    """
    # Avoid a division by zero. A class without positives repeats no image.
    fractions = labels.counts().clip(min=1) / len(labels)
    per_class = np.sqrt(threshold / fractions).clip(min=1)

    positive = labels.values == 1
    factors = np.ones(len(labels))
    np.maximum.at(factors, labels.images()[positive], per_class[labels.classes[positive]])
    return factors


def class_aware_factors(labels: Labels) -> np.ndarray:
    """Return the mean number of appearances of each image with class-aware sampling, float64 [N].

    It draws a class N times per epoch, and each time one of the n_k images with this class. An
    image appears N / K times the sum of 1 / n_k over its classes on average, where K is the number
    of classes with positives. Images without positives never appear.

    Source: ClassAwareSampler of wutong16/DistributionBalancedLoss (arXiv 2007.09654). Its epoch
    has K / 4 times the largest n_k draws, ours has N.
    """
    positive = labels.values == 1
    counts = labels.counts()
    if not counts.any():
        raise DataError("data.sampler=class_aware: no training image has a positive; omit it")
    shares = 1 / counts[labels.classes[positive]]
    sums = np.bincount(labels.images()[positive], weights=shares, minlength=len(labels))

    # The sum of the factors is N, but rounding may exceed it.
    return sums * (len(labels) / np.count_nonzero(counts)) * (1 - 1e-12)


def draw_images(factors: np.ndarray, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the images of an epoch by systematic sampling.

    The number of appearances of an image is its factor, at least 0, rounded down or up at random.
    The factors are shuffled, summed cumulatively and shifted by a random offset. An image appears
    once per integer in its interval. The number L of draws is the sum of the factors, rounded up.

    Returns:
        The index of each drawn image, and the number of its previous appearances, int64 [L] each.
    """
    length = math.ceil(factors.sum())
    images = torch.randperm(len(factors), generator=generator)
    offset = torch.rand((), generator=generator, dtype=torch.float64)

    # Number of draws up to and including each image. The last one is exact despite rounding.
    ends = torch.from_numpy(factors)[images].cumsum(0)
    totals = (ends * (length / ends[-1]) + offset).floor().long()
    totals[-1] = length
    counts = totals.diff(prepend=totals.new_zeros(1))

    starts = torch.repeat_interleave(totals - counts, counts)
    appearances = torch.arange(length) - starts
    order = torch.randperm(length, generator=generator)
    return torch.repeat_interleave(images, counts)[order], appearances[order]


# Only one thread at a time may use the global generators.
_GLOBAL_GENERATORS = threading.RLock()


class SampleRandom(random.Random):
    """Random generator of one sample, which stores its seed.

    `initial_seed` seeds libraries that only use the global generators, see `seeded`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.initial_seed = seed


def sample_seed(*numbers: int) -> int:
    """Hash numbers such as seed, epoch and index to a 63-bit seed. Trailing zeros are ignored."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, random and numpy, and restore their states afterwards.

    Use it for libraries that do not accept a generator. Concurrent threads wait for each other.
    """
    with _GLOBAL_GENERATORS:
        torch_state = torch.get_rng_state()
        python_state = random.getstate()
        numpy_state = np.random.get_state()

        # `torch.manual_seed` would also seed the GPU.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

        try:
            yield
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
