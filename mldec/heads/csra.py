"""Class-specific residual attention: average pooling, plus where each class scores highest."""

import math

import torch
from torch import Tensor, nn

from mldec.heads.layers import as_tokens, at_least_one, refuse_words, take_rows


class CSRA(nn.Module):
    """Logits from the mean of the tokens, plus their mean under the attention of the class.

    With the score s_j = x_j . m_i + b_i of class i at token x_j, the attention of the class is
    softmax_j(T s_j), and its logit is l_i = mean_j(s_j) + lambda sum_j softmax_j(T s_j) s_j. Heads
    have a classifier (m, b) and a temperature T each, and their logits are summed: T is 1, 2, 4,
    ..., and infinite in the last of several, where the sum becomes max_j(s_j). With lambda = 0 and
    one head this is `GAP`.

    Source: Zhu and Wu 2021, arXiv 2108.02456, equation 8, and figure 3 for 1, 2 and 4 heads. This
    is not the head of the authors' code (pipeline/csra.py of Kevinz-code/CSRA), so that their
    published figures are not to be expected:

    - There each m_i is divided by its norm, in training and inference; here it is not.
    - There 6 and 8 heads have the temperatures 1, 2, ..., 5 or 7 and infinity; here powers of two.
    - There scores have no bias b_i, which leaves the attention as it is.
    - There `lam` is 0.1 for VOC, 0.4 or 0.5 for MS-COCO and 0.3 for WIDER.

    Args:
        in_features: width C of the tokens.
        num_classes: number of classes K.
        num_heads: number H of heads.
        lam: weight lambda of the attention, from 0 on; heads share it.
        dropout: probability of dropping a feature, in all tokens of an image, in training.
    """

    class_tensors = ("fc.weight", "fc.bias")
    take_classes = take_rows

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        num_heads: int = 1,
        lam: float = 0.1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        at_least_one(num_heads=num_heads)
        self.in_features, self.lam = in_features, lam
        self.temperatures = [2.0**head for head in range(num_heads)]
        if num_heads > 1:
            self.temperatures[-1] = math.inf

        self.dropout = nn.Dropout1d(dropout)
        # The rows of a class, one per head, follow each other.
        self.fc = nn.Linear(in_features, num_heads * num_classes)

    def start_at(self, logits: Tensor) -> None:
        """Set the part of the logits that no image changes to these [K]."""
        heads = len(self.temperatures)
        # Each head counts its bias in the mean, and in the attended sum, times lambda.
        self.fc.bias.data.copy_(logits.repeat_interleave(heads) / (heads * (1 + self.lam)))

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C], or a map [B, C, H, W], to logits [B, K]."""
        tokens = as_tokens(tokens, self.in_features)
        refuse_words(queries, self)
        tokens = self.dropout(tokens.transpose(1, 2)).transpose(1, 2)

        # Half precision would make ties of logits, which change the mAP: autocast is off here.
        with torch.autocast(tokens.device.type, enabled=False):
            scores = self.fc(tokens.to(self.fc.weight.dtype))
            scores = scores.unflatten(2, (-1, len(self.temperatures)))  # [B, N, K, H]
            per_head = zip(scores.unbind(3), self.temperatures, strict=True)
            attended = [_attended(own, temperature) for own, temperature in per_head]
            return (scores.mean(1) + self.lam * torch.stack(attended, dim=2)).sum(2)


def _attended(scores: Tensor, temperature: float) -> Tensor:
    """Average scores [B, N, K] over the tokens, by the softmax of T times themselves."""
    if math.isinf(temperature):
        return scores.amax(1)
    return ((temperature * scores).softmax(1) * scores).sum(1)
