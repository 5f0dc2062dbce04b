"""Show where a model looked: heat maps per class, and pictures of them."""

import hashlib
import io
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mldec.errors import ConfigError, visible
from mldec.heads.gap import GAP
from mldec.heads.layers import Attention, DecoderLayer
from mldec.heads.words import WordGAP
from mldec.model import Classifier
from mldec.runtime.results import write_file

Wanted = Sequence[Sequence[int]]  # classes of each image
# model, tokens [B, N, C], classes, word queries -> relevance [C_i, N] of each image
Relevance = Callable[[Classifier, Tensor, Wanted, Tensor | None], list[Tensor]]

ATTENTION = "attention of the query of the class, in the last decoder layer, averaged over heads"
THROUGH_ATTENTION = (
    "gradient of the logit of the class through the attention (Chefer et al. 2021), because a "
    "query serves several classes"
)
ACTIVATION = "class activation map: the weights of the class times the features"
TIMES_TOKENS = "gradient of the logit of the class times the features"


def choose(model: Classifier, tokens: Tensor, queries: Tensor | None) -> tuple[str, Relevance]:
    """Choose the method that fits the head of a model, as it answers to some tokens [1, N, C]."""
    if model.gives_attention:
        with torch.no_grad():
            logits, weights = model.classify(tokens, queries, attention=True)
        if weights.shape[1] == logits.shape[1]:
            return ATTENTION, attention

        if _cross_attentions(model):
            return THROUGH_ATTENTION, through_attention

    # For global average pooling both are the same.
    is_pooled = isinstance(model.head, GAP | WordGAP)
    return ACTIVATION if is_pooled else TIMES_TOKENS, times_tokens


@torch.no_grad()
def attention(
    model: Classifier, tokens: Tensor, classes: Wanted, queries: Tensor | None = None
) -> list[Tensor]:
    """Return the attention of the query of each class; the sum over the tokens is 1.

    For decoder heads with one query per class. The arguments are those of `times_tokens`.
    """
    _, weights = model.classify(tokens, queries, attention=True)
    return [own[list(wanted)] for own, wanted in zip(weights, classes, strict=True)]


