"""Show where a model looked: heat maps per class, and pictures of them."""

import hashlib
import math
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mldec.errors import ConfigError, naming_errors, visible
from mldec.heads.gap import GAP
from mldec.heads.layers import Attention, DecoderLayer
from mldec.heads.words import WordGAP
from mldec.model import Classifier

Wanted = Sequence[Sequence[int]]  # classes of each image
# The texts below the picture of a class, and where the model looked: float [h, w], >= 0, over the
# whole image that is drawn.
Finding = tuple[tuple[str, str], np.ndarray]
# model, tokens [B, N, C], classes, word queries -> relevance [C_i, N] of each image
Relevance = Callable[[Classifier, Tensor, Wanted, Tensor | None], list[Tensor]]

ATTENTION = "attention of the query of the class, in the last decoder layer, averaged over heads"
THROUGH_ATTENTION = (
    "gradient of the logit of the class through the attention (Chefer et al. 2021), because a "
    "query serves several classes"
)
ACTIVATION = "class activation map: the weights of the class times the features"
TIMES_TOKENS = "gradient of the logit of the class times the features"


def choose(model: Classifier, tokens: Tensor, word_vectors: Tensor | None) -> tuple[str, Relevance]:
    """Choose the method that fits the head of a model, as it answers to some tokens [1, N, C]."""
    if model.gives_attention:
        with torch.no_grad():
            logits, weights = model.classify(tokens, word_vectors, attention=True)
        if weights.shape[1] == logits.shape[1]:
            return ATTENTION, attention

        if _cross_attentions(model):
            return THROUGH_ATTENTION, through_attention

    # For global average pooling both are the same.
    is_pooled = isinstance(model.head, GAP | WordGAP)
    return ACTIVATION if is_pooled else TIMES_TOKENS, times_tokens


@torch.no_grad()
def attention(
    model: Classifier, tokens: Tensor, classes: Wanted, word_vectors: Tensor | None = None
) -> list[Tensor]:
    """Return the attention of the query of each class; the sum over the tokens is 1.

    For decoder heads with one query per class. The arguments are those of `times_tokens`.
    """
    _, weights = model.classify(tokens, word_vectors, attention=True)
    return [own[list(wanted)] for own, wanted in zip(weights, classes, strict=True)]


@torch.no_grad()
def through_attention(
    model: Classifier, tokens: Tensor, classes: Wanted, word_vectors: Tensor | None = None
) -> list[Tensor]:
    """Return the gradient of the logits through the cross-attention.

    The relevance of a token is ReLU(weight * gradient), averaged over the heads of a layer, and
    summed over queries and layers. Queries that do not serve the class have no gradient. Without
    self-attention among the queries, as in ML-Decoder, this is the rule of the paper for any number
    of layers. Self-attention, which the paper multiplies in, is left out.

    Source: Chefer et al. 2021, "Generic Attention-model Explainability", arXiv 2103.15679,
    equations 5 and 10. The arguments are those of `times_tokens`.
    """
    layers = _cross_attentions(model)
    calls: dict[Attention, tuple[tuple[Tensor, Tensor, Tensor], Tensor]] = {}

    def note(layer: Any, inputs: Any, outputs: Any) -> None:
        calls[layer] = inputs, outputs[0]

    with torch.enable_grad(), ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(note).remove)
        logits = model.classify(tokens.detach().requires_grad_(), word_vectors)
    weights = [layer.weights(*calls[layer][0][:2]) for layer in layers]

    def relevance(gradients: Sequence[Tensor]) -> Tensor:
        summed = torch.zeros(tokens.shape[:2], device=tokens.device)
        for layer, weight, gradient in zip(layers, weights, gradients, strict=True):
            value = calls[layer][0][2]
            product = weight * layer.weight_gradients(value, gradient)
            summed += product.relu().mean(1).sum(1)
        return summed

    return _per_class(
        model, tokens, logits, [calls[layer][1] for layer in layers], classes, relevance
    )


@torch.no_grad()
def times_tokens(
    model: Classifier, tokens: Tensor, classes: Wanted, word_vectors: Tensor | None = None
) -> list[Tensor]:
    """Return N times the gradient of the logits with respect to the tokens, times the tokens.

    For global average pooling this is the class activation map (Zhou et al. 2016,
    arXiv 1512.04150): the mean over the tokens is the logit without its bias. It can be negative.
    The relevance of each image is float32 [its classes, N].
    """
    inputs = tokens.detach().requires_grad_()
    with torch.enable_grad():
        logits = model.classify(inputs, word_vectors)

    def relevance(gradients: Sequence[Tensor]) -> Tensor:
        return tokens.shape[1] * (gradients[0] * inputs).float().sum(-1)

    return _per_class(model, tokens, logits, [inputs], classes, relevance)


