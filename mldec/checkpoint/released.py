"""Convert the `.pth` files of the paper's authors: rename the tensors and infer the architecture.

Values that cannot be inferred from the tensors come from the table of known files or from the user.
Callers wrap the functions in `naming_errors`, which adds the path of the file to errors.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mldec.checkpoint.classes import check_count, read_class_names
from mldec.checkpoint.sources import RELEASED, TAG_LIST, TAG_THRESHOLDS
from mldec.checkpoint.state import Calibration, Checkpoint
from mldec.checkpoint.thresholds import with_thresholds
from mldec.config.compose import option, resolved
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import DataError, log
from mldec.files.text import read_lines
from mldec.heads.layers import renamed
from mldec.heads.ml_decoder import OFFICIAL_NAMES as ML_DECODER
from mldec.heads.query2label import OFFICIAL_NAMES as QUERY2LABEL
from mldec.heads.ram import OFFICIAL_NAMES as RAM
from mldec.heads.ram import REWEIGHT_SCALE
from mldec.names import COCO_NAMES, VOC, disambiguate, format_list, numbered_names, without_quotes

CONTAINERS = ("model", "state_dict", "ema", "state_dict_ema", "model_ema")
STRIDE = 32  # stride of all networks below
BACKBONE = "backbone.network."
TIMM = "mldec.backbones.TimmBackbone"

# (Blocks per stage, whether stage 1 has bottlenecks, width of the stem) -> timm's name and
# arguments. L and XL of the paper differ from tresnet_l and tresnet_xl in timm, which are the
# networks of the TResNet and ASL papers.
TRESNETS: dict[tuple[tuple[int, ...], bool, int], dict[str, Any]] = {
    ((3, 4, 11, 3), False, 64): {"name": "tresnet_m"},
    ((3, 4, 23, 3), True, 64): {"name": "tresnet_v2_l"},
    ((3, 8, 34, 5), True, 64): {"name": "tresnet_v2_l", "model_args": {"layers": [3, 8, 34, 5]}},
    ((4, 5, 18, 3), False, 76): {"name": "tresnet_l"},
    ((4, 5, 24, 3), False, 83): {"name": "tresnet_xl"},
}
# Blocks per stage -> timm's name. All of these networks have bottlenecks.
RESNETS = {
    (3, 4, 6, 3): "resnet50",
    (3, 4, 23, 3): "resnet101",
    (3, 8, 36, 3): "resnet152",
}
# Swin and CvT in the files of Query2Label: SlongLiu/query2labels lib/models (swin_transformer.py,
# cls_cvt/cls_cvt.py). The networks are from Microsoft's repositories. RAM has the same Swin.
# (Width of the first stage, blocks per stage, rows of a relative position table) -> timm's name.
# A window of w x w tokens has (2w - 1)^2 relative positions.
SWINS: dict[tuple[int, tuple[int, ...], int], str] = {
    (96, (2, 2, 6, 2), 13**2): "swin_tiny_patch4_window7_224",
    (96, (2, 2, 18, 2), 13**2): "swin_small_patch4_window7_224",
    (128, (2, 2, 18, 2), 13**2): "swin_base_patch4_window7_224",
    (128, (2, 2, 18, 2), 23**2): "swin_base_patch4_window12_384",
    (192, (2, 2, 18, 2), 13**2): "swin_large_patch4_window7_224",
    (192, (2, 2, 18, 2), 23**2): "swin_large_patch4_window12_384",
}
# (Width of the first stage, blocks per stage) -> name on the Hub, and width of each stage. All
# other sizes are the defaults of transformers. An attention head has 64 channels.
CVTS: dict[tuple[int, tuple[int, ...]], tuple[str, list[int]]] = {
    (64, (1, 2, 10)): ("microsoft/cvt-13", [64, 192, 384]),
    (64, (1, 4, 16)): ("microsoft/cvt-21", [64, 192, 384]),
    (192, (2, 2, 20)): ("microsoft/cvt-w24-384-22k", [192, 768, 1024]),
}
CVT_HEAD_DIM = 64

SWIN_POSITIONS = f"{BACKBONE}layers.0.blocks.0.attn.relative_position_bias_table"
SWIN_BUFFERS = ("attn_mask", "relative_position_index")  # recomputed by timm
# Official names in a stage of CvT -> names in transformers, replaced in this order.
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
# Global average pooling in the code of ASL. The head for Open Images has a linear bottleneck.
GAP = [("fc.embedding_generator.0.", "bottleneck."), ("fc.FC.", "fc.")]

# RAM and RAM++: xinyu1205/recognize-anything ram/models (ram.py, ram_plus.py).
RAM_SWIN = "visual_encoder."
LABELS = "head.label_embed"
RAM_SCALE = "head.reweight_scale"  # only in RAM++
DESCRIPTIONS = 51  # descriptions per tag in the released RAM++
# Modules for captions in RAM, and an unused scalar in the file of RAM++.
NOT_FOR_TAGS = ("tag_encoder.", "text_decoder.", "logit_scale")

KNOWN_NAMES = {80: COCO_NAMES, 20: VOC}


def tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Extract the weights from the content of a file, and rename them to the names of mldec.

    In-place ABN scales by |w| + 1e-5 and batch norm by w, so replacing w is an exact conversion.
    Raises DataError if the network is unknown.
    """
    # A file is a state dict, or has one under a key, for example next to the optimizer.
    container = state
    for key in CONTAINERS:
        if isinstance(state.get(key), Mapping):
            container = state[key]
            break

    # DistributedDataParallel adds the prefix "module." to every name.
    official = {}
    for key, value in container.items():
        if isinstance(value, Tensor):
            official[str(key).removeprefix("module.")] = value
    rename = _renamer(official)
    if rename is None:
        names = format_list(sorted(official), 3) or "none"
        raise DataError(f"unknown network (first tensors: {names}); see MODEL_ZOO.md")

    weights = {}
    # The layers of the stem are only numbered in files with in-place ABN.
    raw_abn = any("body.conv1.0." in key for key in official)
    for key, value in official.items():
        # The number of batches only matters for a cumulative moving average, which no network uses.
        name = rename(key)
        if name is None or name.endswith("num_batches_tracked"):
            continue

        if raw_abn and name.startswith(BACKBONE) and name.endswith("bn.weight"):
            value = value.abs() + 1e-5
        weights[name] = value

    # Files of RAM++ without both scalars are recognized by the number of rows.
    if rename is _ram:
        rows = _shape(weights, LABELS)[0]
        if "logit_scale" in official or rows % DESCRIPTIONS == 0:
            weights.setdefault(RAM_SCALE, torch.tensor(REWEIGHT_SCALE))
    return weights


