"""Convert the `.pth` files of the paper's authors: rename the tensors and infer the architecture.

Called by `checkpoint` only. Nothing is downloaded, and nothing is guessed silently: what cannot be
inferred from the tensors is looked up in the table of known files, or the user is asked for it.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from mldec.checkpoint import zoo
from mldec.checkpoint.classes import check_count
from mldec.config.compose import option
from mldec.data.table import COCO_NAMES, VOC, names_fault, told_apart, without_quotes
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import CheckpointError
from mldec.heads.layers import renamed
from mldec.heads.ml_decoder import OFFICIAL_NAMES as ML_DECODER
from mldec.heads.query2label import OFFICIAL_NAMES as QUERY2LABEL

log = logging.getLogger("mldec")

CONTAINERS = ("model", "state_dict", "ema", "state_dict_ema", "model_ema")
MAX_DIGITS = 10  # of the index of a class
STRIDE = 32  # of every network below

# (Blocks of the four stages, whether stage 1 has bottlenecks, width of the stem) -> timm's name and
# arguments. The paper's L and XL are not timm's networks of these names, which are the older ones
# of the TResNet and ASL papers.
TRESNETS: dict[tuple[tuple[int, ...], bool, int], dict[str, Any]] = {
    ((3, 4, 11, 3), False, 64): {"name": "tresnet_m"},
    ((3, 4, 23, 3), True, 64): {"name": "tresnet_v2_l"},
    ((3, 8, 34, 5), True, 64): {"name": "tresnet_v2_l", "model_args": {"layers": [3, 8, 34, 5]}},
    ((4, 5, 18, 3), False, 76): {"name": "tresnet_l"},
    ((4, 5, 24, 3), False, 83): {"name": "tresnet_xl"},
}
# Blocks of the four stages -> timm's name; all of them have bottlenecks.
RESNETS = {
    (3, 4, 6, 3): "resnet50",
    (3, 4, 23, 3): "resnet101",
    (3, 8, 36, 3): "resnet152",
}
# Swin and CvT in the files of Query2Label: SlongLiu/query2labels lib/models (swin_transformer.py,
# cls_cvt/cls_cvt.py), which hold the networks of Microsoft's repositories.
BACKBONE = "backbone.network."

# (Width of the first stage, blocks per stage, rows of a table of relative positions) -> timm's
# name. A window of w x w tokens has (2w - 1)^2 relative positions.
SWINS: dict[tuple[int, tuple[int, ...], int], str] = {
    (96, (2, 2, 6, 2), 13**2): "swin_tiny_patch4_window7_224",
    (96, (2, 2, 18, 2), 13**2): "swin_small_patch4_window7_224",
    (128, (2, 2, 18, 2), 13**2): "swin_base_patch4_window7_224",
    (128, (2, 2, 18, 2), 23**2): "swin_base_patch4_window12_384",
    (192, (2, 2, 18, 2), 13**2): "swin_large_patch4_window7_224",
    (192, (2, 2, 18, 2), 23**2): "swin_large_patch4_window12_384",
}
# (Width of the first stage, blocks per stage) -> the name on the hub, and the widths of the stages.
# All other sizes are the defaults of transformers; an attention head has 64 channels.
CVTS: dict[tuple[int, tuple[int, ...]], tuple[str, list[int]]] = {
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

ONE_LABEL = {196, 1000, 11_221}  # class counts of Stanford Cars, ImageNet-1K and ImageNet-21K-P
# Global average pooling in the code of ASL, whose head for Open Images has a linear bottleneck.
GAP = [("fc.embedding_generator.0.", "bottleneck."), ("fc.FC.", "fc.")]

KNOWN_NAMES = {80: COCO_NAMES, 20: VOC}


@dataclass(frozen=True)
class Released:
    """A file of the authors, converted to what a checkpoint of ours holds."""

    config: dict[str, Any]  # as in a checkpoint of ours
    classes: Classes
    transform: EvalTransform
    tensors: dict[str, Tensor]  # under our names; may lack the batch counters of batch norm


def tensors(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights of a file under our names, whatever container and prefix they came in.

    In-place ABN scales by |w| + 1e-5 and batch norm by w, so replacing w is an exact conversion.
    This is the only place that does it.

    Args:
        state: the content of the file.
        path: of the file, for messages.

    Raises:
        CheckpointError: if there are no weights, or they belong to no known network.
    """
    container = next(
        (state[key] for key in CONTAINERS if isinstance(state.get(key), Mapping)), state
    )
    # DistributedDataParallel prefixes every name with "module.".
    official = {
        str(key).removeprefix("module."): value
        for key, value in container.items()
        if isinstance(value, Tensor)
    }
    if not official:
        raise CheckpointError(
            f"{path} holds no weights: not one tensor under {', '.join(CONTAINERS)} or at the top"
        )

    rename = _renamer(official)
    if rename is None:
        examples = ", ".join(sorted(official)[:3])
        raise CheckpointError(
            f"{path} is of no known network: its first tensors are {examples}; see MODEL_ZOO.md"
        )

    weights = {}
    # Only a file that was saved with in-place ABN numbers the layers of the stem.
    raw_abn = any(re.search(r"body\.conv1\.0\.", key) for key in official)
    for key, value in official.items():
        name = rename(key)
        if name is None or name.endswith("num_batches_tracked"):
            continue

        if raw_abn and name.startswith(BACKBONE) and name.endswith("bn.weight"):
            if not value.is_floating_point():
                raise CheckpointError(
                    f"{path} is damaged: its {key} are {value.dtype}, weights are floating point"
                )
            value = value.abs() + 1e-5
        weights[name] = value
    return weights


