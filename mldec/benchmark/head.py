"""The job of `mldec.benchmark` that measures the head: against others, and against its products."""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mldec import build
from mldec.benchmark.official_forms import OfficialHead, group_projection
from mldec.benchmark.timing import in_turns, times_as_long
from mldec.config.compose import compose
from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import MLDecoder
from mldec.runtime import distributed

BACKBONE, IMAGE_SIZE = ["+experiment=coco_tresnet_m_224"], 224
IN_FEATURES = 2048
EMBED_DIM, MLP_DIM, NUM_HEADS = 768, 2048, 8  # the defaults of the head, officially the only ones
ROUNDS = 9


class Size(NamedTuple):
    """The size of a problem: classes K, groups G, tokens N per image, and images B."""

    classes: int
    groups: int
    tokens: int
    images: int = 16


OPEN_IMAGES = Size(9605, 200, 7 * 7)  # 224 pixels
COCO = Size(80, 80, 14 * 14)  # 448 pixels


def head(args: argparse.Namespace) -> dict[str, Any]:
    """Time the head against the official one, against its products alone, and against GAP.

    All sides of a comparison take turns. A name with `_times_` is how many times as long as the
    other side ours takes; `times_faster` is how many times faster it is.
    """
    device = distributed.pick_device(args.device)
    open_images, coco = (size._replace(images=args.batch_size) for size in (OPEN_IMAGES, COCO))
    return {
        **_projection(open_images, device),
        **_whole_head("open_images", open_images, device, training=True),
        **_whole_head("coco_inference", coco, device, training=False),
        **_whole_head("coco_training", coco, device, training=True),
        **_over_gap(open_images, device),
    }


