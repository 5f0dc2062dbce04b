"""The classifier: a backbone and a head."""

from torch import Tensor, nn


class Classifier(nn.Module):
    """Images to logits, for any backbone that gives tokens and any head that takes them.

    Args:
        backbone: images [B, 3, H, W] -> tokens [B, N, C]; has `num_features` C.
        head: tokens [B, N, C] (, queries [K, D_w]) -> logits [B, K].
    """

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor, queries: Tensor | None = None, *, attention: bool = False) -> Tensor:
        """Map images [B, 3, H, W], uint8 or floating point in [0, 1], to logits [B, K].

        Args:
            images: RGB.
            queries: word vectors [K, D_w] for a zero-shot head.
            attention: also return the head's attention [B, G, N]; decoder heads only.
        """
        tokens = self.backbone(images)
        return self.head(tokens, queries, attention=True) if attention else self.head(tokens, queries)
