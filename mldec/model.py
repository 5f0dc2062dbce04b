"""The classifier: a backbone and a head."""

import inspect
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.errors import ConfigError


class Classifier(nn.Module):
    """Map images to logits, with any backbone that returns tokens and any head that takes them.

    Args:
        backbone: images [B, 3, H, W] -> tokens [B, N, C]; its attribute `num_features` is C.
        head: tokens [B, N, C] and optionally queries [K, D_w] -> logits [B, K].
    """

    views: str | None = None  # those whose logits are averaged, see `Viewed`

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
            if not self.gives_attention:
                raise ConfigError(
                    f"attention: {type(self.head).__name__} has no attention weights; leave it out"
                )
            return self.head(tokens, queries, attention=True)
        return self.head(tokens, queries)


class Viewed(Classifier):
    """A classifier that averages the logits of views of each image.

    Its `backbone` and `classify` are those of a single view.

    Args:
        model: in evaluation mode.
        views: "flip": the image and its mirror image; "scales": the image with the side that the
            model is for, and as it is given, see `larger`.
        side: pixels per side that the model is for.
    """

    def __init__(self, model: Classifier, views: str, side: int) -> None:
        super().__init__(model.backbone, model.head)
        self.views, self.side = views, side

    @staticmethod
    def larger(side: int) -> int:
        """Return the side of the larger scale: a quarter more, up to a multiple of 32."""
        return 32 * math.ceil(1.25 * side / 32)

    def forward(
        self, images: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map images to logits; see `Classifier`. There is no attention of several views."""
        if attention:
            raise ValueError("there is no attention of several views: take the model without them")
        if self.views == "flip":
            other = images.flip(3)
        else:
            pixels = images if images.is_floating_point() else images / 255
            size = (self.side, self.side)
            other = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        logits = [super(Viewed, self).forward(view, queries) for view in (images, other)]
        return torch.stack(logits).mean(0)


class TokenClassifier(Classifier):
    """A classifier whose input is the tokens of its backbone, which were computed before."""

    def forward(
        self, images: Tensor, queries: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]; see `Classifier.classify`."""
        return self.classify(images, queries, attention=attention)