def _projection(size: Size, device: torch.device) -> dict[str, float]:
    """Time the group projection, forward and backward, and the official loop over groups."""
    model = MLDecoder(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    shape = (size.images, size.groups, EMBED_DIM)
    x = torch.randn(shape, device=device, requires_grad=True)  # decoded queries [B, G, D]

    def official(x: Tensor) -> Tensor:
        return group_projection(x, model.pool_weight, model.pool_bias)

    def step(projection: Callable[[Tensor], Tensor]) -> None:
        projection(x).sum().backward()
        model.zero_grad(set_to_none=True)
        x.grad = None

    # They are compared first: a faster projection with other logits would be worth nothing.
    difference = (model.pool(x) - official(x)).abs().max().item()
    jobs = {"official": partial(step, official), "ours": partial(step, model.pool)}
    times = in_turns(jobs, device=device, rounds=5)
    return {
        "official_loop_ms": 1000 * statistics.median(times["official"]),
        "batched_product_ms": 1000 * statistics.median(times["ours"]),
        "times_faster": times_as_long(times, "official", "ours"),
        "largest_difference": difference,
    }


def _whole_head(name: str, size: Size, device: torch.device, *, training: bool) -> dict[str, float]:
    """Time the head, the official form with the same weights, and the products of ours alone.

    Args:
        name: that the figures begin with.
        size: of the problem.
        device: to compute on.
        training: time the backward pass too, to the tokens, with dropout.
    """
    official = OfficialHead(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    ours = MLDecoder(IN_FEATURES, size.classes, num_groups=size.groups).to(device)
    ours.load_state_dict(official.state_dict())
    tokens = torch.randn(size.images, size.tokens, IN_FEATURES, device=device)

    pass_through = _forward_backward if training else _forward
    times = in_turns(
        {
            "ours": pass_through(ours, tokens),
            "official": pass_through(official, tokens),
            "products": products(size, device, training=training),
        },
        device=device,
        rounds=ROUNDS,
    )
    milliseconds = {
        f"{name}_{side}_ms": 1000 * statistics.median(values) for side, values in times.items()
    }
    return {
        **milliseconds,
        f"{name}_times_official": times_as_long(times, "ours", "official"),
        f"{name}_times_products": times_as_long(times, "ours", "products"),
    }


def _forward(module: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """Return a function that does a forward pass for inference."""
    module.eval()

    @torch.no_grad()
    def run() -> None:
        module(tokens)

    return run


def _forward_backward(module: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """Return a function that does a forward and a backward pass, with new gradients each time."""
    module.train()

    def run() -> None:
        inputs = tokens.detach().requires_grad_()
        module(inputs).sum().backward()
        module.zero_grad(set_to_none=True)

    return run


def products(size: Size, device: torch.device, *, training: bool) -> Callable[[], None]:
    """Return a function that does the matrix products of the head, and nothing else.

    The bias of a linear layer is part of its product (`addmm`). In training each product A B has
    two more: the gradients of A and of B.

    Args:
        size: of the problem.
        device: to compute on.
        training: with the products of the backward pass.
    """
    images_of_tokens, images_of_queries = size.images * size.tokens, size.images * size.groups
    # In inference the first queries are the same for all images.
    first_queries = images_of_queries if training else size.groups
    heads, head_dim = size.images * NUM_HEADS, EMBED_DIM // NUM_HEADS
    group_size = -(-size.classes // size.groups)

    # Rows, inner width and columns of each linear layer.
    linear = [
        (images_of_tokens, IN_FEATURES, EMBED_DIM),  # embedding of the tokens
        (images_of_tokens, EMBED_DIM, EMBED_DIM),  # keys
        (images_of_tokens, EMBED_DIM, EMBED_DIM),  # values
        (first_queries, EMBED_DIM, EMBED_DIM),
        (images_of_queries, EMBED_DIM, EMBED_DIM),  # output of the attention
        (images_of_queries, EMBED_DIM, MLP_DIM),
        (images_of_queries, MLP_DIM, EMBED_DIM),
    ]
    # Number of products, and the same of each.
    batched = [
        (heads, size.groups, head_dim, size.tokens),  # weights of the attention
        (heads, size.groups, size.tokens, head_dim),  # attended values
        (size.groups, size.images, EMBED_DIM, group_size),  # group projection
    ]

    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = []
    for rows, inner, columns in linear:
        a, b = torch.randn(rows, inner, device=device), torch.randn(columns, inner, device=device)
        bias, gradient = (
            torch.randn(columns, device=device),
            torch.randn(rows, columns, device=device),
        )
        calls.append((torch.addmm, (bias, a, b.t())))
        if training:
            calls += [(torch.mm, (gradient, b)), (torch.mm, (gradient.t(), a))]

    for number, rows, inner, columns in batched:
        a = torch.randn(number, rows, inner, device=device)
        b = torch.randn(number, inner, columns, device=device)
        gradient = torch.randn(number, rows, columns, device=device)
        calls.append((torch.bmm, (a, b)))
        if training:
            calls += [(torch.bmm, (gradient, b.mT)), (torch.bmm, (a.mT, gradient))]

    def run() -> None:
        for product, matrices in calls:
            product(*matrices)

    return run


def _over_gap(size: Size, device: torch.device) -> dict[str, float]:
    """Compare TResNet-M at 224 pixels, 7 x 7 tokens, with our head to the same network with GAP.

    Both have the same backbone, which is timed once beside the heads: a figure is the time of
    backbone and head together over that of backbone and GAP.
    """
    parts = build.check(compose(BACKBONE), build.MODEL_PARTS)
    backbone = build.backbone(parts, pretrained=False).to(device)
    images = torch.rand(size.images, 3, IMAGE_SIZE, IMAGE_SIZE, device=device)
    tokens = torch.randn(size.images, size.tokens, IN_FEATURES, device=device)
    heads = {
        "80": MLDecoder(IN_FEATURES, 80, num_groups=80),
        "80_gap": GAP(IN_FEATURES, 80),
        "9605": MLDecoder(IN_FEATURES, 9605, num_groups=size.groups),
        "9605_gap": GAP(IN_FEATURES, 9605),
    }

    figures = {}
    for name, pass_through in (("inference", _forward), ("training", _forward_backward)):
        jobs = {key: pass_through(module.to(device), tokens) for key, module in heads.items()}
        jobs["backbone"] = pass_through(backbone, images)
        times = in_turns(jobs, device=device, rounds=3)

        whole = {
            key: [sum(pair) for pair in zip(times["backbone"], times[key], strict=True)]
            for key in heads
        }
        for classes in ("80", "9605"):
            ratio = times_as_long(whole, classes, f"{classes}_gap")
            figures[f"tresnet_m_{classes}_{name}_times_gap"] = ratio
    return figures
