"""How much each token of an image matters for the logit of a class.

Shapes: B images, N tokens, C width of the tokens, K classes, G queries of a decoder head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mldec.errors import ConfigError
from mldec.heads.gap import GAP
from mldec.heads.layers import Attention, DecoderLayer
from mldec.heads.words import WordGAP
from mldec.model import Classifier

# model, tokens [B, N, C], classes of each image, word queries -> relevance [C_i, N] of each image
Relevance = Callable[[Classifier, Tensor, Sequence[Sequence[int]], Tensor | None], list[Tensor]]

ATTENTION = "attention of the query of the class, in the last decoder layer, averaged over heads"
THROUGH_ATTENTION = (
    "gradient of the logit of the class through the attention (Chefer et al. 2021), because a "
    "query serves several classes"
)
ACTIVATION = "class activation map: the weights of the class times the features"
TIMES_TOKENS = "gradient of the logit of the class times the features"


def choose(model: Classifier, tokens: Tensor, queries: Tensor | None) -> tuple[str, Relevance]:
    """Choose the method that fits the head of a model.

    Args:
        model: in evaluation mode.
        tokens: of any image, [1, N, C].
        queries: word vectors [K, D_w] for a zero-shot head.

    Returns:
        What the relevance is, a phrase for users, and the function that computes it.
    """
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
    model: Classifier,
    tokens: Tensor,
    classes: Sequence[Sequence[int]],
    queries: Tensor | None = None,
) -> list[Tensor]:
    """Return the attention of the query of each class; the sum over the tokens is 1.

    For decoder heads with one query per class. The arguments are those of `times_tokens`.
    """
    _, weights = model.classify(tokens, queries, attention=True)
    return [own[list(wanted)] for own, wanted in zip(weights, classes, strict=True)]


@torch.no_grad()
def through_attention(
    model: Classifier,
    tokens: Tensor,
    classes: Sequence[Sequence[int]],
    queries: Tensor | None = None,
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
    relevance: list[list[Tensor]] = [[] for _ in classes]
    for images, gradients in _gradients(model, logits, attended, classes):
        summed = torch.zeros(tokens.shape[:2], device=tokens.device)
        for layer, weight, gradient in zip(layers, weights, gradients, strict=True):
            value = calls[layer][0][2]
            product = weight * layer.weight_gradients(value, gradient)
            summed += product.relu().mean(1).sum(1)
        for image in images:
            relevance[image].append(summed[image])
    return [_stacked(rows, tokens) for rows in relevance]


@torch.no_grad()
def times_tokens(
    model: Classifier,
    tokens: Tensor,
    classes: Sequence[Sequence[int]],
    queries: Tensor | None = None,
) -> list[Tensor]:
    """Return N times the gradient of the logits with respect to the tokens, times the tokens.

    For global average pooling this is the class activation map (Zhou et al. 2016,
    arXiv 1512.04150): the mean over the tokens is the logit without its bias. It can be negative.

    Args:
        model: in evaluation mode.
        tokens: of its backbone, [B, N, C].
        classes: of interest, per image.
        queries: word vectors [K, D_w] for a zero-shot head.

    Returns:
        The relevance per image and token, float32 [classes of the image, N].

    Raises:
        ConfigError: if the logits have no gradient.
    """
    logits, inputs = _differentiable(model, tokens, queries)

    relevance: list[list[Tensor]] = [[] for _ in classes]
    for images, [gradient] in _gradients(model, logits, [inputs], classes):
        products = tokens.shape[1] * (gradient * inputs).float().sum(-1)
        for image in images:
            relevance[image].append(products[image])
    return [_stacked(rows, tokens) for rows in relevance]


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
    model: Classifier, logits: Tensor, inputs: list[Tensor], classes: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], tuple[Tensor, ...]]]:
    """Yield gradients of the first class of every image, then of the second, and so on.

    The images of a batch do not depend on each other: one backward pass serves all of them.

    Yields:
        The images that have such a class, and the gradient of its logit per input, [B, ...].

    Raises:
        ConfigError: if the logits have no gradient.
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


def _stacked(rows: list[Tensor], tokens: Tensor) -> Tensor:
    """Return rows [N] as [rows, N], also if there are none."""
    return torch.stack(rows) if rows else tokens.new_zeros(0, tokens.shape[1])
