"""Classify each token, and pool the logits with a smooth maximum."""

import math

from torch import Tensor, nn


class SmoothMax(nn.Module):
    """Smooth maximum of the token logits: log(mean_j exp(r s_j)) / r for the sharpness r.

    Args:
        in_features: Width C of the tokens. mldec passes it.
        num_classes: Number of classes K. mldec passes it.
        sharpness: r > 0. The result is near the mean for small values, near the maximum for large.
    """

    def __init__(self, in_features: int, num_classes: int, *, sharpness: float = 4.0) -> None:
        super().__init__()
        # The user reads "head.sharpness is 0: it must be above 0".
        if sharpness <= 0:
            raise ValueError(f"sharpness is {sharpness}: it must be above 0")
        self.sharpness = sharpness
        self.fc = nn.Linear(in_features, num_classes)

    def forward(self, tokens: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]. Word vectors are for zero-shot heads."""
        scores = self.sharpness * self.fc(tokens)  # [B, N, K]
        pooled = scores.logsumexp(1) - math.log(scores.shape[1])
        return pooled / self.sharpness
