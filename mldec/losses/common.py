"""What losses share: checks of their targets, and the counts of the training labels."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mldec.errors import ConfigError, DataError


def check_reduction(reduction: str) -> None:
    """Raise a `ConfigError` unless the reduction is one of a loss."""
    if reduction not in ("sum", "mean"):
        raise ConfigError(f"loss.reduction '{reduction}' is unknown: choose sum or mean")


def prepare(
    logits: Tensor, targets: Tensor, *, unknown: bool = False, soft: bool = False
) -> tuple[Tensor, Tensor]:
    """Return logits in float32 (float64 stays) and checked targets of the same type.

    Args:
        logits: [B, K], any floating type.
        targets: [B, K] of 1 and 0.
        unknown: -1 (not annotated) is allowed too.
        soft: every value from 0 to 1 is allowed (mixup, cutmix).

    Raises:
        DataError: if the shapes differ or a target has another value; the message names it. On a
            GPU such a value makes the loss NaN instead, see `require`.
    """
    if logits.shape != targets.shape:
        raise DataError(
            f"targets {tuple(targets.shape)} do not have "
            f"the shape of the logits {tuple(logits.shape)}"
        )

    # Half precision is too coarse for a loss.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)

    good = (targets >= 0) & (targets <= 1) if soft else (targets == 0) | (targets == 1)
    if unknown:
        good |= targets == -1

    def fault() -> str:
        allowed = ("0 to 1" if soft else "0 and 1") + (" and -1" if unknown else "")
        return f"target {targets[~good][0].item():g} is not allowed: this loss takes {allowed}"

    return require(good, logits, fault), targets


def require(good: Tensor, logits: Tensor, fault: Callable[[], str]) -> Tensor:
    """Return the logits of a batch whose targets are good.

    To look at the targets, a GPU would have to be waited for in each step. Instead the logits of
    targets that are not good become NaN there, and so does the loss: training leaves such a step
    out, and names its images.

    Args:
        good: whether each target, or those of each image, are good: bool, broadcast to the logits.
        logits: [B, K].
        fault: makes the message about targets that are not.

    Raises:
        DataError: with that message, on the CPU.
    """
    if logits.device.type != "cpu":
        return logits.masked_fill(~good, torch.nan)
    if not good.all():
        raise DataError(fault())
    return logits


# How often each class is positive in the training images


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
