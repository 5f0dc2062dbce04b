"""Softmax cross-entropy with soft targets, for data with one label per image."""

import torch
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.losses.targets import prepare, require


class CrossEntropy(nn.Module):
    """Cross-entropy of the softmax with targets that sum to 1, averaged over the batch.

    Args:
        smoothing: targets move towards 1/K by this share, in [0, 1).

    Raises:
        ConfigError: for a value out of its range.
    """

    reduction = "mean"
    exclusive = True
    soft = True

    def __init__(self, *, smoothing: float = 0.0) -> None:
        super().__init__()

        if not 0 <= smoothing < 1:
            raise ConfigError(f"loss.smoothing {smoothing} is not in [0, 1)")

        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [B, K] and targets [B, K], each row a distribution, to the loss [], float32.

        Raises:
            DataError: for a target below 0 or above 1, or a row that does not sum to 1.
        """
        logits, targets = prepare(logits, targets, soft=True)

        total = targets.sum(-1)

        def fault() -> str:
            worst = total[(total - 1).abs().argmax()].item()
            return (
                f"the labels of an image sum to {worst:g}: "
                f"cross-entropy needs one label per image; use loss=asl"
            )

        near_1 = torch.isclose(total, torch.ones_like(total), atol=1e-3)
        logits = require(near_1[:, None], logits, fault)

        smooth = targets * (1 - self.smoothing) + self.smoothing / logits.shape[-1]

        # Bitwise equal to F.cross_entropy, except that a log-probability of -inf with weight 0
        # counts as 0, where F.cross_entropy returns NaN.
        losses = (smooth * logits.log_softmax(-1)).masked_fill(smooth == 0, 0)
        return -losses.sum() / len(logits)
