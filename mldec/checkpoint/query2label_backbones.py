"""Swin and CvT in the files of Query2Label: their official names, and the sizes that tell them.

Source: SlongLiu/query2labels lib/models (swin_transformer.py, cls_cvt/cls_cvt.py), which hold the
networks of Microsoft's repositories.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from mldec.errors import CheckpointError

BACKBONE = "backbone.network."

# (Width of the first stage, blocks per stage, rows of a table of relative positions) -> timm's
# name. A window of w x w tokens has (2w - 1)^2 relative positions.
SWINS = {
    (96, (2, 2, 6, 2), 13**2): "swin_tiny_patch4_window7_224",
    (96, (2, 2, 18, 2), 13**2): "swin_small_patch4_window7_224",
    (128, (2, 2, 18, 2), 13**2): "swin_base_patch4_window7_224",
    (128, (2, 2, 18, 2), 23**2): "swin_base_patch4_window12_384",
    (192, (2, 2, 18, 2), 13**2): "swin_large_patch4_window7_224",
    (192, (2, 2, 18, 2), 23**2): "swin_large_patch4_window12_384",
}
# (Width of the first stage, blocks per stage) -> the name on the hub, and the widths of the stages.
# All other sizes are the defaults of transformers; an attention head has 64 channels.
CVTS = {
    (64, (1, 2, 10)): ("microsoft/cvt-13", [64, 192, 384]),
    (64, (1, 4, 16)): ("microsoft/cvt-21", [64, 192, 384]),
    (192, (2, 2, 20)): ("microsoft/cvt-w24-384-22k", [192, 768, 1024]),
}
CVT_HEAD_DIM = 64

SWIN_BUFFERS = ("attn_mask", "relative_position_index")  # timm computes them
# Official names in a stage of CvT -> those of transformers, replaced in this order.
CVT_STAGE = [
    ("patch_embed.proj.", "embedding.convolution_embeddings.projection."),
    ("patch_embed.norm.", "embedding.convolution_embeddings.normalization."),
    ("blocks.", "layers."),
    ("attn.conv_proj_q.", "attention.attention.convolution_projection_query."),
    ("attn.conv_proj_k.", "attention.attention.convolution_projection_key."),
    ("attn.conv_proj_v.", "attention.attention.convolution_projection_value."),
    (".conv.", ".convolution_projection.convolution."),
    (".bn.", ".convolution_projection.normalization."),
    ("attn.proj_q.", "attention.attention.projection_query."),
    ("attn.proj_k.", "attention.attention.projection_key."),
    ("attn.proj_v.", "attention.attention.projection_value."),
    ("attn.proj.", "attention.output.dense."),
    ("mlp.fc1.", "intermediate.dense."),
    ("mlp.fc2.", "output.dense."),
    ("norm1.", "layernorm_before."),
    ("norm2.", "layernorm_after."),
]


def is_cvt(official: Mapping[str, Tensor]) -> bool:
    """Tell whether the backbone of a Query2Label file is a CvT."""
    return "backbone.0.stage0.patch_embed.proj.weight" in official


def rename_swin(key: str) -> str | None:
    """Rename a tensor of Swin; None for a tensor that timm's Swin does not have.

    Args:
        key: its official name in the backbone.
    """
    if key.endswith(SWIN_BUFFERS):
        return None

    # Officially a stage ends with the merging of patches; in timm the next one begins with it.
    merging = re.match(r"layers\.([0-2])\.downsample\.(.+)", key)
    if merging:
        key = f"layers.{int(merging[1]) + 1}.downsample.{merging[2]}"
    return BACKBONE + key


def rename_cvt(key: str) -> str:
    """Rename a tensor of CvT.

    Args:
        key: its official name in the backbone.
    """
    stage = re.match(r"stage(\d)\.(.+)", key)
    if stage is None:
        return BACKBONE + re.sub(r"^norm\.", "layernorm.", key)

    inner = stage[2]
    for old, new in CVT_STAGE:
        inner = inner.replace(old, new)
    return f"{BACKBONE}cvt.encoder.stages.{stage[1]}.{inner}"


def backbone_node(
    weights: Mapping[str, Tensor], image_size: int, path: Path
) -> dict[str, Any] | None:
    """Return the config node of a Swin or a CvT, or None if the backbone is neither.

    Args:
        weights: under our names.
        image_size: pixels per side, which Swin fixes when it is built.
        path: of the file, for messages.

    Raises:
        CheckpointError: if it is a Swin or a CvT of unknown sizes.
    """
    stem = weights.get(BACKBONE + "patch_embed.proj.weight")
    if stem is not None:
        blocks = _blocks(weights, r"layers\.(\d+)\.blocks\.(\d+)\.")
        table = BACKBONE + "layers.0.blocks.0.attn.relative_position_bias_table"
        positions = _rows(weights.get(table))
        name = SWINS.get((_rows(stem), blocks, positions))
        if name is None:
            raise _unknown(path, "Swin", blocks, stem)
        return {
            "_target_": "mldec.backbones.TimmBackbone",
            "name": name,
            "image_size": image_size,
        }

    stages = BACKBONE + "cvt.encoder.stages."
    stem = weights.get(stages + "0.embedding.convolution_embeddings.projection.weight")
    if stem is None:
        return None

    blocks = _blocks(weights, r"cvt\.encoder\.stages\.(\d+)\.layers\.(\d+)\.")
    if (_rows(stem), blocks) not in CVTS:
        raise _unknown(path, "CvT", blocks, stem)
    name, widths = CVTS[_rows(stem), blocks]
    config = {
        "model_type": "cvt",
        "embed_dim": widths,
        "num_heads": [width // CVT_HEAD_DIM for width in widths],
        "depth": list(blocks),
    }
    return {
        "_target_": "mldec.backbones.HFBackbone",
        "name": name,
        "config": config,
        "mean": list(IMAGENET_DEFAULT_MEAN),
        "std": list(IMAGENET_DEFAULT_STD),
    }


def _blocks(weights: Mapping[str, Tensor], pattern: str) -> tuple[int, ...]:
    """Return the number of blocks of each stage.

    Args:
        weights: under our names.
        pattern: of a name in the backbone; its groups are the numbers of the stage and the block.
    """
    matches = [re.match(re.escape(BACKBONE) + pattern, key) for key in weights]
    blocks = {match.groups() for match in matches if match}
    per_stage = Counter(stage for stage, _ in blocks)
    return tuple(per_stage[stage] for stage in sorted(per_stage))


def _rows(tensor: Tensor | None) -> int:
    """Return the first size of a tensor, or 0."""
    return tensor.shape[0] if tensor is not None and tensor.ndim else 0


def _unknown(path: Path, family: str, blocks: tuple[int, ...], stem: Tensor) -> CheckpointError:
    """Return the error for a network of unknown sizes."""
    return CheckpointError(
        f"{path} holds a {family} of blocks {blocks} and width {_rows(stem)}, which no network "
        f"here is; see MODEL_ZOO.md"
    )
