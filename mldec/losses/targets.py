"""Checks and conversions that every loss applies to its inputs."""

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
        DataError: if the shapes differ or a target has another value; the message names it.
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

    if not good.all():
        allowed = ("0 to 1" if soft else "0 and 1") + (" and -1" if unknown else "")
        raise DataError(
            f"target {targets[~good][0].item():g} is not allowed: this loss takes {allowed}"
        )
    return logits, targets