def _cross_attentions(model: Classifier) -> list[Attention]:
    """Return the cross-attention of each decoder layer of the head."""
    return [layer.cross_attn for layer in model.head.modules() if isinstance(layer, DecoderLayer)]


def _per_class(
    model: Classifier,
    tokens: Tensor,
    logits: Tensor,
    inputs: Sequence[Tensor],
    classes: Wanted,
    relevance: Callable[[Sequence[Tensor]], Tensor],
) -> list[Tensor]:
    """Return the relevance [B, N] that gradients of a logit give, for the classes of each image.

    The images of a batch do not depend on each other: one backward pass serves the first class of
    all of them, another one the second, and so on.
    """
    if not logits.requires_grad:
        raise ConfigError(
            f"head {type(model.head).__name__}: its logits have no gradient, which heat maps of "
            f"this head are made of"
        )

    count = tokens.shape[1]
    of_images = [tokens.new_zeros(len(own), count, dtype=torch.float32) for own in classes]
    for rank in range(max(map(len, classes), default=0)):
        images = [image for image, wanted in enumerate(classes) if rank < len(wanted)]
        chosen = torch.zeros_like(logits)
        chosen[images, [classes[image][rank] for image in images]] = 1
        values = relevance(torch.autograd.grad(logits, inputs, chosen, retain_graph=True))
        for image in images:
            of_images[image][rank] = values[image]
    return of_images


MAP_SIZE = 32  # pixels per side of a heat map, whatever the number of tokens

# Each token is drawn as a Gaussian of this standard deviation, in distances between tokens: the
# maximum can then lie between two of them. On digits and on photos it points better than the
# maximum of the tokens.
BLUR = 0.6


class Explainer:
    """Make heat maps of a model: how much each part of an image mattered for a class.

    A token of a convolutional network does not look at the centre of its cell: strides, padding and
    training move it, by up to a third of a cell in a small ResNet. This shift is measured once, see
    `_shift`. `method` says how the maps are made, a phrase for users.

    The model is in evaluation mode, with an input of S x S pixels; queries are the word vectors
    [K, D_w] of a zero-shot model. It is a `ConfigError` if the number of tokens is not a square
    number from 4 on.
    """

    def __init__(
        self, model: Classifier, image_size: int, word_vectors: Tensor | None = None
    ) -> None:
        device = next(model.parameters()).device
        self.model = model
        self.word_vectors = None if word_vectors is None else word_vectors.to(device)

        # Computed on the CPU, so that all devices get the same noise.
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(1, 3, image_size, image_size, generator=generator).to(device)
        with torch.enable_grad():
            noise.requires_grad_()
            tokens = model.backbone(noise)

        self._side, count = math.isqrt(tokens.shape[1]), tokens.shape[1]
        if self._side == 1 or self._side**2 != count:
            raise ConfigError(
                f"the backbone gives {count} tokens for an image: heat maps need a square of them"
            )
        shift = _shift(noise, tokens, self._side)
        self._placing = [_placing(self._side, part).to(device) for part in shift]
        self.method, self._relevance = choose(model, tokens.detach(), self.word_vectors)

    def maps(self, images: Tensor, classes: Wanted) -> list[Tensor]:
        """Return where the model looked in images [B, 3, S, S] for some classes of each.

        Per image float32 [C, h, w] on the CPU for its C classes, >= 0, with h = w = `MAP_SIZE`. A
        map covers the whole input; only ratios within a map have a meaning. A map of zeros says
        that nothing in the image spoke for the class. It is a `ConfigError` if the logits of the
        head have no gradient and the method needs one.
        """
        with torch.no_grad():
            tokens = self.model.backbone(images)

        # Each token is drawn where it looks.
        across, down = self._placing
        relevance = self._relevance(self.model, tokens, classes, self.word_vectors)
        grids = [of.relu().unflatten(1, (self._side, self._side)) for of in relevance]
        return [(down @ grid.float() @ across.T).cpu() for grid in grids]


