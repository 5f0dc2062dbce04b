"""Global average pooling and a linear classifier: the baseline of the paper."""

import torch
from torch import Tensor, nn

from mldec.heads.layers import (
    as_tokens,
    at_least_one,
    reject_word_vectors,
    take_rows,
    without_autocast,
)


class GAP(nn.Module):
    """Linear classifier on the mean token: l = W mean(tokens) + b (paper section 2, "GAP-based").

    Args:
        in_features: Width C of the tokens.
        num_classes: Number of classes K.
        dropout: Dropout probability of the pooled features.
        bottleneck: Width of an additional linear layer before the classifier, which saves
            parameters with thousands of classes. None for no layer. Source: `bottleneck_head` of
            the official ASL code, used for Open Images with width 512.
        boost: Factor of the positive class scores of a token, > 0 (BoostLU). The logit is then the
            mean over the tokens of l = W token + b, in which l > 0 is multiplied by `boost`. It
            compensates for low scores due to missing labels. Source: Kim et al., "Bridging the Gap
            between Model Explanations in Partially Annotated Multi-label Classification" (CVPR
            2023, arXiv 2304.01804), with 5.
    """

    class_tensors = ("fc.weight", "fc.bias")
    take_classes = take_rows

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        dropout: float = 0.0,
        bottleneck: int | None = None,
        boost: float = 1.0,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.dropout = nn.Dropout(dropout)

        if not boost > 0:
            raise ValueError(f"boost is {boost}: it must be above 0")
        self.boost = boost
        at_least_one(bottleneck=bottleneck)
        self.bottleneck: nn.Module = nn.Identity()
        if bottleneck is not None:
            self.bottleneck = nn.Linear(in_features, bottleneck)
        self.fc = nn.Linear(bottleneck or in_features, num_classes)

    def set_bias_from_prior(self, logits: Tensor) -> None:
        """Initialize the biases from prior logits [K]."""
        self.fc.bias.data.copy_(logits)

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Compute logits [B, K]; see `mldec.heads`."""
        tokens = as_tokens(tokens, self.in_features)
        reject_word_vectors(word_vectors, self)
        # Without a boost, the mean can be computed first.
        pooled = tokens.mean(1) if self.boost == 1 else tokens
        pooled = self.dropout(pooled)

        with without_autocast(tokens.device):
            scores = self.fc(self.bottleneck(pooled.to(self.fc.weight.dtype)))
            if self.boost == 1:
                return scores
            return torch.where(scores > 0, self.boost * scores, scores).mean(1)
