"""Checks and conversions that every loss applies to its inputs."""

from collections.abc import Callable

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
