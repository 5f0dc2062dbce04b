"""Heat maps: where a model looked for a class, over the image as the model saw it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mldec.errors import ConfigError
from mldec.explain.relevance import choose
from mldec.model import Classifier

MAP_SIZE = 32  # pixels per side of a heat map, whatever the number of tokens

# Each token is drawn as a Gaussian of this standard deviation, in distances between tokens: the
# maximum can then lie between two of them. On digits and on photos it points better than the
# maximum of the tokens.
BLUR = 0.6


class Explainer:
    """Make heat maps of a model: how much each part of an image mattered for a class.

    A token of a convolutional network does not look at the centre of its cell: strides, padding and
    training move it, by up to a third of a cell in a small ResNet. The shift, one for all tokens,
    is measured once: the centre of the gradient of the middle tokens with respect to the pixels of
    an image of noise, against the centre of the image.

    Attributes:
        method: how the maps are made, a phrase for users.

    Args:
        model: in evaluation mode; the tokens of its backbone form a square map.
        image_size: side S of its input in pixels.
        queries: word vectors [K, D_w] for a zero-shot model.

    Raises:
        ConfigError: if the number of tokens is not a square number from 4 on.
    """

    def __init__(self, model: Classifier, image_size: int, queries: Tensor | None = None) -> None:
        device = next(model.parameters()).device
        self.model = model
        self.queries = None if queries is None else queries.to(device)

        # Computed on the CPU, so that all devices get the same noise.
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(1, 3, image_size, image_size, generator=generator).to(device)
        with torch.enable_grad():
            noise.requires_grad_()
            tokens = model.backbone(noise)

        self._side = _side(tokens.shape[1])
        shift = _shift(noise, tokens, self._side)
        self._placing = [_placing(self._side, part).to(device) for part in shift]
        self.method, self._relevance = choose(model, tokens.detach(), self.queries)

    def maps(self, images: Tensor, classes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return where the model looked for some classes.

        Args:
            images: the input of the model, [B, 3, S, S].
            classes: indices of the classes of interest, per image.

        Returns:
            Per image float32 [C, h, w] on the CPU for its C classes, >= 0, with h = w = `MAP_SIZE`.
            A map covers the whole input; only ratios within a map have a meaning. A map of zeros
            says that nothing in the image spoke for the class.

        Raises:
            ConfigError: if the logits of the head have no gradient and the method needs one.
        """
        with torch.no_grad():
            tokens = self.model.backbone(images)

        relevance = self._relevance(self.model, tokens, classes, self.queries)
        return [self.place(per_class) for per_class in relevance]

    def place(self, relevance: Tensor) -> Tensor:
        """Draw the relevance of tokens [C, N] where they look: a map per row, see `maps`."""
        across, down = self._placing
        grid = relevance.float().relu().unflatten(1, (self._side, self._side))
        return (down @ grid @ across.T).cpu()


def _side(num_tokens: int) -> int:
    """Return the number of tokens per row, and per column.

    Raises:
        ConfigError: if the tokens do not form a square, or there is one for the whole image.
    """
    if num_tokens == 1:
        raise ConfigError(
            "the backbone gives one token for the whole image: heat maps need tokens of its parts"
        )

    side = math.isqrt(num_tokens)
    if side * side != num_tokens:
        raise ConfigError(
            f"the backbone gives {num_tokens} tokens, which form no square map: heat maps need one"
        )
    return side


def _shift(image: Tensor, tokens: Tensor, side: int) -> tuple[float, float]:
    """Return how far tokens look to the right of and below the centres of their cells.

    Args:
        image: [1, 3, S, S].
        tokens: of the image, [1, N, C].
        side: of the square map of tokens.

    Returns:
        Two fractions of the side of the image; zeros if the tokens have no gradient.
    """
    if not tokens.requires_grad:
        return 0.0, 0.0

    # One token in the middle if the side is odd, else four.
    middle = slice((side - 1) // 2, side // 2 + 1)
    energy = tokens.unflatten(1, (side, side))[:, middle, middle].square().sum()
    [gradient] = torch.autograd.grad(energy, image)

    weight = gradient.abs().sum((0, 1))
    total = weight.sum()
    if not total > 0:
        return 0.0, 0.0
    centres = (torch.arange(len(weight), device=weight.device) + 0.5) / len(weight) - 0.5
    return float(weight.sum(0) @ centres / total), float(weight.sum(1) @ centres / total)


def _placing(side: int, shift: float) -> Tensor:
    """Return the matrix [MAP_SIZE, side] that draws each token of a row as a Gaussian."""
    pixels = (torch.arange(MAP_SIZE) + 0.5) / MAP_SIZE
    tokens = (torch.arange(side) + 0.5) / side + shift
    distance = (pixels[:, None] - tokens) * side / BLUR
    return torch.exp(-distance.square() / 2)
