"""Weights of the official layouts, rebuilt from names and shapes, and official formulas."""

import json
import re
from pathlib import Path

import fill
import torch
import torch.nn.functional as F
from torch import Tensor

from mldec.checkpoint import released
from mldec.heads.layers import renamed

NORM = ("weight", "bias", "running_mean", "running_var")
NUMBERS = Path(__file__).parents[1] / "parity" / "numbers"


def read(name: str) -> dict:
    """Return a JSON file of numbers."""
    return json.loads((NUMBERS / f"{name}.json").read_text())


def rebuilt(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the rebuilt weights under their official names."""
    return {key: torch.from_numpy(fill.tensor(key, tuple(shape))) for key, shape in shapes.items()}


def head_weights(shapes: dict[str, list[int]], pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the rebuilt weights of a head alone, under our names."""
    return {renamed(key, pairs): value for key, value in rebuilt(shapes).items()}


def model_weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the rebuilt weights of a whole model, under our names."""
    # In float64: a rounded 1e-5 in the scales is enough to leave the official trajectory.
    return released.tensors({key: value.double() for key, value in rebuilt(shapes).items()})


def tresnet_shapes(layers: list[int], width_factor: float = 1.0) -> dict[str, list[int]]:
    """Return names and shapes of the body of a TResNet in src/models/tresnet of ASL.

    Its first two stages have basic blocks, unlike those of TResNet-L and -XL in ML_Decoder.
    """
    shapes: dict[str, list[int]] = {}

    def conv(name: str, inputs: int, outputs: int, size: int) -> None:
        shapes[f"{name}.0.weight"] = [outputs, inputs, size, size]
        shapes.update({f"{name}.1.{part}": [outputs] for part in NORM})

    width = inputs = int(64 * width_factor)
    conv("body.conv1", 48, width, 3)
    for stage, blocks in enumerate(layers, 1):
        planes = width * 2 ** (stage - 1)
        outputs = planes if stage <= 2 else 4 * planes
        for block in range(blocks):
            name = f"body.layer{stage}.{block}"
            is_strided = block == 0 and stage > 1
            nested = ".0" if is_strided else ""  # followed by the anti-aliasing filter
            if stage <= 2:
                conv(f"{name}.conv1{nested}", inputs, planes, 3)
                conv(f"{name}.conv2", planes, planes, 3)
            else:
                conv(f"{name}.conv1", inputs, planes, 1)
                conv(f"{name}.conv2{nested}", planes, planes, 3)
                conv(f"{name}.conv3", planes, outputs, 1)
            if stage <= 3:
                squeezed = max(planes // 4 if stage <= 2 else outputs // 8, 64)
                shapes[f"{name}.se.fc1.weight"] = [squeezed, planes, 1, 1]
                shapes[f"{name}.se.fc1.bias"] = [squeezed]
                shapes[f"{name}.se.fc2.weight"] = [planes, squeezed, 1, 1]
                shapes[f"{name}.se.fc2.bias"] = [planes]
            if is_strided:
                conv(f"{name}.downsample.1", inputs, outputs, 1)  # after the average pooling
            inputs = outputs
    return shapes


def gap_shapes(
    features: int, num_classes: int, bottleneck: int | None = None
) -> dict[str, list[int]]:
    """Return names and shapes of the head in the code of ASL, with or without `bottleneck_head`."""
    if bottleneck is None:
        return {"head.fc.weight": [num_classes, features], "head.fc.bias": [num_classes]}
    return {
        "head.fc.embedding_generator.0.weight": [bottleneck, features],
        "head.fc.embedding_generator.0.bias": [bottleneck],
        "head.fc.FC.weight": [num_classes, bottleneck],
        "head.fc.FC.bias": [num_classes],
    }


def tresnet_features(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """Return the pooled features [B, C] of a TResNet by the formulas of the official modules.

    Args:
        state: the weights under their official names.
        images: [B, 3, H, W] in [0, 1], H and W multiples of 32.
    """

    def conv(x: Tensor, name: str, slope: float | None) -> Tensor:
        """Apply a convolution and in-place ABN, which scales by |w| + eps, and a leaky ReLU."""
        is_blurred = f"{name}.0.0.weight" in state
        inner = f"{name}.0" if is_blurred else name
        weight = state[f"{inner}.0.weight"]
        x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)

        scale, bias, mean, variance = (state[f"{inner}.1.{part}"] for part in NORM)
        x = F.batch_norm(x, mean, variance, scale.abs() + 1e-5, bias, eps=1e-5)
        if slope is not None:
            x = F.leaky_relu(x, slope)

        if is_blurred:  # AntiAliasDownsampleLayer
            taps = torch.tensor([1.0, 2.0, 1.0])
            kernel = torch.outer(taps, taps)[None, None] / 16
            x = F.pad(x, (1, 1, 1, 1), "reflect")
            x = F.conv2d(x, kernel.expand(x.shape[1], -1, -1, -1), stride=2, groups=x.shape[1])
        return x

    def squeeze_excite(x: Tensor, name: str) -> Tensor:
        if f"{name}.fc1.weight" not in state:
            return x
        gate = x.mean((2, 3), keepdim=True)
        gate = F.conv2d(gate, state[f"{name}.fc1.weight"], state[f"{name}.fc1.bias"]).relu()
        gate = F.conv2d(gate, state[f"{name}.fc2.weight"], state[f"{name}.fc2.bias"])
        return x * gate.sigmoid()

    # SpaceToDepth: 4 x 4 pixels become channels.
    batch, channels, height, width = images.shape
    x = images.view(batch, channels, height // 4, 4, width // 4, 4).permute(0, 3, 5, 1, 2, 4)
    x = conv(x.reshape(batch, channels * 16, height // 4, width // 4), "body.conv1", 1e-2)

    blocks = dict.fromkeys(re.findall(r"body\.layer\d\.\d+(?=\.)", "\n".join(state)))
    for name in blocks:
        residual = x
        if f"{name}.downsample.1.0.weight" in state:
            residual = F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False)
            residual = conv(residual, f"{name}.downsample.1", None)

        x = conv(x, f"{name}.conv1", 1e-3)
        if f"{name}.conv3.0.weight" in state:  # Bottleneck
            x = squeeze_excite(conv(x, f"{name}.conv2", 1e-3), f"{name}.se")
            x = conv(x, f"{name}.conv3", None)
        else:  # BasicBlock
            x = squeeze_excite(conv(x, f"{name}.conv2", None), f"{name}.se")
        x = (x + residual).relu()
    return x.mean((2, 3))


def gap_logits(state: dict[str, Tensor], features: Tensor) -> Tensor:
    """Return the logits [B, K] of the head in the code of ASL, from pooled features [B, C]."""
    if "head.fc.weight" in state:
        return F.linear(features, state["head.fc.weight"], state["head.fc.bias"])
    embedding = F.linear(
        features,
        state["head.fc.embedding_generator.0.weight"],
        state["head.fc.embedding_generator.0.bias"],
    )
    return F.linear(embedding, state["head.fc.FC.weight"], state["head.fc.FC.bias"])


def zero_shot_file(file: dict[str, Tensor], word_dim: int = 300) -> dict[str, Tensor]:
    """Return a checkpoint of the official train_zsl_nus.py, with the body of a released TResNet."""
    shapes = read("head_zero_shot.keys")
    shapes["decoder.embed_standart.weight"] = [768, 2048]
    shapes["wordvec_proj.weight"] = [768, word_dim]
    head = {f"head.{name}": value for name, value in rebuilt(shapes).items()}
    return {key: value for key, value in file.items() if not key.startswith("head.")} | head
