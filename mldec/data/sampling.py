"""Random numbers of samples, and the images of an epoch."""

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mldec.data.labels import Labels
from mldec.data.splits import parse_fold


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which training images an epoch has: settings of a `data` node, the same for every reader."""

    # "repeat_factor": images of rare classes appear more than once per epoch.
    sampler: Literal["shuffle", "repeat_factor"] = "shuffle"

    # Its threshold, see `repeat_factors`, in (0, 1]; None is that of LVIS, 0.001.
    repeat_threshold: float | None = None

    # "i/N": fold i of N, from 1, of the training images is the validation split of the run, and the
    # others are trained on; the validation split of the data set is not read.
    fold: str | None = None

    def __post_init__(self) -> None:
        if self.fold is not None:
            parse_fold(self.fold)
        if self.repeat_threshold is not None and not 0 < self.repeat_threshold <= 1:
            raise ValueError(f"repeat_threshold is {self.repeat_threshold}: it must be in (0, 1]")

    def factors(self, labels: Callable[[], Labels]) -> np.ndarray | None:
        """Return how often each training image appears per epoch on average, float64 [N].

        None if each appears once. The labels of the training images are asked for only if needed.
        """
        if self.sampler == "shuffle":
            return None
        return repeat_factors(labels(), self.repeat_threshold or 0.001)


SHUFFLED = Sampling()  # each image once per epoch


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


def draw(factors: np.ndarray, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the images of an epoch by factors float64 [N] of 1 or more.

    Each image appears as often as its factor says, rounded down or up at random ("systematic
    sampling"): the factors are laid end to end in a random order, and marks at distance 1, the
    first at a random point, count for the images that they fall on. Their number L is fixed: the
    sum of the factors, rounded up.

    Returns the index of each drawn image, and the number of its appearances before, int64 [L] each.
    """
    length = math.ceil(factors.sum())
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


# One thread at a time may use the global generators.
_GLOBAL_GENERATORS = threading.RLock()


class SampleRandom(random.Random):
    """The random numbers of one sample: those of Python's generator with this seed.

    Libraries that only know the global generators are seeded with `initial_seed`, see `seeded`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.initial_seed = seed


def sample_seed(*numbers: int) -> int:
    """Hash numbers such as seed, epoch and index to a 63-bit seed; trailing zeros do not count."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, random and numpy, and restore their states afterwards.

    For libraries whose functions take no generator. Other threads that want the same wait.
    """
    with _GLOBAL_GENERATORS:
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()

        # `torch.manual_seed` would seed the GPU too.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])
