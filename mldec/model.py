"""The classifier: a backbone and a head."""

import inspect
import math
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mldec.errors import ConfigError


class Classifier(nn.Module):
    """Map images to logits with a backbone and a head.

    Args:
        backbone: Maps images [B, 3, H, W] to tokens [B, N, C]. Its attribute `num_features` is C.
        head: Maps tokens [B, N, C] and optional word vectors [K, D_w] to logits [B, K].
    """

    views: str | None = None  # test-time augmentation, see `Viewed`

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

        # Only decoder heads can return attention weights.
        self.gives_attention = "attention" in inspect.signature(head.forward).parameters

    def forward(
        self, images: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map images to logits.

        Args:
            images: RGB images [B, 3, H, W], uint8, or floating point in [0, 1]. Or cached tokens
                [B, N, C], which skip the backbone, or stored logits [B, K], which are returned.
            word_vectors: Word vectors [K, D_w] for a zero-shot head, else None.
            attention: Also return the attention weights of the queries over the tokens. Only
                decoder heads have them.

        Returns:
            Logits [B, K], with `attention` a tuple of logits and weights [B, G, N].

        Raises:
            ValueError: If the images have another shape.
            ConfigError: If `attention` is set and the head has no attention weights.
        """
        if images.ndim == 2:
            return images
        if images.ndim == 3 and images.shape[2] == self.backbone.num_features:
            return self.classify(images, word_vectors, attention=attention)
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images have the shape {list(images.shape)}: it must be [B, 3, H, W]")
        return self.classify(self.backbone(images), word_vectors, attention=attention)

    def classify(
        self, tokens: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map tokens [B, N, C] to logits [B, K]. For the other arguments see `forward`."""
        # Other heads do not have the argument `attention`, so pass it only if it is set.
        if attention:
            if not self.gives_attention:
                raise ConfigError(
                    f"attention: {type(self.head).__name__} has no attention weights; remove it"
                )
            return self.head(tokens, word_vectors, attention=True)
        return self.head(tokens, word_vectors)

    @property
    def is_fitted(self) -> bool:
        """Whether the head is fitted in closed form instead of trained by gradients."""
        return hasattr(self.head, "fit")

    @property
    def needs_blocks(self) -> bool:
        """Whether the head takes blocks of pooled features instead of tokens."""
        return getattr(self.head, "features", None) == "blocks"

    def mean_token(self, tokens: Tensor) -> Tensor:
        """Return the mean token float32 [B, C] from the output of the backbone."""
        sizes = getattr(self.backbone, "block_sizes", None)
        pooled = tokens.float().mean(1)
        # The first block is the mean token.
        return pooled[:, : sizes["mean"]] if sizes else pooled


class Viewed(Classifier):
    """A classifier that averages the logits of two views of each image.

    `backbone` and `classify` process a single view.

    Args:
        model: The model, in evaluation mode.
        views: "flip" adds the mirror image. "scales" adds the image resized to `side`. The input
            of "scales" has the size `larger(side)`.
        side: Input size of the model in pixels per side.
    """

    def __init__(self, model: Classifier, views: str, side: int) -> None:
        super().__init__(model.backbone, model.head)
        self.views = views
        self.side = side

    @staticmethod
    def larger(side: int) -> int:
        """Return the input size of "scales": 1.25 times `side`, rounded up to a multiple of 32."""
        return 32 * math.ceil(1.25 * side / 32)

    def forward(
        self, images: Tensor, word_vectors: Tensor | None = None, *, attention: bool = False
    ) -> Tensor:
        """Map images to logits; see `Classifier`. `attention` raises ValueError."""
        if attention:
            raise ValueError("attention is not supported for several views")
        if self.views == "flip":
            other = images.flip(3)
        else:
            pixels = images if images.is_floating_point() else images / 255
            size = (self.side, self.side)
            other = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        logits = [super().forward(images, word_vectors), super().forward(other, word_vectors)]
        return torch.stack(logits).mean(0)


def multiply_accumulates(
    model: nn.Module, image_size: int, word_vectors: tuple[int, ...] | None = None
) -> float:
    """Count the multiply-accumulates per image in evaluation mode, on fake tensors.

    Convolutions, linear layers and attention are counted, as in the GFLOPs of the paper. Work that
    is independent of the image is included.

    Args:
        model: The model, on any device, including meta.
        image_size: Pixels per side.
        word_vectors: Shape [K, D_w] of the word vectors of a zero-shot head, else None.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Fake tensors report the CPU as device. The heads disable autocast, which has no "meta".
        # The counter of torch 2.11 misses fused attention on the CPU, so use the math backend.
        backend = sdpa_kernel(SDPBackend.MATH)
        with FakeTensorMode(), torch.no_grad(), backend, FlopCounterMode(display=False) as counter:
            state = {}
            for name, value in chain(model.named_parameters(), model.named_buffers()):
                state[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu")

            shapes: list[tuple[int, ...]] = [(1, 3, image_size, image_size)]
            if word_vectors:
                shapes.append(word_vectors)
            inputs = tuple(torch.empty(shape, device="cpu") for shape in shapes)
            functional_call(model, state, inputs)
    finally:
        # Restore each module, because frozen parts stay in evaluation mode.
        for module in training:
            module.training = True

    # torch counts a multiply-accumulate as two operations.
    return counter.get_total_flops() / 2


def work_per_image(model: nn.Module, image_size: int, word_vectors: Tensor | None) -> float | None:
    """Return the multiply-accumulates per image, or None if the model fails on fake tensors."""
    shape = None if word_vectors is None else word_vectors.shape
    try:
        return multiply_accumulates(model, image_size, shape)
    except Exception:  # modules of plugins may raise any error
        return None


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of trainable parameters and of all parameters of a model.

    The second number includes the frozen queries of a head, which are a buffer.
    """
    trainable = sum(value.numel() for value in model.parameters() if value.requires_grad)
    total = sum(value.numel() for value in model.parameters())
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "queries":
            total += buffer.numel()
    return trainable, total