def convert(
    state: Mapping[str, Any], path: Path, *, image_size: int | None, names: Sequence[str] | None
) -> Released:
    """Convert a file of the authors, inferring its architecture from the names and shapes.

    Args:
        state: the content of the file.
        path: of the file; its name is looked up in the table of known files.
        image_size: pixels per side, a multiple of `STRIDE`; None for the size in the table.
        names: of the classes, in the order of the file; None for those that it names itself.

    Raises:
        CheckpointError: if it is not such a file, a part of it is missing, the image size is
            neither known nor given, or there are not as many names as classes.
    """
    weights = tensors(state, path)
    head, num_classes = _head(weights, path)

    # The networks take images of any size, so that the tensors do not reveal the size in training.
    known = zoo.known(path)
    size = known.image_size if image_size is None and known else image_size
    if size is None:
        raise CheckpointError(
            f"{path} does not tell its input size: pass --image-size, such as --image-size 448"
        )
    if size % STRIDE:
        raise CheckpointError(
            f"--image-size {size} is not a multiple of {STRIDE}, "
            f"the stride of the network in {path}"
        )

    data = (
        {**option("data", "coco"), "image_size": size}
        if num_classes == 80
        else {"image_size": size}
    )
    backbone = backbone_node(weights, size, path) or _backbone(weights, path)
    config = {"name": path.stem, "data": data, "backbone": backbone, "head": head}

    return Released(
        config={**config, "loss": option("loss", "asl")},
        classes=_classes(state, head, num_classes, names, path),
        transform=EvalTransform(image_size=size),
        tensors=_shaped(weights),
    )


def _renamer(official: Mapping[str, Tensor]) -> Callable[[str], str | None] | None:
    """Return the function from a file's names to ours, or None if the file is of no known kind.

    The function returns None for a tensor that our model does not have.
    """
    if any(key.startswith("transformer.") for key in official):
        rename_transformer = rename_cvt if is_cvt(official) else rename_swin
        return partial(_query2label, rename_transformer=rename_transformer)
    if any(key.startswith("body.conv1.") for key in official):
        return _tresnet
    if "layer4.0.conv1.weight" in official:
        return _resnet
    return None


def _tresnet(key: str) -> str | None:
    """Rename a tensor of a TResNet with a GAP or an ML-Decoder head."""
    if key.startswith("head."):
        return "head." + renamed(key.removeprefix("head."), [*GAP, *ML_DECODER])

    # A convolution and its norm are numbered 0 and 1. Before an anti-aliasing filter the two are
    # nested in one more Sequential, hence the second 0.
    key = re.sub(r"(conv\d)\.0\.0\.", r"\1.conv.", key)
    key = re.sub(r"(conv\d)\.0\.1\.", r"\1.bn.", key)
    key = re.sub(r"(conv\d|downsample\.\d)\.0\.", r"\1.conv.", key)
    return BACKBONE + re.sub(r"(conv\d|downsample\.\d)\.1\.", r"\1.bn.", key)


def _resnet(key: str) -> str | None:
    """Rename a tensor of a torchvision ResNet, whose head takes the place of its `fc`."""
    if key.startswith("fc."):
        inner = key if key in ("fc.weight", "fc.bias") else key.removeprefix("fc.")
        return "head." + renamed(inner, ML_DECODER)
    return BACKBONE + key


