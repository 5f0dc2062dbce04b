"""Class-specific residual attention: average pooling plus attention pooling per class."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads.layers import (
    as_tokens,
    at_least_one,
    reject_word_vectors,
    take_rows,
    without_autocast,
)


class CSRA(nn.Module):
    """Class-specific residual attention over the tokens.

    Let s_j = x_j . m_i + b_i be the score of class i at token x_j. The attention of the class is
    softmax_j(T s_j), and its logit is l_i = mean_j(s_j) + lambda sum_j softmax_j(T s_j) s_j. Each
    head has its own classifier (m, b) and temperature T, and the logits of the heads are summed.
    The temperatures of H heads are 1 to H - 1 and infinity, or 1, 2, 4 and infinity for H = 4. One
    head has the temperature 1. With an infinite temperature, the sum becomes max_j(s_j). CSRA with
    lambda = 0 and one head equals `GAP`.

    The official code divides each m_i by its norm and has no bias: `normalize`. Its `lam` is 0.1
    for VOC, 0.4 or 0.5 for MS-COCO and 0.3 for WIDER. It supports 1, 2, 4, 6 and 8 heads.

    Source: Zhu and Wu 2021, arXiv 2108.02456, equation 8, and figure 3 for 1, 2 and 4 heads; code
    Kevinz-code/CSRA, pipeline/csra.py.

    Args:
        in_features: Width C of the tokens.
        num_classes: Number of classes K.
        num_heads: Number of heads H.
        lam: Weight lambda of the attention, >= 0, shared by all heads.
        normalize: Whether to divide each m_i by its norm and to omit b_i, as in the official code.
        dropout: Dropout probability of a feature. A feature is dropped in all tokens of an image.
    """

    take_classes = take_rows

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        num_heads: int = 1,
        lam: float = 0.1,
        normalize: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        at_least_one(num_heads=num_heads)
        self.in_features = in_features
        self.lam = lam
        self.normalize = normalize
        self.temperatures = [float(head) for head in range(1, num_heads + 1)]
        if num_heads == 4:
            self.temperatures[2] = 4.0
        if num_heads > 1:
            self.temperatures[-1] = math.inf

        self.dropout = nn.Dropout1d(dropout)
        # Each class has one row per head, and its rows are consecutive.
        self.fc = nn.Linear(in_features, num_heads * num_classes, bias=not normalize)
        self.class_tensors = ("fc.weight",) if normalize else ("fc.weight", "fc.bias")

    def set_bias_from_prior(self, logits: Tensor) -> None:
        """Initialize the biases from prior logits [K]."""
        if self.normalize:
            raise ConfigError(
                "train.start_at_frequency: head.normalize=true has no bias per class; set one only"
            )
        heads = len(self.temperatures)
        # Each head adds its bias to the mean, and lambda times its bias to the attended sum.
        self.fc.bias.data.copy_(logits.repeat_interleave(heads) / (heads * (1 + self.lam)))

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Compute logits [B, K]; see `mldec.heads`."""
        tokens = as_tokens(tokens, self.in_features)
        reject_word_vectors(word_vectors, self)
        tokens = self.dropout(tokens.transpose(1, 2)).transpose(1, 2)

        with without_autocast(tokens.device):
            weight = self.fc.weight
            if self.normalize:
                weight = F.normalize(weight, dim=1)
            scores = F.linear(tokens.to(weight.dtype), weight, self.fc.bias)
            scores = scores.unflatten(2, (-1, len(self.temperatures)))  # [B, N, K, H]
            attended = []
            for s, temperature in zip(scores.unbind(3), self.temperatures, strict=True):
                if math.isinf(temperature):
                    attended.append(s.amax(1))
                else:
                    attended.append(((temperature * s).softmax(1) * s).sum(1))
            return (scores.mean(1) + self.lam * torch.stack(attended, dim=2)).sum(2)