def convert(
    state: Mapping[str, Any], path: Path, *, image_size: int | None, names: Sequence[str] | None
) -> Checkpoint:
    """Convert the content of a file. The architecture is inferred from names and shapes.

    The config has no loss, and it has a data set only if the classes are those of COCO. RAM's
    tag names and thresholds are read from the folder of `path`. `image_size` in pixels and `names`
    override the table of known files and the names in the file. Raises DataError if the network or
    the image size is unknown, or a tensor is missing.
    """
    weights = tensors(state)
    # Query2Label: the layers per class have a leading dimension of 1, and the projection is a 1 x 1
    # convolution.
    for name in ("head.fc_weight", "head.fc_bias"):
        if name in weights:
            weights[name] = weights[name].squeeze(0)
    if "head.input_proj.weight" in weights:
        weights["head.input_proj.weight"] = weights["head.input_proj.weight"].flatten(1)

    is_ram = LABELS in weights
    if is_ram:
        head, num_classes = _ram_head(weights, names)
        size = _ram_size(weights, image_size)
    else:
        head, num_classes = _head(weights)
        # The tensors of these networks do not depend on the image size.
        known = {released.file: released.image_size for released in RELEASED.values()}
        size = image_size or known.get(path.name, 0)
        if not size:
            raise DataError("unknown image size; pass --image-size, such as --image-size 448")
    if size % STRIDE:
        raise DataError(f"--image-size {size}: it must be a multiple of {STRIDE} for this network")
    if names is not None:
        check_count(names, num_classes)

    calibration = None
    if is_ram:
        classes, calibration = _tags(path, num_classes, names)
    elif "word_dim" in head:
        # The official code saves no names and word vectors with a zero-shot head.
        classes = Classes((), word_vectors=torch.empty(0, head["word_dim"]))
    else:
        names = names or _names(state, num_classes, path.name)
        classes = Classes(tuple(names), exclusive=num_classes in ONE_LABEL)

    # `mldec evaluate` then needs only data.root.
    data = {}
    if not is_ram and set(classes.names) == set(COCO_NAMES):
        data = option("data", "coco")
    config = {
        "name": path.stem,
        "data": {**data, "image_size": size},
        "backbone": _backbone(weights, size),
        "head": head,
    }
    return Checkpoint(
        config=resolved(config),
        classes=classes,
        transform=EvalTransform(image_size=size),
        model=weights,
        calibration=calibration,
    )


