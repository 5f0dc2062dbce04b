"""What losses share: checks of settings and targets, and the counts of the training labels."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mldec.errors import ConfigError, DataError


def check_range(low: float, high: float = float("inf"), **settings: float) -> None:
    """Raise a `ValueError` for the first setting that is not from `low` to below `high`."""
    for name, value in settings.items():
        if not low <= value < high:
            bounds = f"be {low} or more" if high == float("inf") else f"lie in [{low}, {high})"
            raise ValueError(f"{name} is {value}: it must {bounds}")


def check_above_0(**settings: float) -> None:
    """Raise a `ValueError` for the first setting that is not above 0."""
    for name, value in settings.items():
        if not value > 0:  # NaN too
            raise ValueError(f"{name} is {value}: it must be above 0")


def prepare(
    logits: Tensor, targets: Tensor, *, unknown: bool = False, soft: bool = False
) -> tuple[Tensor, Tensor]:
    """Return logits [B, K] in float32 (float64 stays) and checked targets of the same type.

    Targets are 1 and 0; `unknown` allows -1 (not annotated) too, `soft` all values from 0 to 1
    (mixup, cutmix). Another one is a `DataError`, or on a GPU a loss of NaN, see `require`.
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

    Otherwise it is a `DataError` with the message of `fault`. A GPU would have to be waited for:
    there these logits become NaN, and so does the loss; training names the images of such a step.
    """
    if logits.device.type != "cpu":
        return logits.masked_fill(~good, torch.nan)
    if not good.all():
        raise DataError(fault())
    return logits


class LabelCounts(NamedTuple):
    """The training images that show each class, and those that do not, [K]."""

    positives: Tensor
    negatives: Tensor


# Counts the labels when it is called: a loss that does not need them costs nothing.
CountLabels = Callable[[], LabelCounts]

# Sums a tensor over all processes. It may overwrite the tensor.
AllReduce = Callable[[Tensor], Tensor]


def identity(value: Tensor) -> Tensor:
    """Return the tensor itself, the sum over one process."""
    return value


def required(label_counts: CountLabels | None) -> CountLabels:
    """Return the argument; raise a `ValueError` if it is None, as for a loss without training."""
    if label_counts is None:
        raise ValueError(
            "label_counts is None: pass a function that returns LabelCounts(positives, negatives)"
        )
    return label_counts


def positive_weight(
    pos_weight: float | Literal["auto"] | None, cap: float, label_counts: CountLabels | None
) -> Tensor | None:
    """Return the factor of the loss of positives: [], or [K] for one per class, or None for 1.

    "auto" is negatives / positives of each class, at least one of each and at most `cap`, so that
    both have the same total weight.
    """
    check_above_0(pos_weight_cap=cap)
    if pos_weight is None:
        return None

    if pos_weight != "auto":
        check_above_0(pos_weight=pos_weight)
        return torch.tensor(float(pos_weight))

    label_counts = required(label_counts)
    positives, negatives = (count.double().clamp(min=1) for count in label_counts())
    return (negatives / positives).clamp(max=cap).float()


def check_class_count(name: str, values: Tensor | None, logits: Tensor) -> None:
    """Raise a `ConfigError` unless there is one value per class, [K], or None."""
    if values is not None and len(values) != logits.shape[-1]:
        raise ConfigError(f"loss.{name} has {len(values)} values for {logits.shape[-1]} classes")
