"""Global average pooling and a linear classifier: the baseline of the paper."""

import torch
from torch import Tensor, nn

from mldec.heads.layers import as_tokens, at_least_one, refuse_words, take_rows


class GAP(nn.Module):
    """Logits from the mean of the tokens: l = W mean(tokens) + b (paper section 2, "GAP-based").

    Args:
        in_features: width C of the tokens.
        num_classes: number of classes K.
        dropout: probability of dropping a pooled feature in training.
        bottleneck: width of a linear layer before the classifier, which saves parameters with
            thousands of classes; None for no such layer. Source: `bottleneck_head` of the official
            ASL code, for Open Images (width 512).
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

    def start_at(self, logits: Tensor) -> None:
        """Set the part of the logits that no image changes to these [K]."""
        self.fc.bias.data.copy_(logits)

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C], or a map [B, C, H, W], to logits [B, K]."""
        tokens = as_tokens(tokens, self.in_features)
        refuse_words(queries, self)
        pooled = self.dropout(tokens.mean(1))

        # Half precision would round different logits to the same value, and ties change the mAP:
        # autocast is off here.
        with torch.autocast(tokens.device.type, enabled=False):
            return self.fc(self.bottleneck(pooled.to(self.fc.weight.dtype)))