def _renamer(official: Mapping[str, Tensor]) -> Callable[[str], str | None] | None:
    """Return the function that renames tensors, or None for an unknown network.

    The function returns None for tensors that are not needed.
    """
    # Each family has names that no other family has.
    if any(key.startswith("transformer.") for key in official):
        is_cvt = "backbone.0.stage0.patch_embed.proj.weight" in official
        rename_transformer = _cvt if is_cvt else _swin
        return partial(_query2label, rename_transformer=rename_transformer)
    if any(key.startswith("body.conv1.") for key in official):
        return _tresnet
    if f"{RAM_SWIN}patch_embed.proj.weight" in official:
        return _ram
    if "layer4.0.conv1.weight" in official:
        return _resnet
    return None


def _tresnet(key: str) -> str | None:
    if key.startswith("head."):
        return "head." + renamed(key.removeprefix("head."), [*GAP, *ML_DECODER])

    # A convolution and its norm are numbered 0 and 1. If an anti-aliasing filter follows, they are
    # in an inner Sequential with the number 0.
    key = re.sub(r"(conv\d)\.0\.0\.", r"\1.conv.", key)
    key = re.sub(r"(conv\d)\.0\.1\.", r"\1.bn.", key)
    key = re.sub(r"(conv\d|downsample\.\d)\.0\.", r"\1.conv.", key)
    return BACKBONE + re.sub(r"(conv\d|downsample\.\d)\.1\.", r"\1.bn.", key)


def _resnet(key: str) -> str | None:
    if key in ("fc.weight", "fc.bias"):
        return "head." + renamed(key, ML_DECODER)
    if key.startswith("fc."):
        return "head." + renamed(key.removeprefix("fc."), ML_DECODER)
    return BACKBONE + key


def _ram(key: str) -> str | None:
    if key.startswith(RAM_SWIN):
        return _swin(key.removeprefix(RAM_SWIN))
    if key.startswith(NOT_FOR_TAGS):
        return None
    return "head." + renamed(key, RAM)


def _query2label(key: str, rename_transformer: Callable[[str], str | None]) -> str | None:
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
        return None  # the sine position embedding is recomputed
    return "head." + renamed(key, QUERY2LABEL)