@torch.no_grad()
def through_attention(
    model: Classifier, tokens: Tensor, classes: Wanted, queries: Tensor | None = None
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

    with ExitStack() as stack:
        for layer in layers:
            hook = layer.register_forward_hook(note)
            stack.callback(hook.remove)
        logits, _ = _differentiable(model, tokens, queries)

    weights = [layer.weights(*calls[layer][0][:2]) for layer in layers]
    attended = [calls[layer][1] for layer in layers]
    relevance = _zeros(tokens, classes)
    for rank, (images, gradients) in enumerate(_gradients(model, logits, attended, classes)):
        summed = torch.zeros(tokens.shape[:2], device=tokens.device)
        for layer, weight, gradient in zip(layers, weights, gradients, strict=True):
            value = calls[layer][0][2]
            product = weight * layer.weight_gradients(value, gradient)
            summed += product.relu().mean(1).sum(1)
        for image in images:
            relevance[image][rank] = summed[image]
    return relevance


@torch.no_grad()
def times_tokens(
    model: Classifier, tokens: Tensor, classes: Wanted, queries: Tensor | None = None
) -> list[Tensor]:
    """Return N times the gradient of the logits with respect to the tokens, times the tokens.

    For global average pooling this is the class activation map (Zhou et al. 2016,
    arXiv 1512.04150): the mean over the tokens is the logit without its bias. It can be negative.
    The relevance of each image is float32 [its classes, N].
    """
    logits, inputs = _differentiable(model, tokens, queries)

    relevance = _zeros(tokens, classes)
    for rank, (images, [gradient]) in enumerate(_gradients(model, logits, [inputs], classes)):
        products = tokens.shape[1] * (gradient * inputs).float().sum(-1)
        for image in images:
            relevance[image][rank] = products[image]
    return relevance


def _cross_attentions(model: Classifier) -> list[Attention]:
    """Return the cross-attention of each decoder layer of the head."""
    return [layer.cross_attn for layer in model.head.modules() if isinstance(layer, DecoderLayer)]


def _differentiable(
    model: Classifier, tokens: Tensor, queries: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits [B, K] with a graph, and the tokens [B, N, C] at its root."""
    inputs = tokens.detach().requires_grad_()
    with torch.enable_grad():
        return model.classify(inputs, queries), inputs


def _gradients(
    model: Classifier, logits: Tensor, inputs: list[Tensor], classes: Wanted
) -> Iterator[tuple[list[int], tuple[Tensor, ...]]]:
    """Yield gradients of the first class of every image, then of the second, and so on.

    The images of a batch do not depend on each other: one backward pass serves all of them. With
    the images that have such a class, there is the gradient of its logit per input, [B, ...].
    """
    if not logits.requires_grad:
        raise ConfigError(
            f"head {type(model.head).__name__}: its logits have no gradient, which heat maps of "
            f"this head are made of"
        )

    for rank in range(max(map(len, classes), default=0)):
        images = [image for image, wanted in enumerate(classes) if rank < len(wanted)]
        chosen = torch.zeros_like(logits)
        chosen[images, [classes[image][rank] for image in images]] = 1
        yield images, torch.autograd.grad(logits, inputs, chosen, retain_graph=True)


def _zeros(tokens: Tensor, classes: Wanted) -> list[Tensor]:
    """Return zeros [C, N] for each image and its C classes."""
    return [tokens.new_zeros(len(own), tokens.shape[1], dtype=torch.float32) for own in classes]


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

    def maps(self, images: Tensor, classes: Wanted) -> list[Tensor]:
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
    """Return the number of tokens per row, and per column."""
    side = math.isqrt(num_tokens)
    if side == 1 or side * side != num_tokens:
        raise ConfigError(
            f"the backbone gives {num_tokens} tokens for an image: heat maps need a square of them"
        )
    return side


def _shift(image: Tensor, tokens: Tensor, side: int) -> tuple[float, float]:
    """Return how far tokens [1, N, C] look to the right of and below the centres of their cells.

    Two fractions of the side of the image [1, 3, S, S]; zeros if the tokens have no gradient.
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
QUALITY = 92  # of JPEG

PAPER, INK, PALE = (255, 255, 255), (20, 20, 30), (95, 95, 110)

# Nine evenly spaced colours of the ramp "inferno" of matplotlib (CC0), dark to light.
INFERNO = "000004 1f0c48 550f6d 88226a ba3655 e35933 f98c0a f9c932 fcffa4"
RAMP = np.frombuffer(bytes.fromhex(INFERNO), np.uint8).reshape(9, 3)
DIMMED = 0.6  # brightness of the grey image below the colours
OPAQUE = 0.7  # of the colours at the maximum of a map; 0 where it is 0

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Finding:
    """A class that the model named, and where it looked."""

    name: str
    score: float  # from 0 to 1
    heat: np.ndarray  # float [h, w], >= 0, over the whole image that is drawn


class Typeface:
    """A font in several sizes, and what it can write."""

    def __init__(self, file: str | None = None) -> None:
        self._file = file
        self.at = cache(self._at)
        self._lacks = cache(self._is_missing)
        try:
            self.at(NAME_SIZE)
        except OSError as error:
            raise ConfigError(
                f"--font {file}: not a font that can be read ({error}); name a .ttf or .otf file"
            ) from error

    def _at(self, size: int) -> Font:
        if self._file is None:
            return ImageFont.load_default(size)
        return ImageFont.truetype(self._file, size)

    def _is_missing(self, letter: str) -> bool:
        """Tell whether the font draws the same for this letter as for one that cannot exist."""
        font = self.at(NAME_SIZE)
        return bytes(font.getmask(letter)) == bytes(font.getmask("\uffff"))

    def writable(self, text: str) -> str:
        """Replace letters that the font lacks: by the letter without its accent, else by `?`."""
        letters = []
        for letter in unicodedata.normalize("NFC", visible(text)):
            plain = unicodedata.normalize("NFKD", letter)[0]
            letters.append(next((one for one in (letter, plain) if not self._lacks(one)), "?"))
        return "".join(letters)

    def fitted(self, text: str, size: int, width: float) -> str:
        """Return a text that this font can write within a width in pixels, shortened if need be."""
        whole, font = self.writable(text), self.at(size)
        cuts = (f"{whole[:length]}..." for length in range(len(whole), 0, -1))
        return next((cut for cut in (whole, *cuts) if font.getlength(cut) <= width), "...")

    def lines(self, text: str, size: int, width: float) -> list[str]:
        """Break a text into lines of at most a width in pixels."""
        lines = [""]
        for word in self.writable(text).split():
            longer = f"{lines[-1]} {word}".strip()
            if self.at(size).getlength(longer) > width and lines[-1]:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines


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
    image: Image.Image, title: str, findings: Sequence[Finding], method: str, typeface: Typeface
) -> Image.Image:
    """Draw an image, and beside it a panel per class with the heat map over it."""
    scale = PANEL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.LANCZOS)

    cell = max(image.width, NARROWEST)
    caption = round(1.35 * NAME_SIZE + 1.5 * SCORE_SIZE)
    panel_height = image.height + caption
    count = 1 + len(findings)
    rows = math.ceil(count / COLUMNS)
    columns = math.ceil(count / rows)  # five panels are three and two, not four and one
    width = SPACING + columns * (cell + SPACING)

    note = (
        f"Bright: where the model looked; each map is scaled to its own maximum. "
        f"{method[0].upper()}{method[1:]}."
    )
    notes = typeface.lines(note, NOTE_SIZE, width - 2 * SPACING) if findings else []
    line = round(1.4 * NOTE_SIZE)
    height = SPACING + rows * (panel_height + SPACING) + len(notes) * line + SPACING * bool(notes)

    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    panels = [(image, title, "" if findings else "no class named")]
    panels += [(heated(image, one.heat), one.name, f"{one.score:.3f}") for one in findings]

    for number, (panel, name, below) in enumerate(panels):
        row, column = divmod(number, columns)
        left = SPACING + column * (cell + SPACING)
        top = SPACING + row * (panel_height + SPACING)
        sheet.paste(panel, (left, top))

        baseline = top + image.height + round(0.3 * NAME_SIZE)
        text = typeface.fitted(name, NAME_SIZE, cell)
        pen.text((left, baseline), text, INK, typeface.at(NAME_SIZE))
        baseline += round(1.3 * NAME_SIZE)
        pen.text((left, baseline), below, PALE, typeface.at(SCORE_SIZE))

    for number, text in enumerate(notes):
        top = height - SPACING - (len(notes) - number) * line
        pen.text((SPACING, top), text, PALE, typeface.at(NOTE_SIZE))
    return sheet


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


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture as a JPEG file, completely or not at all."""
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=QUALITY, subsampling=0)
    write_file(path, content.getvalue())