def _query2label(key: str, rename_transformer: Callable[[str], str | None]) -> str | None:
    """Rename a tensor of a Query2Label model.

    Args:
        key: its official name.
        rename_transformer: renames a tensor of a backbone that is no TResNet or ResNet.
    """
    if key.startswith("backbone.0.body."):
        inner = key.removeprefix("backbone.0.").replace("body.body.", "body.")
        abn = re.match(
            r"body\.(conv1\.[01]\.|layer\d\.\d+\.(conv\d\.[01]\.|downsample\.\d\.[01]\.|se\.))",
            inner,
        )
        return _tresnet(inner) if abn else BACKBONE + inner.removeprefix("body.")

    if key.startswith("backbone.0."):
        return rename_transformer(key.removeprefix("backbone.0."))
    if key.startswith("backbone."):
        return None  # the sine position embedding, which we compute
    return "head." + renamed(key, QUERY2LABEL)


def _head(weights: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Any], int]:
    """Return the head's config node and the number of classes K; 0 for a zero-shot head.

    `num_heads` cannot be inferred from the tensors; assume 8 (Query2Label: 4).
    """
    names = [key for key in weights if key.startswith("head.")]
    if not names:
        raise CheckpointError(
            f"{path} has no head, only a backbone: train from it with init={path}"
        )

    def shape(name: str, dims: int) -> tuple[int, ...]:
        return _shape(weights, f"head.{name}", dims, path)

    # Global average pooling: one linear layer [K, C], or two with a bottleneck [width, C] first.
    if "head.fc.weight" in weights:
        node = option("head", "gap")
        if "head.bottleneck.weight" in weights:
            node["bottleneck"] = shape("bottleneck.weight", 2)[0]
        return node, shape("fc.weight", 2)[0]

    num_layers = _count(weights, r"head\.layers\.(\d+)\.")
    if num_layers:
        node = {
            "mlp_dim": shape("layers.0.mlp.0.weight", 2)[0],
            "num_heads": 8,
            "num_layers": num_layers,
            "self_attention": "head.layers.0.self_attn.in_proj_weight" in weights,
        }

        # Zero-shot ML-Decoder: all classes share one pooling weight [D, 1]. Word vectors as wide as
        # the decoder are not projected.
        if _is_zero_shot(weights):
            embed_dim, _ = shape("pool_weight", 2)
            node["embed_dim"] = node["word_dim"] = embed_dim
            if "head.word_proj.weight" in weights:
                node["word_dim"] = shape("word_proj.weight", 2)[1]
            return {**option("head", "ml_decoder_zsl"), **node}, 0

        # ML-Decoder: one pooling weight [D, classes per group] per group.
        node["num_groups"], node["embed_dim"], _ = shape("pool_weight", 3)
        return {**option("head", "ml_decoder"), **node}, shape("pool_bias", 1)[0]

    # Query2Label: a linear layer of its own per class, together [1, K, D].
    _, num_classes, embed_dim = shape("fc_weight", 3)
    node = {
        "embed_dim": embed_dim,
        "mlp_dim": shape("decoder.0.mlp.0.weight", 2)[0],
        "num_heads": 4,
        "encoder_layers": _count(weights, r"head\.encoder\.(\d+)\."),
        "decoder_layers": _count(weights, r"head\.decoder\.(\d+)\."),
        "input_proj": "head.input_proj.weight" in weights,
        "self_attention": "head.decoder.0.self_attn.in_proj_weight" in weights,
    }
    return {**option("head", "query2label"), **node}, num_classes


def _is_zero_shot(weights: Mapping[str, Tensor]) -> bool:
    """Tell whether the head's classes share one pooling weight, so that none belongs to a class."""
    pool_weight = weights.get("head.pool_weight")
    return pool_weight is not None and pool_weight.ndim == 2


