"""Augmentation of word queries, so that unseen classes are recognised too (paper, table 3)."""

import torch
from torch import Tensor

from mldec.config.schema import Train
from mldec.errors import ConfigError


def check(train: Train, queries: Tensor | None) -> None:
    """Check that queries are augmented only where the data has some.

    Raises:
        ConfigError: for an augmentation of queries on closed-set data.
    """
    for name in ("query_noise", "random_queries"):
        if queries is None and getattr(train, name):
            raise ConfigError(
                f"train.{name} has no effect: the data has no word queries; leave it out"
            )


def augment(queries: Tensor, targets: Tensor, *, noise: float, extra: int) -> tuple[Tensor, Tensor]:
    """Add noise to the queries, and append random queries that are positive in every image.

    The paper names the two augmentations and gives their settings in table 3; the public code has
    neither. How they are drawn is our choice: both are normal and act on the vectors before any
    projection. Their unit is the standard deviation of the vectors' own numbers, so that a setting
    means the same for any source of vectors. Random numbers come from torch's global generator.

    Args:
        queries: word vectors [K, D].
        targets: [B, K].
        noise: standard deviation of the noise, as a fraction of that of all numbers; 0 is off.
        extra: number of random queries, with the mean and the standard deviation of all numbers.

    Returns:
        Queries [K + extra, D] and targets [B, K + extra]; the arguments themselves if both are off.
    """
    if not noise and not extra:
        return queries, targets

    spread, mean = torch.std_mean(queries, correction=0)
    random = mean + spread * torch.randn(
        extra, queries.shape[1], device=queries.device, dtype=queries.dtype
    )
    noisy = queries
    if noise:
        noisy = queries + noise * spread * torch.randn_like(queries)

    positive = targets.new_ones(len(targets), extra)
    return torch.cat([noisy, random]), torch.cat([targets, positive], 1)
