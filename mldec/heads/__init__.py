"""Heads: tokens of a backbone in, one logit a class out."""

from typing import Protocol

from torch import Tensor

# Shapes used in this package: B batch, N tokens, C backbone width, D decoder width, G groups, K classes.


class Head(Protocol):
    """Constructor: `(in_features, num_classes, *, own keywords)`."""

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C] (and word vectors [K, D_w]) to logits [B, K]."""
        ...
