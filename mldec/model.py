"""The classifier: a backbone and a head."""

import inspect

from torch import Tensor, nn


class Classifier(nn.Module):
    """Map images to logits, with any backbone that returns tokens and any head that takes them.

    Args:
        backbone: images [B, 3, H, W] -> tokens [B, N, C]; its attribute `num_features` is C.
        head: tokens [B, N, C] and optionally queries [K, D_w] -> logits [B, K].
    """

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

        # Only decoder heads have attention weights to return; GAP has none.
        self.gives_attention = "attention" in inspect.signature(head.forward).parameters

    def forward(
        self, images: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map RGB images [B, 3, H, W], uint8 or floating point in [0, 1], to logits [B, K].

        A zero-shot head needs word vectors [K, D_w] as queries. With `attention`, the weights of
        each query over the tokens are returned too, [B, G, N]; decoder heads alone have them.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(
                f"images have the shape {list(images.shape)}: give a batch [B, 3, H, W]"
            )
        return self.classify(self.backbone(images), queries, attention=attention)

    def classify(
        self, tokens: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]; the other arguments are those of `forward`."""
        # Heads without attention do not have the argument, so pass it only if it is wanted.
        if attention:
            return self.head(tokens, queries, attention=True)
        return self.head(tokens, queries)


class TokenClassifier(Classifier):
    """A classifier whose input is the tokens of its backbone, which were computed before."""

    def forward(
        self, images: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]; see `Classifier.classify`."""
        return self.classify(images, queries, attention=attention)