def _shift(image: Tensor, tokens: Tensor, side: int) -> tuple[float, float]:
    """Return how far tokens [1, N, C] look to the right of and below the centres of their cells.

    It is the centre of the gradient of the middle tokens with respect to an image [1, 3, S, S] of
    noise: two fractions of its side; zeros if the tokens have no gradient.
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
    across = weight.sum(0) @ centres / total
    down = weight.sum(1) @ centres / total
    return float(across), float(down)


def _placing(side: int, shift: float) -> Tensor:
    """Return the matrix [MAP_SIZE, side] that draws each token of a row as a Gaussian."""
    pixels = (torch.arange(MAP_SIZE) + 0.5) / MAP_SIZE
    tokens = (torch.arange(side) + 0.5) / side + shift
    distance = (pixels[:, None] - tokens) * side / BLUR
    return torch.exp(-distance.square() / 2)


PANEL = 280  # longer side of an image in pixels
NARROWEST = 150  # width of a panel, for its caption
SPACING = 18
COLUMNS = 4
NAME_SIZE, SCORE_SIZE, NOTE_SIZE = 19, 16, 14

PAPER, INK, PALE = (255, 255, 255), (20, 20, 30), (95, 95, 110)

# Nine evenly spaced colours of the ramp "inferno" of matplotlib (CC0), dark to light.
INFERNO = "000004 1f0c48 550f6d 88226a ba3655 e35933 f98c0a f9c932 fcffa4"
RAMP = np.frombuffer(bytes.fromhex(INFERNO), np.uint8).reshape(9, 3)
DIMMED = 0.6  # brightness of the grey image below the colours
OPAQUE = 0.7  # of the colours at the maximum of a map; 0 where it is 0

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def fonts(file: str | None = None) -> list[Font]:
    """Return the font of a file, or that of Pillow, for names, scores and notes."""
    sizes = (NAME_SIZE, SCORE_SIZE, NOTE_SIZE)
    if file is None:
        return [ImageFont.load_default(size) for size in sizes]
    with naming_errors(f"--font {file}", ConfigError, remedy="name a .ttf or .otf file"):
        return [ImageFont.truetype(file, size) for size in sizes]


def file_name(path: Path) -> str:
    """Return the name of the picture of an image: its own, and a hash of its whole path.

    Two images get two names, whatever their folders, endings, case and bytes. Bytes that are not
    UTF-8, and what Windows has in no name, become `_`; long names are cut.
    """
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:8]
    stem = os.fsencode(path.stem).decode("utf-8", "replace")
    stem = re.sub(r'[<>:"|?*\\\ufffd]', "_", visible(stem))
    return f"{stem[:50]}-{digest}.jpg"


def draw(
    image: Image.Image, title: str, findings: Sequence[Finding], method: str, fonts: Sequence[Font]
) -> Image.Image:
    """Draw an image, and beside it a panel per class with the heat map over it."""
    scale = PANEL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.LANCZOS)
    panels = [_panel(image, title, "" if findings else "no class named", fonts)]
    panels += [_panel(heated(image, heat), *texts, fonts) for texts, heat in findings]

    rows = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / rows)  # five panels are three and two, not four and one
    across, down = panels[0].width + SPACING, panels[0].height + SPACING
    width = SPACING + columns * across
    note = (
        f"Bright: where the model looked; each map is scaled to its own maximum. "
        f"{method[0].upper()}{method[1:]}."
    )
    letters = int((width - 2 * SPACING) / fonts[2].getlength("n"))  # most of them are narrower
    notes = textwrap.wrap(note, letters) if findings else []
    line = round(1.4 * NOTE_SIZE)
    height = SPACING + rows * down + len(notes) * line + SPACING * bool(notes)

    sheet = Image.new("RGB", (width, height), PAPER)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        sheet.paste(panel, (SPACING + column * across, SPACING + row * down))
    for number, text in enumerate(notes):
        top = height - SPACING - (len(notes) - number) * line
        ImageDraw.Draw(sheet).text((SPACING, top), text, PALE, fonts[2])
    return sheet


def _panel(picture: Image.Image, name: str, below: str, fonts: Sequence[Font]) -> Image.Image:
    """Return a picture with two lines of text below it."""
    caption = round(1.35 * NAME_SIZE + 1.5 * SCORE_SIZE)
    size = (max(picture.width, NARROWEST), picture.height + caption)
    panel = Image.new("RGB", size, PAPER)
    panel.paste(picture)
    top = picture.height + round(0.3 * NAME_SIZE)
    pen = ImageDraw.Draw(panel)
    pen.text((0, top), visible(name), INK, fonts[0])
    pen.text((0, top + round(1.3 * NAME_SIZE)), below, PALE, fonts[1])
    return panel


def heated(image: Image.Image, heat: np.ndarray) -> Image.Image:
    """Return a grey copy of an image with the colours of a heat map [h, w] >= 0 over it.

    The ramp ends at the maximum of the map. Zeros leave the grey image.
    """
    most = float(heat.max())
    share = heat / most if most > 0 else heat
    small = Image.fromarray(share.astype(np.float32))
    large = small.resize(image.size, Image.Resampling.BICUBIC)
    share = np.clip(np.asarray(large), 0, 1)

    grey = DIMMED * np.asarray(image.convert("L"), np.float32)[..., None]
    places = np.linspace(0, 1, len(RAMP))
    colours = np.stack([np.interp(share, places, channel) for channel in RAMP.T], -1)
    opacity = OPAQUE * share[..., None]
    return Image.fromarray(((1 - opacity) * grey + opacity * colours).astype(np.uint8))
