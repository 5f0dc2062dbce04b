"""Heads: map the tokens of a backbone to one logit per class."""

from typing import Protocol

from torch import Tensor

from mldec import lazily
from mldec.heads.ml_decoder import MLDecoder

# A run has one head: it does not import the others.
__getattr__ = lazily(
    __name__,
    {
        "CSRA": "csra",
        "GAP": "gap",
        "RAM": "ram",
        "Query2Label": "query2label",
        "attach": "attached",
        **dict.fromkeys(("Cosine", "WordGAP", "WordGroupDecoder"), "words"),
    },
)

__all__ = [
    "CSRA",
    "GAP",
    "RAM",
    "Cosine",
    "Head",
    "MLDecoder",
    "Query2Label",
    "WordGAP",
    "WordGroupDecoder",
    "attach",
]

# Letters of the shapes in this package: B batch, N tokens, C backbone width, D decoder width,
# G groups, K classes.


class Head(Protocol):
    """What every head offers; its constructor is `(in_features, num_classes, *, own keywords)`.

    A head with a bias per class may have a method `start_at(logits)`: it sets the part of its
    logits that no image changes to these [K]; see `train.start_at_frequency`.
    """

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C], or a map [B, C, H, W], to logits [B, K].

        A zero-shot head also takes word vectors [K, D_w].
        """
        ...
