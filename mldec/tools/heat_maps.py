"""Heat maps per class, and pictures of images with them."""

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
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor, nn

from mldec.errors import ConfigError, naming_errors, visible
from mldec.heads.gap import GAP
from mldec.heads.layers import Attention, DecoderLayer
from mldec.heads.words import WordGAP
from mldec.model import Classifier

Wanted = Sequence[Sequence[int]]  # classes of each image
# Name and score of a class, and its heat map [h, w] >= 0 over the image.
Finding = tuple[tuple[str, str], np.ndarray]
# Maps model, tokens [B, N, C], classes and word vectors to the relevance [C_i, N] of each image.
Relevance = Callable[[Classifier, Tensor, Wanted, Tensor | None], list[Tensor]]

ATTENTION = "attention of the query of the class, in the last decoder layer, averaged over heads"
THROUGH_ATTENTION = (
    "gradient of the logit of the class through the attention (Chefer et al. 2021), because a "
    "query serves several classes"
)
ACTIVATION = "class activation map: the weights of the class times the features"
TIMES_TOKENS = "gradient of the logit of the class times the features"


def choose(model: Classifier, tokens: Tensor, word_vectors: Tensor | None) -> tuple[str, Relevance]:
    """Choose a method, and return its description and function; tokens are [1, N, C]."""
    if model.gives_attention:
        with torch.no_grad():
            logits, weights = model.classify(tokens, word_vectors, attention=True)
        if weights.shape[1] == logits.shape[1]:
            return ATTENTION, attention
        if _cross_attentions(model):
            return THROUGH_ATTENTION, through_attention

    # Both are equal for global average pooling.
    is_pooled = isinstance(model.head, GAP | WordGAP)
    return ACTIVATION if is_pooled else TIMES_TOKENS, times_tokens


@torch.no_grad()
def attention(
    model: Classifier, tokens: Tensor, classes: Wanted, word_vectors: Tensor | None = None
) -> list[Tensor]:
    """Return the attention weights of the query of each class; their sum over the tokens is 1."""
    _, weights = model.classify(tokens, word_vectors, attention=True)
    return [queries[list(wanted)] for queries, wanted in zip(weights, classes, strict=True)]


@torch.no_grad()
def through_attention(
    model: Classifier, tokens: Tensor, classes: Wanted, word_vectors: Tensor | None = None
) -> list[Tensor]:
    """Return the gradient of the logits through the cross-attention.

    The relevance of a token is ReLU(weight * gradient), averaged over the heads of a layer, and
    summed over queries and layers. Queries of other classes have no gradient. Unlike in the paper,
    self-attention among the queries is ignored. ML-Decoder has none.

    Source: Chefer et al. 2021, "Generic Attention-model Explainability", arXiv 2103.15679,
    equations 5 and 10.
    """
    layers = _cross_attentions(model)
    inputs: dict[Attention, tuple[Tensor, Tensor, Tensor]] = {}  # query, key and value
    outputs: dict[Attention, Tensor] = {}

    def record(layer: Any, layer_inputs: Any, layer_outputs: Any) -> None:
        inputs[layer] = layer_inputs
        outputs[layer] = layer_outputs[0]

    with torch.enable_grad(), ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(record).remove)
        logits = model.classify(tokens.detach().requires_grad_(), word_vectors)
    weights = [layer.weights(*inputs[layer][:2]) for layer in layers]

    def relevance(gradients: Sequence[Tensor]) -> Tensor:
        summed = torch.zeros(tokens.shape[:2], device=tokens.device)
        for layer, weight, gradient in zip(layers, weights, gradients, strict=True):
            product = weight * layer.weight_gradients(inputs[layer][2], gradient)
            summed += product.relu().mean(1).sum(1)
        return summed

    attended = [outputs[layer] for layer in layers]
    return _per_class(model, tokens, logits, attended, classes, relevance)


@torch.no_grad()
def times_tokens(
    model: Classifier, tokens: Tensor, classes: Wanted, word_vectors: Tensor | None = None
) -> list[Tensor]:
    """Return N times the gradient of the logits with respect to the tokens, times the tokens.

    For global average pooling this is the class activation map (Zhou et al. 2016,
    arXiv 1512.04150): its mean over the tokens [B, N, C] is the logit without bias. The relevance
    of each image is float32 [its classes, N] and can be negative.
    """
    inputs = tokens.detach().requires_grad_()
    with torch.enable_grad():
        logits = model.classify(inputs, word_vectors)

    def relevance(gradients: Sequence[Tensor]) -> Tensor:
        return tokens.shape[1] * (gradients[0] * inputs).float().sum(-1)

    return _per_class(model, tokens, logits, [inputs], classes, relevance)


def _cross_attentions(model: Classifier) -> list[Attention]:
    return [layer.cross_attn for layer in model.head.modules() if isinstance(layer, DecoderLayer)]