def _backbone(weights: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Return the backbone's config node, from the blocks per stage, their kind and the stem width.

    Raises:
        CheckpointError: if no network of timm that we know of is built like this.
    """
    tresnet = BACKBONE + "body.conv1.conv.weight" in weights
    prefix = BACKBONE + ("body." if tresnet else "")
    blocks = tuple(
        _count(weights, rf"{re.escape(prefix)}layer{stage}\.(\d+)\.") for stage in (1, 2, 3, 4)
    )
    bottleneck = any(key.startswith(f"{prefix}layer1.0.conv3.") for key in weights)

    if tresnet:
        width = _shape(weights, prefix + "conv1.conv.weight", 4, path)[0]
        arguments = TRESNETS.get((blocks, bottleneck, width))
        block_kind = "bottlenecks" if bottleneck else "basic blocks"
        description = f"a TResNet of blocks {blocks}, {block_kind} and width {width}"
    else:
        arguments = {"name": RESNETS[blocks]} if bottleneck and blocks in RESNETS else None
        description = f"a ResNet of blocks {blocks}"

    if arguments is None:
        raise CheckpointError(
            f"{path} holds {description}, which no network here is; see MODEL_ZOO.md"
        )
    return {"_target_": "mldec.backbones.TimmBackbone", **arguments}


def _shaped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights in our shapes.

    Query2Label stores its per-class layers with a leading dimension of 1, and its input projection
    as a 1 x 1 convolution [D, C, 1, 1]; ours is a linear layer [D, C].
    """
    shaped = dict(weights)

    if "head.fc_weight" in shaped:
        shaped |= {
            key: shaped[key].squeeze(0)
            for key in ("head.fc_weight", "head.fc_bias")
            if key in shaped
        }

    if "head.input_proj.weight" in shaped and shaped["head.input_proj.weight"].ndim == 4:
        shaped["head.input_proj.weight"] = shaped["head.input_proj.weight"].flatten(1)
    return shaped


def _classes(
    state: Mapping[str, Any],
    head: Mapping[str, Any],
    num_classes: int,
    names: Sequence[str] | None,
    path: Path,
) -> Classes:
    """Return the classes: by the names that the user gives, else by those of `_names`.

    The official code saves neither names nor vectors with a zero-shot head. What remains are no
    classes, and the width of the word vectors that it must be given.
    """
    if names is not None:
        check_count(names, num_classes, path)

    if "word_dim" in head:
        return Classes((), queries=torch.empty(0, head["word_dim"]))

    if names is None:
        names = _names(state, num_classes, path)
    return Classes(tuple(names), exclusive=num_classes in ONE_LABEL)


def _names(state: Mapping[str, Any], num_classes: int, path: Path) -> tuple[str, ...]:
    """Return the class names: those in the file, a known list of this length, or numbered ones.

    Numbered names are logged as a warning.

    Raises:
        CheckpointError: if the names in the file are malformed, or not as many as the head has.
    """
    saved = state.get("idx_to_class")
    if isinstance(saved, Mapping):
        # The keys are indices, in some files as text.
        numbered = all(type(index) is int or _is_number(index) for index in saved)
        if not numbered or not all(isinstance(name, str) for name in saved.values()):
            raise CheckpointError(
                f"{path} is damaged: its idx_to_class does not give each number a name"
            )

        names = [without_quotes(saved[index]) for index in sorted(saved, key=int)]
        if len(names) != num_classes:
            raise CheckpointError(
                f"{path} names {len(names)} classes, but its head has {num_classes}: it is damaged"
            )
        if fault := names_fault(told_apart(names)):
            raise CheckpointError(f"{path} is refused: {fault}")
        return told_apart(names)

    if num_classes in KNOWN_NAMES:
        return tuple(KNOWN_NAMES[num_classes])

    log.warning(f"{path} names no classes: they are numbered from 0 to {num_classes - 1}")
    return tuple(f"class {index}" for index in range(num_classes))


def _shape(weights: Mapping[str, Tensor], name: str, dims: int, path: Path) -> tuple[int, ...]:
    """Return the shape of a tensor that the architecture is inferred from; every size is 1 or more.

    Raises:
        CheckpointError: if the tensor is missing or empty, or does not have `dims` dimensions.
    """
    if name not in weights:
        raise CheckpointError(
            f"{path} misses {name}: it is incomplete, or a start for training (init={path})"
        )

    shape = tuple(weights[name].shape)
    if len(shape) != dims or 0 in shape:
        raise CheckpointError(
            f"{path} is damaged: its {name} has the shape {list(shape)}, not {dims} sizes above 0"
        )
    return shape


def _count(weights: Mapping[str, Tensor], pattern: str) -> int:
    """Count numbered layers: one more than the highest number in the pattern's group, or 0."""
    matches = [match for key in weights if (match := re.match(pattern, key))]
    # A longer number belongs to no network, and would take hours to build.
    return 1 + max((int(match[1]) for match in matches if len(match[1]) < 4), default=-1)


def _is_number(text: object) -> bool:
    return isinstance(text, str) and text.isdecimal() and len(text) < MAX_DIGITS


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
