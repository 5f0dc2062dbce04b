"""Functions shared by the losses: checks of arguments and targets, and label counts."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mldec.errors import ConfigError, DataError


def check_range(low: float, high: float = float("inf"), **settings: float) -> None:
    """Raise ValueError for the first setting outside [low, high)."""
    for name, value in settings.items():
        if not low <= value < high:
            bounds = f"lie in [{low}, {high})"
            if high == float("inf"):
                bounds = f"be {low} or more"
            raise ValueError(f"{name} is {value}: it must {bounds}")


def check_above_0(**settings: float) -> None:
    """Raise ValueError for the first setting that is not above 0."""
    for name, value in settings.items():
        if not value > 0:  # NaN too
            raise ValueError(f"{name} is {value}: it must be above 0")


def check_targets(
    logits: Tensor, targets: Tensor, *, unknown: bool = False, soft: bool = False
) -> tuple[Tensor, Tensor]:
    """Check targets [B, K], and convert logits and targets to float32 (float64 is kept).

    Targets are 0 and 1. `unknown` also allows -1 (not annotated), and `soft` allows all of [0, 1].

    Raises:
        DataError: If the shapes differ, or a target is not allowed. On a GPU, the logits of invalid
            targets become NaN instead, see `check_valid`.
    """
    if logits.shape != targets.shape:
        raise DataError(
            f"the shape of the targets is {tuple(targets.shape)}: "
            f"it must be {tuple(logits.shape)}, as for the logits"
        )

    # Half precision is not accurate enough for a loss.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)

    if soft:
        valid = (targets >= 0) & (targets <= 1)
    else:
        valid = (targets == 0) | (targets == 1)
    if unknown:
        valid |= targets == -1

    def message() -> str:
        allowed = "0 to 1" if soft else "0 and 1"
        if unknown:
            allowed += " and -1"
        return f"target {targets[~valid][0].item():g} is not allowed: this loss allows {allowed}"

    return check_valid(valid, logits, message), targets


def check_valid(valid: Tensor, logits: Tensor, message: Callable[[], str]) -> Tensor:
    """Return the logits [B, K] if all targets are valid, else raise DataError with the message.

    A GPU would need a host sync to raise an error. There the logits of invalid targets become NaN,
    and training reports the images of the non-finite loss. The mask `valid` is broadcast to the
    logits.
    """
    if logits.device.type != "cpu":
        return logits.masked_fill(~valid, torch.nan)
    if not valid.all():
        raise DataError(message())
    return logits


class LabelCounts(NamedTuple):
    """Number of training images with and without each class."""

    positives: Tensor  # [K]
    negatives: Tensor  # [K]

    def log_odds(self) -> Tensor:
        """Return the log-odds of the classes, float32 [K].

        One positive and one negative are added to each class, so that all log-odds are finite.
        """
        return ((self.positives.double() + 1) / (self.negatives.double() + 1)).log().float()


# Counts the labels when it is called. Only losses that need the counts call it.
CountLabels = Callable[[], LabelCounts]

# Sums a tensor over all ranks, possibly in place.
AllReduce = Callable[[Tensor], Tensor]


def identity(value: Tensor) -> Tensor:
    """No-op all-reduce."""
    return value


def count(label_counts: CountLabels | None) -> LabelCounts:
    """Count the training labels. Raises ValueError if a loss was built without the function."""
    if label_counts is None:
        raise ValueError("label_counts is None: pass a function that returns LabelCounts")
    return label_counts()


def positive_weight(
    pos_weight: float | Literal["auto"] | None, cap: float, label_counts: CountLabels | None
) -> Tensor | None:
    """Return the factor of the loss of positives: a scalar, or [K] for "auto", or None.

    "auto" is negatives / positives of each class, so that both have the same total weight. Each
    count is at least 1, and the factor is at most `cap`.
    """
    check_above_0(pos_weight_cap=cap)
    if pos_weight is None:
        return None

    if pos_weight != "auto":
        check_above_0(pos_weight=pos_weight)
        return torch.tensor(float(pos_weight))

    positives, negatives = count(label_counts)
    positives = positives.double().clamp(min=1)
    negatives = negatives.double().clamp(min=1)
    return (negatives / positives).clamp(max=cap).float()


def scaled_log_odds(logit_adjustment: float, label_counts: CountLabels | None) -> Tensor | None:
    """Return tau times the log-odds of the classes, float32 [K]; None if tau is 0.

    Source: logit adjustment of Menon et al. 2021, arXiv 2007.07314, with log-odds. The loss adds it
    to the logits, so that the logits of the model exclude the class prior.
    """
    check_range(0, logit_adjustment=logit_adjustment)
    if logit_adjustment == 0:
        return None
    return logit_adjustment * count(label_counts).log_odds()


def check_class_count(name: str, values: Tensor | None, logits: Tensor) -> None:
    """Raise ConfigError unless `values` is None or has one value per class."""
    if values is not None and len(values) != logits.shape[-1]:
        raise ConfigError(f"loss.{name} has {len(values)} values for {logits.shape[-1]} classes")
