"""How often each class is positive in the training images: what losses make of it."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mldec.errors import ConfigError


class LabelCounts(NamedTuple):
    """The annotated labels of the training images per class.

    Attributes:
        positives: images that show the class, [K].
        negatives: images that do not; unannotated ones are neither, [K].
    """

    positives: Tensor
    negatives: Tensor

    def at_least_one(self) -> "LabelCounts":
        """Return the counts in float64, with 1 instead of 0, for ratios and logarithms."""
        return LabelCounts(*(count.double().clamp(min=1) for count in self))


# Counts the labels when it is called: a loss that does not need them costs nothing.
CountLabels = Callable[[], LabelCounts]


def counted(label_counts: CountLabels | None, argument: str) -> LabelCounts:
    """Count the labels.

    Args:
        label_counts: as the constructor of a loss takes it.
        argument: that needs the counts, with its value, for the message.

    Raises:
        ValueError: if nothing was given that counts.
    """
    if label_counts is None:
        raise ValueError(
            f"{argument} needs the counts of the training labels: pass label_counts=..."
        )
    return label_counts()


def positive_weight(
    pos_weight: float | Literal["auto"] | None, cap: float, label_counts: CountLabels | None
) -> Tensor | None:
    """Return the factor of the loss of positives: [], or [K] for one per class, or None for 1.

    Args:
        pos_weight: a number above 0, or "auto": negatives / positives of each class, at least one
            of each, so that both have the same total weight.
        cap: largest factor of "auto", above 0.
        label_counts: counts the training labels, for "auto".

    Raises:
        ValueError: for a value out of its range.
    """
    if cap <= 0:
        raise ValueError(f"pos_weight_cap is {cap}: it must be above 0")
    if pos_weight is None:
        return None

    if pos_weight != "auto":
        if pos_weight <= 0:
            raise ValueError(f"pos_weight is {pos_weight}: it must be above 0, or auto")
        return torch.tensor(float(pos_weight))

    counts = counted(label_counts, "pos_weight auto").at_least_one()
    return (counts.negatives / counts.positives).clamp(max=cap).float()


def check_class_count(name: str, values: Tensor | None, logits: Tensor) -> None:
    """Check that there is one value per class.

    Args:
        name: of the argument, for the message.
        values: [K], or [] or None, which fit any logits.
        logits: [B, K].

    Raises:
        ConfigError: if there are not K values.
    """
    if values is not None and values.ndim and len(values) != logits.shape[-1]:
        raise ConfigError(f"loss.{name} has {len(values)} values for {logits.shape[-1]} classes")
