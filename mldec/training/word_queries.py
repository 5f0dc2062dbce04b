"""What training does to word queries so that others are understood too (paper table 3)."""

import torch
from torch import Tensor

from mldec.config.schema import Train
from mldec.errors import ConfigError


def check(train: Train, queries: Tensor | None) -> None:
    """Raise a `ConfigError` naming an augmentation of queries that the data has none for."""
    for name in ("query_noise", "random_queries"):
        if queries is None and getattr(train, name):
            raise ConfigError(
                f"train.{name} has no effect: the data has no word queries; leave it out"
            )


def augment(queries: Tensor, targets: Tensor, *, noise: float, extra: int) -> tuple[Tensor, Tensor]:
    """Return queries with noise, and with random ones after them that every image is said to show.

    The paper names the two and gives their figures in table 3; the public code has neither. How they
    are drawn is our choice: both are normal, on the vectors as they are before any projection, in units
    of the spread of their own numbers, so that a setting means the same for any source of vectors.
    Random numbers come from torch's global generator.

    Args:
        queries: word vectors [K, D].
        targets: [B, K].
        noise: standard deviation of what is added to each number, as a fraction of that of all numbers; 0 is off.
        extra: number of random queries, with the mean and the standard deviation of all numbers.

    Returns:
        queries [K + extra, D] and targets [B, K + extra]; the very arguments if both are off.
    """
    if not noise and not extra:
        return queries, targets
    spread, mean = torch.std_mean(queries, correction=0)
    random = mean + spread * torch.randn(
        extra, queries.shape[1], device=queries.device, dtype=queries.dtype
    )
    noisy = queries + noise * spread * torch.randn_like(queries) if noise else queries
    return torch.cat([noisy, random]), torch.cat(
        [targets, targets.new_ones(len(targets), extra)], 1
    )
