"""Global average pooling and a linear classifier: the baseline of the paper."""

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
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.dropout = nn.Dropout(dropout)

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
        pooled = self.dropout(tokens.mean(1))

        with without_autocast(tokens.device):
            return self.fc(self.bottleneck(pooled.to(self.fc.weight.dtype)))
