"""The zero-shot head of CLIP and SigLIP: the cosine of an image and the name of a class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.heads.layers import as_tokens, check_words


class Cosine(nn.Module):
    """Logits from the cosine between the embedding of an image and that of each class.

    The logit of class i is l_i = exp(s) cos(mean(tokens), n_i) + b, with n_i its word vector; s and
    b are two numbers of the model that embeds both. Nothing is learnt for a class.

    Source: CLIP (arXiv 2103.00020, figure 3); b: SigLIP (arXiv 2303.15343, algorithm 1).

    Args:
        in_features: width C of the tokens, which is that of the word vectors too.
        num_classes: no effect, because no parameter belongs to a class.
        bias: whether there is an offset b; it is 0 without.
    """

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False) -> None:
        super().__init__()
        self.word_dim = in_features
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.logit_bias = nn.Parameter(torch.zeros(())) if bias else None

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C], or a map [B, C, H, W], and word vectors [K, C] to logits [B, K].

        Raises:
            ConfigError: if queries are missing or of another width.
            ValueError: if the tokens are not floating point of such a shape.
        """
        tokens = as_tokens(tokens, self.word_dim)
        words = check_words(queries, self.word_dim)

        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        dtype = self.logit_scale.dtype
        with torch.autocast(tokens.device.type, enabled=False):
            images = F.normalize(tokens.mean(1).to(dtype), dim=1)
            cosines = images @ F.normalize(words.to(dtype), dim=1).T
            logits = self.logit_scale.exp() * cosines
            return logits if self.logit_bias is None else logits + self.logit_bias