def _per_class(
    model: Classifier,
    tokens: Tensor,
    logits: Tensor,
    inputs: Sequence[Tensor],
    classes: Wanted,
    relevance: Callable[[Sequence[Tensor]], Tensor],
) -> list[Tensor]:
    """Return `relevance` of the gradient of each requested logit, one tensor per image."""
    if not logits.requires_grad:
        raise ConfigError(f"head {type(model.head).__name__}: heat maps need logits with gradients")

    # One backward pass computes the gradients for one class of each image, because the images of a
    # batch are independent.
    count = tokens.shape[1]
    results = [tokens.new_zeros(len(own), count, dtype=torch.float32) for own in classes]
    for rank in range(max(map(len, classes), default=0)):
        mask = torch.zeros_like(logits)
        for image, wanted in enumerate(classes):
            if rank < len(wanted):
                mask[image, wanted[rank]] = 1
        values = relevance(torch.autograd.grad(logits, inputs, mask, retain_graph=True))
        for image, wanted in enumerate(classes):
            if rank < len(wanted):
                results[image][rank] = values[image]
    return results


MAP_SIZE = 32  # pixels per side of a heat map

# Standard deviation of the Gaussian of each token, in distances between tokens. The maximum can
# be between two tokens, which locates objects better.
BLUR = 0.6


class _Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


class Explainer:
    """Heat maps of a model: the relevance of each part of an image for a class.

    Tokens of convolutional networks are not centered on their cells: the shift in a small ResNet is
    up to a third of a cell. It is measured and corrected. `method` describes the maps for users.
    The input of the model has `image_size` pixels per side, word vectors are [K, D].
    """

    def __init__(
        self, model: Classifier, image_size: int, word_vectors: Tensor | None = None
    ) -> None:
        device = next(model.parameters()).device
        if getattr(model.backbone, "block_sizes", None):
            # Blocks of features have no positions, so move the pooling into the head.
            backbone: Any = model.backbone
            head = model.head
            pooled = _Call(lambda maps, word_vectors: head(backbone.pool(maps), word_vectors))
            model = Classifier(_Call(backbone.maps), pooled)
        self.model = model
        self.word_vectors = None if word_vectors is None else word_vectors.to(device)

        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(1, 3, image_size, image_size, generator=generator).to(device)
        with torch.enable_grad():
            noise.requires_grad_()
            tokens = model.backbone(noise)

        count = tokens.shape[1]
        self._side = math.isqrt(count)
        if self._side == 1 or self._side**2 != count:
            raise ConfigError(f"heat maps need a square grid; the backbone has {count} tokens")
        across, down = _shift(noise, tokens, self._side)
        self._across = _interpolation(self._side, across).to(device)
        self._down = _interpolation(self._side, down).to(device)
        self.method, self._relevance = choose(model, tokens.detach(), self.word_vectors)

    def maps(self, images: Tensor, classes: Wanted) -> list[Tensor]:
        """Return float32 [its classes, MAP_SIZE, MAP_SIZE] >= 0 on the CPU for each image.

        Only ratios within a map are meaningful. An all-zero map means no positive evidence.
        `images` are [B, 3, H, W], or their tokens [B, N, C].
        """
        tokens = images
        if images.ndim == 4:
            with torch.no_grad():
                tokens = self.model.backbone(images)

        relevance = self._relevance(self.model, tokens, classes, self.word_vectors)
        maps = []
        for values in relevance:
            grid = values.relu().unflatten(1, (self._side, self._side)).float()
            maps.append((self._down @ grid @ self._across.T).cpu())
        return maps


def over_image(
    heat: np.ndarray, image_size: tuple[int, int], part: tuple[float, float, float, float]
) -> np.ndarray:
    """Scale a heat map [h, w] >= 0 of a part of an image to [0, 1], and to the image [H, W].

    `image_size` is (W, H), and `part` left, top, right and bottom in pixels. The rest is 0.
    """
    left, top, right, bottom = map(round, part)
    levels = Image.fromarray(heat.astype(np.float32))
    levels = levels.resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    sheet = Image.new("F", image_size)
    sheet.paste(levels, (left, top))
    return np.asarray(sheet) / max(levels.getextrema()[1], 1e-12)


