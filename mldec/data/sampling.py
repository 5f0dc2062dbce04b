"""Seeding of samples and sampling of the images of an epoch."""

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mldec.data.labels import Labels
from mldec.data.splits import parse_fold


@dataclass(frozen=True)
class Draws:
    """Random draws of the training images of an epoch, instead of each image once."""

    length: int  # number of draws L per epoch

    # Returns the index of each drawn image, and the number of its previous appearances in the
    # epoch, int64 [L] each.
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of a `data` node, shared by all readers."""

    # "repeat_factor": images of rare classes are repeated within an epoch. "class_aware": each
    # class is drawn equally often, see `draw_by_class`.
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

    def draws(self, labels: Callable[[], Labels]) -> Draws | None:
        """Return the draws of the training images, or None if each image appears once per epoch.

        `labels` is called only if necessary.
        """
        if self.sampler == "shuffle":
            return None
        if self.sampler == "class_aware":
            return Draws(len(labels()), partial(draw_by_class, labels()))

        factors = repeat_factors(labels(), self.repeat_threshold or 0.001)
        return Draws(math.ceil(factors.sum()), partial(draw_images, factors))


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


def draw_images(factors: np.ndarray, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the images of an epoch by systematic sampling.

    The number of appearances of an image is its factor, at least 1, rounded down or up at random.
    It is the number of integers in the image's interval of the shuffled cumulative factors plus a
    random offset. The number L of draws is the sum of the factors, rounded up.

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


def draw_by_class(labels: Labels, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the images of an epoch by class: first a class, then an image with this class.

    The classes are drawn in turn, in random order, so their numbers of draws differ by at most 1.
    The images of a class are drawn in turn too. The number of draws is the number of images N.
    Classes without positives are skipped, and images without positives are never drawn.

    Source: Wu et al. (arXiv 2007.09654), whose code draws three images of a class in succession.

    Returns:
        The index of each drawn image, and the number of its previous appearances, int64 [N] each.
    """
    # Sort the positives by class.
    entries = np.flatnonzero(labels.values == 1)
    entries = entries[np.argsort(labels.classes[entries], kind="stable")]
    counts = labels.counts()
    images = torch.from_numpy(labels.images()[entries])
    images_of_class = images.split(counts[counts > 0].tolist())

    classes = _in_turn(len(images_of_class), len(labels), generator)
    draws_of_class = classes.bincount(minlength=len(images_of_class)).tolist()
    drawn = []
    for own_images, draws in zip(images_of_class, draws_of_class, strict=True):
        drawn.append(own_images[_in_turn(len(own_images), draws, generator)])

    # Replace the class of each draw by the next image of this class.
    order = torch.empty_like(classes)
    order[classes.argsort(stable=True)] = torch.cat(drawn)

    # The sorted draws of an image are consecutive.
    positions = order.argsort(stable=True)
    totals = order.bincount()
    starts = totals.cumsum(0) - totals
    appearances = torch.empty_like(order)
    appearances[positions] = torch.arange(len(order)) - starts[order[positions]]
    return order, appearances


def _in_turn(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Return the first `count` elements of successive permutations of 0 to `size` - 1, int64."""
    rounds = -(-count // size)
    keys = torch.rand(rounds, size, generator=generator)
    return keys.argsort(dim=1, stable=True).flatten()[:count]


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
