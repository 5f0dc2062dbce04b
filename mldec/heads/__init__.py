"""Heads: map the tokens of a backbone to one logit per class."""

from typing import Protocol

from torch import Tensor

from mldec import lazily
from mldec.heads.ml_decoder import MLDecoder

# Heads are imported on first use, because a run has only one.
__getattr__ = lazily(
    __name__,
    {
        "CSRA": "csra",
        "GAP": "gap",
        "RAM": "ram",
        "Query2Label": "query2label",
        "attach": "attached",
        "Cosine": "words",
        "WordGAP": "words",
        "WordGroupDecoder": "words",
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

# Symbols of shapes in this package: B batch size, N tokens, C backbone width, D decoder width,
# D_w width of word vectors, G groups, K classes.


class Head(Protocol):
    """Interface of all heads. The constructor is `Head(in_features, num_classes, *, ...)`.

    A head with a bias per class may define `set_bias_from_prior(logits)`, which
    initializes its biases from prior logits [K]; see `train.start_at_frequency`.
    """

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Compute logits [B, K].

        Args:
            tokens: Tokens [B, N, C] or a feature map [B, C, H, W].
            word_vectors: Word vectors [K, D_w], for zero-shot heads only.

        Returns:
            Logits [B, K].
        """