def _head(weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Return the config node of the head and the number of classes K, 0 for a zero-shot head."""

    def shape(name: str) -> tuple[int, ...]:
        return _shape(weights, f"head.{name}")

    # Global average pooling: one linear layer [K, C], or two with a bottleneck [width, C] first.
    if "head.fc.weight" in weights:
        node = option("head", "gap")
        if "head.bottleneck.weight" in weights:
            node["bottleneck"] = shape("bottleneck.weight")[0]
        return node, shape("fc.weight")[0]

    num_layers = _count(weights, r"head\.layers\.(\d+)\.")
    if num_layers:
        node = {
            "mlp_dim": shape("layers.0.mlp.0.weight")[0],
            "num_heads": 8,  # cannot be inferred from the tensors
            "num_layers": num_layers,
            "self_attention": "head.layers.0.self_attn.in_proj_weight" in weights,
        }

        # Zero-shot ML-Decoder: one pooling weight [D, 1] for all classes. Word vectors with the
        # width of the decoder are not projected.
        if len(shape("pool_weight")) == 2:
            embed_dim, _ = shape("pool_weight")
            node["embed_dim"] = embed_dim
            node["word_dim"] = embed_dim
            if "head.word_proj.weight" in weights:
                node["word_dim"] = shape("word_proj.weight")[1]
            return {**option("head", "ml_decoder_zsl"), **node}, 0

        # ML-Decoder: one pooling weight [D, classes per group] per group.
        node["num_groups"], node["embed_dim"], _ = shape("pool_weight")
        return {**option("head", "ml_decoder"), **node}, shape("pool_bias")[0]

    # Query2Label: one linear layer per class, stacked to [K, D].
    num_classes, embed_dim = shape("fc_weight")
    node = {
        "embed_dim": embed_dim,
        "mlp_dim": shape("decoder.0.mlp.0.weight")[0],
        "num_heads": 4,
        "encoder_layers": _count(weights, r"head\.encoder\.(\d+)\."),
        "decoder_layers": _count(weights, r"head\.decoder\.(\d+)\."),
        "input_proj": "head.input_proj.weight" in weights,
        "self_attention": "head.decoder.0.self_attn.in_proj_weight" in weights,
    }
    return {**option("head", "query2label"), **node}, num_classes


def _ram_head(
    weights: Mapping[str, Tensor], names: Sequence[str] | None
) -> tuple[dict[str, Any], int]:
    """Return the config node of the head of RAM or RAM++, and the number of tags K."""
    rows, word_dim = _shape(weights, LABELS)
    descriptions = DESCRIPTIONS if RAM_SCALE in weights else 1
    if rows % descriptions and names:
        # Another number of descriptions is only known together with the number of tags.
        descriptions = rows // len(names)
    if not descriptions or rows % descriptions:
        raise DataError(
            f"label_embed has {rows} rows, which is not a multiple of {DESCRIPTIONS} descriptions; "
            f"pass the names of all tags with --class-names FILE"
        )

    node = {
        "descriptions": descriptions,
        "word_dim": word_dim,
        "embed_dim": _shape(weights, "head.word_proj.weight")[0],
        "num_heads": 4,  # cannot be inferred from the tensors
        "mlp_dim": _shape(weights, "head.layers.0.mlp.0.weight")[0],
        "num_layers": _count(weights, r"head\.layers\.(\d+)\."),
    }
    return {**option("head", "ram"), **node}, rows // descriptions


def _ram_size(weights: Mapping[str, Tensor], image_size: int | None) -> int:
    """Infer the image size of a Swin in pixels. Its last stage is a single window."""
    positions = _shape(weights, SWIN_POSITIONS)[0]
    size = STRIDE * (math.isqrt(positions) + 1) // 2
    if image_size not in (None, size):
        raise DataError(f"--image-size {image_size}: its Swin requires {size}; remove it")
    return size


def _tags(
    path: Path, num_classes: int, names: Sequence[str] | None
) -> tuple[Classes, Calibration | None]:
    # The file has no names, but the authors' lists may be in its folder.
    if names is None:
        tag_list = _sibling_list(path, TAG_LIST, num_classes)
        names = read_class_names(tag_list) if tag_list else _numbered(num_classes, path.name)
    classes = Classes(tuple(names))

    thresholds = _sibling_list(path, TAG_THRESHOLDS, num_classes)
    if thresholds is None:
        return classes, None
    return classes, with_thresholds(thresholds, classes, "raw")


def _sibling_list(path: Path, name: str, num_classes: int) -> Path | None:
    """Return the path of a list in the same folder if it has one line per class."""
    sibling = path.with_name(name)
    if sibling.is_file() and len(read_lines(sibling)) == num_classes:
        return sibling
    return None


def _backbone(weights: Mapping[str, Tensor], image_size: int) -> dict[str, Any]:
    # The official files record no architecture, but the sizes of the tensors identify the network.
    if BACKBONE + "patch_embed.proj.weight" in weights:
        blocks = _blocks(weights, r"layers\.(\d+)\.blocks\.(\d+)\.")
        width = _shape(weights, BACKBONE + "patch_embed.proj.weight")[0]
        sizes = (width, blocks, _shape(weights, SWIN_POSITIONS)[0])
        name = _known(SWINS, sizes, f"a Swin of blocks {blocks} and width {width}")
        return {"_target_": TIMM, "name": name, "image_size": image_size}

    stem = BACKBONE + "cvt.encoder.stages.0.embedding.convolution_embeddings.projection.weight"
    if stem in weights:
        blocks = _blocks(weights, r"cvt\.encoder\.stages\.(\d+)\.layers\.(\d+)\.")
        width = _shape(weights, stem)[0]
        name, widths = _known(CVTS, (width, blocks), f"a CvT of blocks {blocks}, width {width}")
        return {
            "_target_": "mldec.backbones.HFBackbone",
            "name": name,
            "config": {
                "model_type": "cvt",
                "embed_dim": widths,
                "num_heads": [width // CVT_HEAD_DIM for width in widths],
                "depth": list(blocks),
            },
        }

    tresnet = BACKBONE + "body.conv1.conv.weight" in weights
    body = "body." if tresnet else ""
    blocks = _blocks(weights, rf"{body}layer([1-4])\.(\d+)\.")
    bottleneck = any(key.startswith(f"{BACKBONE}{body}layer1.0.conv3.") for key in weights)
    if tresnet:
        width = _shape(weights, f"{BACKBONE}body.conv1.conv.weight")[0]
        kind = "bottlenecks" if bottleneck else "basic blocks"
        description = f"a TResNet of blocks {blocks}, {kind} and width {width}"
        return {"_target_": TIMM, **_known(TRESNETS, (blocks, bottleneck, width), description)}
    return {"_target_": TIMM, "name": _known(RESNETS, blocks, f"a ResNet of blocks {blocks}")}


def _known(table: Mapping[Any, Any], sizes: object, description: str) -> Any:
    if sizes not in table:
        raise DataError(f"unknown network, {description}; see MODEL_ZOO.md")
    return table[sizes]


def _blocks(weights: Mapping[str, Tensor], pattern: str) -> tuple[int, ...]:
    """Count the blocks of each stage. The groups of the pattern are stage and block."""
    blocks = set()
    for key in weights:
        if match := re.match(re.escape(BACKBONE) + pattern, key):
            blocks.add(match.groups())
    per_stage = Counter(stage for stage, _ in blocks)
    return tuple(per_stage[stage] for stage in sorted(per_stage))


def _names(state: Mapping[str, Any], num_classes: int, file: str) -> tuple[str, ...]:
    """Return the class names from the file or a known list of this length, or numbered names."""
    saved = state.get("idx_to_class")
    if isinstance(saved, Mapping):
        # The keys are indices, which are strings in some files.
        names = disambiguate([without_quotes(saved[index]) for index in sorted(saved, key=int)])
        check_count(names, num_classes)
        return names

    # All published models of 80 classes are for COCO, and of 20 classes for VOC.
    if num_classes in KNOWN_NAMES:
        return tuple(KNOWN_NAMES[num_classes])
    return _numbered(num_classes, file)


def _numbered(num_classes: int, file: str) -> tuple[str, ...]:
    log.warning(f"{file} has no class names; they are numbered from 0 to {num_classes - 1}")
    return numbered_names(num_classes)


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    if name not in weights:
        raise DataError(f"{name} is missing; use a complete file, or start a training with init=")
    return tuple(weights[name].shape)


def _count(weights: Mapping[str, Tensor], pattern: str) -> int:
    """Count numbered layers: one more than the highest number in the pattern's group, or 0."""
    count = 0
    for key in weights:
        if match := re.match(pattern, key):
            count = max(count, int(match[1]) + 1)
    return count


def _swin(key: str) -> str | None:
    if key.endswith(SWIN_BUFFERS):
        return None

    # Patch merging is at the end of a stage officially, and at the start of the next one in timm.
    merging = re.match(r"layers\.([0-2])\.downsample\.(.+)", key)
    if merging:
        key = f"layers.{int(merging[1]) + 1}.downsample.{merging[2]}"
    return BACKBONE + key


def _cvt(key: str) -> str:
    stage = re.match(r"stage(\d)\.(.+)", key)
    if stage is None:
        return BACKBONE + re.sub(r"^norm\.", "layernorm.", key)

    inner = stage[2]
    for old, new in CVT_STAGE:
        inner = inner.replace(old, new)
    return f"{BACKBONE}cvt.encoder.stages.{stage[1]}.{inner}"
