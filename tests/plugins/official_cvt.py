"""Independent code of CvT, with the names of microsoft/CvT lib/models/cls_cvt.py."""

import torch
from torch import Tensor
from torch.nn import functional as F

STRIDES, PADDINGS = (4, 2, 2), (2, 1, 1)
HEAD_DIM = 64


def shapes(widths: list[int], blocks: list[int]) -> dict[str, list[int]]:
    """Return the names and shapes of the official state dict, without the classifier."""
    result: dict[str, list[int]] = {}
    channels, kernel = 3, 7
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        start = f"stage{stage}"
        result[f"{start}.patch_embed.proj.weight"] = [width, channels, kernel, kernel]
        result[f"{start}.patch_embed.proj.bias"] = [width]
        _affine(result, f"{start}.patch_embed.norm", width)
        if stage == len(widths) - 1:
            result[f"{start}.cls_token"] = [1, 1, width]

        for block in range(count):
            inner = f"{start}.blocks.{block}"
            for name in "qkv":
                result[f"{inner}.attn.conv_proj_{name}.conv.weight"] = [width, 1, 3, 3]
                _affine(result, f"{inner}.attn.conv_proj_{name}.bn", width)
                result[f"{inner}.attn.conv_proj_{name}.bn.running_mean"] = [width]
                result[f"{inner}.attn.conv_proj_{name}.bn.running_var"] = [width]
                result[f"{inner}.attn.proj_{name}.weight"] = [width, width]
                result[f"{inner}.attn.proj_{name}.bias"] = [width]
            result[f"{inner}.attn.proj.weight"] = [width, width]
            result[f"{inner}.attn.proj.bias"] = [width]
            _affine(result, f"{inner}.norm1", width)
            _affine(result, f"{inner}.norm2", width)
            result[f"{inner}.mlp.fc1.weight"] = [4 * width, width]
            result[f"{inner}.mlp.fc1.bias"] = [4 * width]
            result[f"{inner}.mlp.fc2.weight"] = [width, 4 * width]
            result[f"{inner}.mlp.fc2.bias"] = [width]
        channels, kernel = width, 3
    _affine(result, "norm", channels)
    return result


def _affine(result: dict[str, list[int]], name: str, width: int) -> None:
    result[f"{name}.weight"] = [width]
    result[f"{name}.bias"] = [width]


def tokens(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """Compute the tokens [B, N, C] of normalized images, the input of Query2Label."""
    x = images
    stage = 0
    while f"stage{stage}.patch_embed.proj.weight" in state:
        x = _stage(state, f"stage{stage}", x, stage)
        stage += 1
    return _norm(state, "norm", x.flatten(2).transpose(1, 2))


def _stage(state: dict[str, Tensor], name: str, x: Tensor, stage: int) -> Tensor:
    x = F.conv2d(
        x,
        state[f"{name}.patch_embed.proj.weight"],
        state[f"{name}.patch_embed.proj.bias"],
        stride=STRIDES[stage],
        padding=PADDINGS[stage],
    )
    height, width = x.shape[2:]
    x = _norm(state, f"{name}.patch_embed.norm", x.flatten(2).transpose(1, 2))

    prefix = 0
    if f"{name}.cls_token" in state:
        prefix = 1
        x = torch.cat([state[f"{name}.cls_token"].expand(len(x), -1, -1), x], 1)

    block = 0
    while f"{name}.blocks.{block}.norm1.weight" in state:
        inner = f"{name}.blocks.{block}"
        normed = _norm(state, f"{inner}.norm1", x)
        x = x + _attention(state, f"{inner}.attn", normed, prefix, height, width)
        hidden = _linear(state, f"{inner}.mlp.fc1", _norm(state, f"{inner}.norm2", x))
        x = x + _linear(state, f"{inner}.mlp.fc2", hidden * torch.sigmoid(1.702 * hidden))
        block += 1
    return x[:, prefix:].transpose(1, 2).unflatten(2, (height, width))


def _attention(
    state: dict[str, Tensor], name: str, x: Tensor, prefix: int, height: int, width: int
) -> Tensor:
    image = x[:, prefix:].transpose(1, 2).unflatten(2, (height, width))
    heads = {}
    for part, stride in (("q", 1), ("k", 2), ("v", 2)):
        projection = f"{name}.conv_proj_{part}"
        weight = state[f"{projection}.conv.weight"]
        local = F.conv2d(image, weight, stride=stride, padding=1, groups=len(weight))
        norm = [
            f"{projection}.bn.{key}" for key in ("running_mean", "running_var", "weight", "bias")
        ]
        local = F.batch_norm(local, *(state[key] for key in norm))
        sequence = torch.cat([x[:, :prefix], local.flatten(2).transpose(1, 2)], 1)
        projected = _linear(state, f"{name}.proj_{part}", sequence)
        heads[part] = projected.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)

    # The official scale depends on the whole width, not on the width of a head.
    scores = heads["q"] @ heads["k"].transpose(2, 3) * x.shape[2] ** -0.5
    mixed = scores.softmax(-1) @ heads["v"]
    return _linear(state, f"{name}.proj", mixed.transpose(1, 2).flatten(2))


def _linear(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _norm(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)
