"""Global average pooling mapped to the space of word vectors: the plain zero-shot baseline."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.heads.layers import as_tokens, at_least_one, check_words


class WordGAP(nn.Module):
    """Logits from one pooled vector per image, compared with the word vector of each class.

    The logit of class i is l_i = (W mean(tokens) + w) . n_i / |n_i| + b, with n_i its word vector.
    What ML-Decoder adds to this baseline is that each class attends to the tokens itself.

    Args:
        in_features: width C of the tokens.
        num_classes: number of training classes; has no effect, because no parameter belongs to a
            class.
        word_dim: width D_w of word vectors.
        dropout: probability of dropping a pooled feature in training.

    Raises:
        ConfigError: for a width below 1.
    """

    def __init__(
        self, in_features: int, num_classes: int, *, word_dim: int = 300, dropout: float = 0.0
    ) -> None:
        super().__init__()
        at_least_one(word_dim=word_dim)
        self.word_dim = word_dim
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(in_features, word_dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C], or a map [B, C, H, W], and word vectors [K, D_w] to logits [B, K].

        Raises:
            ConfigError: if queries are missing or of another width.
            ValueError: if the tokens are not floating point of such a shape.
        """
        tokens = as_tokens(tokens, self.fc.in_features)
        word_vectors = F.normalize(check_words(queries, self.word_dim), dim=1)
        pooled = self.dropout(tokens.mean(1))

        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        dtype = self.fc.weight.dtype
        with torch.autocast(tokens.device.type, enabled=False):
            image_vectors = self.fc(pooled.to(dtype))  # [B, D_w]
            return image_vectors @ word_vectors.to(dtype).T + self.bias
