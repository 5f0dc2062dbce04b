"""Weights of the official code's layout, rebuilt from names and shapes, under this project's names."""

import json
import re
from pathlib import Path

import fill
import torch
from torch import Tensor

NUMBERS = Path(__file__).parents[1] / "parity" / "numbers"

# Official name -> ours, in this order. "embed_standart" is spelt so in the released files.
ML_DECODER = [
    ("decoder.embed_standart", "embed"),
    ("decoder.query_embed.weight", "queries"),
    ("decoder.duplicate_pooling_bias", "pool_bias"),
    ("decoder.duplicate_pooling", "pool_weight"),
    ("decoder.layers", "layers"),
    ("multihead_attn", "cross_attn"),
    ("linear1", "mlp.0"),
    ("linear2", "mlp.3"),
    ("wordvec_proj", "word_proj"),
]
QUERY2LABEL = [
    ("transformer.encoder.layers", "encoder"),
    ("transformer.decoder.layers", "decoder"),
    ("transformer.decoder.norm", "norm"),
    ("multihead_attn", "cross_attn"),
    ("linear1", "mlp.0"),
    ("linear2", "mlp.3"),
    ("query_embed.weight", "queries"),
    ("fc.W", "fc_weight"),
    ("fc.b", "fc_bias"),
]


def read(name: str) -> dict:
    """Return a JSON file of numbers."""
    return json.loads((NUMBERS / f"{name}.json").read_text())


def rename(key: str, pairs: list[tuple[str, str]]) -> str:
    """Return our name of an official one."""
    for old, new in pairs:
        key = key.replace(old, new)
    return key


def head_weights(shapes: dict[str, list[int]], pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Return the rebuilt weights of a head."""
    return {rename(key, pairs): torch.from_numpy(fill.tensor(key, tuple(shape))) for key, shape in shapes.items()}


def model_weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the rebuilt weights of a TResNet with ML-Decoder head; in-place ABN scales by |w| + 1e-5."""
    weights = {}
    for key, shape in shapes.items():
        tensor = torch.from_numpy(fill.tensor(key, tuple(shape)))
        if key.startswith("head."):
            weights["head." + rename(key.removeprefix("head."), ML_DECODER)] = tensor
            continue
        ours = re.sub(r"(conv\d)\.0\.0\.", r"\1.conv.", key)
        ours = re.sub(r"(conv\d)\.0\.1\.", r"\1.bn.", ours)
        ours = re.sub(r"(conv\d|downsample\.\d)\.0\.", r"\1.conv.", ours)
        ours = re.sub(r"(conv\d|downsample\.\d)\.1\.", r"\1.bn.", ours)
        # In float64: a rounded 1e-5 is enough to leave the official trajectory.
        weights["backbone.network." + ours] = tensor.double().abs() + 1e-5 if ours.endswith("bn.weight") else tensor
    return weights