def _shift(image: Tensor, tokens: Tensor, side: int) -> tuple[float, float]:
    """Return the horizontal and vertical shift of tokens [1, N, C], as fractions of the image."""
    # The shift is the center of the gradient of the middle tokens with respect to a noise image.
    if not tokens.requires_grad:
        return 0.0, 0.0

    # One token if the side is odd, else four.
    middle = slice((side - 1) // 2, side // 2 + 1)
    energy = tokens.unflatten(1, (side, side))[:, middle, middle].square().sum()
    [gradient] = torch.autograd.grad(energy, image)

    weight = gradient.abs().sum((0, 1))
    total = weight.sum()
    if not total > 0:
        return 0.0, 0.0
    centers = (torch.arange(len(weight), device=weight.device) + 0.5) / len(weight) - 0.5
    across = weight.sum(0) @ centers / total
    down = weight.sum(1) @ centers / total
    return float(across), float(down)


def _interpolation(side: int, shift: float) -> Tensor:
    # A matrix [MAP_SIZE, side] that interpolates a row of tokens with Gaussians.
    pixels = (torch.arange(MAP_SIZE) + 0.5) / MAP_SIZE
    tokens = (torch.arange(side) + 0.5) / side + shift
    distance = (pixels[:, None] - tokens) * side / BLUR
    return torch.exp(-distance.square() / 2)


# Sizes in pixels.
PANEL = 280  # longer side of an image
MIN_WIDTH = 150  # of a panel, for its caption
SPACING = 18
COLUMNS = 4
NAME_SIZE = 19
SCORE_SIZE = 16
NOTE_SIZE = 14

WHITE = (255, 255, 255)
DARK = (20, 20, 30)
GRAY = (95, 95, 110)

COLORS = ("#000004", "#fcffa4", "#ba3655")  # lowest, highest and middle
DIMMED = 0.6  # brightness of the gray image below the colors
OPAQUE = 0.7  # opacity at the maximum of a map; 0 where the map is 0

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def fonts(file: str | None = None) -> list[Font]:
    """Return the fonts of names, scores and notes, from a file or Pillow's default."""
    sizes = (NAME_SIZE, SCORE_SIZE, NOTE_SIZE)
    if file is None:
        return [ImageFont.load_default(size) for size in sizes]
    with naming_errors(f"--font {file}", ConfigError, remedy="name a .ttf or .otf file"):
        return [ImageFont.truetype(file, size) for size in sizes]


def missing_glyphs(text: str, font: Font) -> list[str]:
    """Return the distinct characters of a text that a font draws as boxes."""
    box = bytes(font.getmask("\U0010ffff"))  # a code point that is never assigned
    letters = dict.fromkeys("".join(visible(text).split()))
    return [letter for letter in letters if bytes(font.getmask(letter)) == box]


def file_name(path: Path) -> str:
    """Return the file name of the picture of an image: its name and a hash of its whole path."""
    digest = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:8]
    stem = re.sub(r"[^\w .-]", "_", path.stem)
    return f"{stem[:50]}-{digest}.jpg"


def draw(
    image: Image.Image, title: str, findings: Sequence[Finding], method: str, fonts: Sequence[Font]
) -> Image.Image:
    """Draw an image, and next to it a panel per class with the heat map over the image."""
    scale = PANEL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.LANCZOS)
    panels = [_panel(image, title, "" if findings else "no class named", fonts)]
    panels += [_panel(heated(image, heat), *texts, fonts) for texts, heat in findings]

    rows = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / rows)  # five panels are three and two, not four and one
    across = panels[0].width + SPACING
    down = panels[0].height + SPACING
    width = SPACING + columns * across
    note = (
        f"Bright: where the model looked; each map is scaled to its own maximum. "
        f"{method[0].upper()}{method[1:]}."
    )
    max_letters = int((width - 2 * SPACING) / fonts[2].getlength("n"))
    notes = textwrap.wrap(note, max_letters) if findings else []
    line = round(1.4 * NOTE_SIZE)
    height = SPACING + rows * down + len(notes) * line + SPACING * bool(notes)

    sheet = Image.new("RGB", (width, height), WHITE)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        sheet.paste(panel, (SPACING + column * across, SPACING + row * down))
    for number, text in enumerate(notes):
        top = height - SPACING - (len(notes) - number) * line
        ImageDraw.Draw(sheet).text((SPACING, top), text, GRAY, fonts[2])
    return sheet


def _panel(picture: Image.Image, name: str, score: str, fonts: Sequence[Font]) -> Image.Image:
    caption = round(1.35 * NAME_SIZE + 1.5 * SCORE_SIZE)
    size = (max(picture.width, MIN_WIDTH), picture.height + caption)
    panel = Image.new("RGB", size, WHITE)
    panel.paste(picture)
    top = picture.height + round(0.3 * NAME_SIZE)
    pen = ImageDraw.Draw(panel)
    pen.text((0, top), visible(name), DARK, fonts[0])
    pen.text((0, top + round(1.3 * NAME_SIZE)), score, GRAY, fonts[1])
    return panel


def heated(image: Image.Image, heat: np.ndarray) -> Image.Image:
    """Return a gray copy of an image with the colors of a heat map [h, w] >= 0 over it."""
    levels = Image.fromarray((255 * heat / max(heat.max(), 1e-12)).astype(np.uint8))
    levels = levels.resize(image.size, Image.Resampling.BICUBIC)
    gray = image.convert("L").point(lambda value: DIMMED * value).convert("RGB")
    opacity = levels.point(lambda value: OPAQUE * value)
    return Image.composite(ImageOps.colorize(levels, *COLORS), gray, opacity)
