"""Heads: map the tokens of a backbone to one logit per class."""

from typing import Protocol

from torch import Tensor

# Letters of the shapes in this package: B batch, N tokens, C backbone width, D decoder width,
# G groups, K classes.


class Head(Protocol):
    """What every head offers; its constructor is `(in_features, num_classes, *, own keywords)`."""

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C] (and word vectors [K, D_w]) to logits [B, K]."""
        ...
