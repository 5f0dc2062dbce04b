"""The classifier: a backbone and a head."""

import inspect
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

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


def multiply_accumulates(
    model: nn.Module, image_size: int, queries: tuple[int, ...] | None = None
) -> float:
    """Count the multiply-accumulates per image in evaluation mode, without computing anything.

    The GFLOPs of the paper are these: of convolutions, linear layers and attention only; work that
    does not depend on the image counts in full. The model may be on any device, including meta;
    `queries` is the shape [K, D_w] of its word vectors.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Fake tensors claim to be on the CPU: the heads switch autocast off, which has no "meta".
        # Attention as two products: the counter of torch 2.11 misses the fused form on a CPU.
        math = sdpa_kernel(SDPBackend.MATH)
        with FakeTensorMode(), torch.no_grad(), math, FlopCounterMode(display=False) as counter:
            named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
            state = {
                name: torch.empty(value.shape, dtype=value.dtype, device="cpu")
                for name, value in named
            }

            shapes: list[tuple[int, ...]] = [(1, 3, image_size, image_size)]
            if queries:
                shapes.append(queries)
            inputs = tuple(torch.empty(shape, device="cpu") for shape in shapes)
            functional_call(model, state, inputs)
    finally:
        # Module by module: a part that was frozen in evaluation mode stays there.
        for module in training:
            module.training = True

    # torch counts a product and a sum as two.
    return counter.get_total_flops() / 2


def work_per_image(model: nn.Module, image_size: int, queries: Tensor | None) -> float | None:
    """Return the multiply-accumulates, with word vectors [K, D_w]; None if they are unknown."""
    try:
        return multiply_accumulates(model, image_size, None if queries is None else queries.shape)
    except Exception:
        # A part of the user's own may fail on tensors without values.
        return None


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the trainable parameters, and all, the frozen queries of a head (a buffer) included."""
    trainable = sum(value.numel() for value in model.parameters() if value.requires_grad)
    frozen = sum(value.numel() for value in model.parameters() if not value.requires_grad)

    queries = sum(
        value.numel()
        for name, value in model.named_buffers()
        if name.rpartition(".")[2] == "queries"
    )
    return trainable, trainable + frozen + queries
