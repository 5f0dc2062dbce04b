"""How often each training image appears per epoch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mldec.data.labels import Labels

# The threshold of LVIS.
THRESHOLD = 0.001


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling settings of a `data` node, which are the same for every reader of image files.

    Attributes:
        sampler: "shuffle": each image appears once per epoch; "repeat_factor": images of rare
            classes appear more often, see `repeat_factors`.
        repeat_threshold: "repeat_factor": classes that a smaller fraction of the training images
            shows are repeated, in (0, 1]; None is 0.001.

    Raises:
        ValueError: for a value out of its range, or one without effect.
    """

    sampler: Literal["shuffle", "repeat_factor"] = "shuffle"
    repeat_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.sampler not in ("shuffle", "repeat_factor"):
            raise ValueError(
                f"sampler {self.sampler!r} is not known: choose shuffle or repeat_factor"
            )
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

        Args:
            labels: returns those of the training images; called only if they are needed.

        Returns:
            Factors of 1 or more, or None if each image appears once.
        """
        if self.sampler == "shuffle":
            return None
        threshold = THRESHOLD if self.repeat_threshold is None else self.repeat_threshold
        return repeat_factors(labels(), threshold)


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
    """Return the number of images per epoch: the sum of the factors, rounded up.

    It is the same in every epoch, because the schedule and a resumed run need a fixed number of
    steps.
    """
    return math.ceil(factors.sum())


def draw(factors: np.ndarray, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the images of an epoch.

    Each image appears as often as its factor says, rounded down or up at random, and in the mean of
    many epochs exactly so, but for the rounding of the epoch's length. detectron2 rounds each
    factor by itself, so that its epochs differ in length. Here the factors are laid end to end in a
    random order, and marks at distance 1, which start at a random point below 1, count for the
    images that they fall on ("systematic sampling"): their number is fixed.

    Args:
        factors: of N images, float64 [N], each 1 or more.
        generator: of the epoch.

    Returns:
        The index of each drawn image, and the number of its appearances before: int64 [L], in the
        same random order.
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
