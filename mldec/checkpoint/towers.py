"""Models of open_clip as checkpoints without training: `clip:MODEL[:WEIGHTS]` or `clip:FOLDER`.

What a checkpoint of ours takes of such a model is the image tower, how it wants its images, and the
scale and the offset of the logits. The text tower makes the word vectors of the classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mldec.config.compose import option
from mldec.config.schema import Config
from mldec.data.text_encoder import DEFAULT, PREFIX, ClipModel, open_model
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, VectorOrigin
from mldec.errors import CheckpointError, ConfigError

# open_clip's ways to make an image square, as the crop of an `EvalTransform`.
CROPS = {"squash": None, "shortest": 1.0}


@dataclass(frozen=True)
class Tower:
    """The image side of a model of open_clip, as a checkpoint of ours holds it."""

    path: Path  # of the weights
    config: dict[str, Any]  # as in a checkpoint of ours; its data names no data set
    classes: Classes  # none, with word vectors [0, D]
    transform: EvalTransform
    tensors: dict[str, Tensor]  # under our names


def is_tower(path: str | Path) -> bool:
    """Tell whether a user names a model of open_clip."""
    return str(path).startswith(PREFIX)


def check_start(config: Config) -> None:
    """Check that a run does not start from a model of open_clip.

    Raises:
        ConfigError: if it would.
    """
    for setting, path in (("init", config.init), ("resume", config.resume)):
        if path is not None and is_tower(path):
            raise ConfigError(
                f"{setting}={path}: a model of open_clip is for use without training; to train its "
                f"image tower choose backbone=timm with backbone.pretrained=true and the network's "
                f"name there, such as backbone.name=vit_base_patch16_clip_quickgelu_224.openai"
            )


def convert(source: str) -> Tower:
    """Open a model of open_clip, and convert its image side.

    Args:
        source: see `mldec.data.text_encoder.ClipSource.parse`.

    Raises:
        CheckpointError: if images are prepared in a way that `EvalTransform` has not.
        ConfigError: if the model cannot be had, see `mldec.data.text_encoder.open_model`.
    """
    opened = open_model(source)
    model: Any = opened.model
    transform = _transform(opened)
    has_bias = model.logit_bias is not None

    tensors = {f"backbone.network.{name}": t for name, t in model.visual.state_dict().items()}
    for name in ("logit_scale", "logit_bias") if has_bias else ("logit_scale",):
        # A few models have a tensor of one number.
        tensors[f"head.{name}"] = getattr(model, name).detach().reshape(())

    # Without an offset of its own, a logit has a meaning beside those of other classes only.
    classes = Classes(
        (),
        exclusive=not has_bias,
        queries=torch.zeros(0, opened.width),
        origin=VectorOrigin(opened.source.anywhere, opened.sha256, (DEFAULT,)),
    )
    return Tower(
        path=opened.weights,
        config={
            "name": _name(opened),
            "data": transform_settings(transform),
            "backbone": _backbone(opened, transform.image_size),
            "head": {"_target_": "mldec.heads.Cosine", "bias": has_bias},
            "loss": option("loss", "bce"),
        },
        classes=classes,
        transform=transform,
        tensors=tensors,
    )


def transform_settings(transform: EvalTransform) -> dict[str, Any]:
    """Return the settings of `data` that stand for a transform; see `View`."""
    return {
        "image_size": transform.image_size,
        "test_size": None,
        "test_crop": transform.crop,
        "test_interpolation": transform.interpolation,
        "resize": transform.resize,
    }


def _name(opened: ClipModel) -> str:
    """Return the name of a model: the last part of its address."""
    return Path(opened.source.model.partition(":")[2] or opened.source.model).name


def _backbone(opened: ClipModel, image_size: int) -> dict[str, Any]:
    """Return the node of the backbone that is the image tower."""
    images = opened.preprocessing
    return {
        "_target_": "mldec.backbones.OpenClipBackbone",
        "name": _name(opened),
        "embed_dim": opened.width,
        "vision": opened.config["vision_cfg"],
        "image_size": image_size,
        "quick_gelu": opened.config["quick_gelu"],
        "mean": _of_channels(images["mean"]),
        "std": _of_channels(images["std"]),
    }


def _of_channels(values: Any) -> list[float]:
    """Return a number per channel of what open_clip takes: three, or one for all."""
    channels = values if isinstance(values, list | tuple) else [values] * 3
    return [float(value) for value in channels]


def _transform(opened: ClipModel) -> EvalTransform:
    """Return how a model wants its images, as far as the pixels before the normalisation.

    Raises:
        CheckpointError: if `EvalTransform` has no such way.
    """
    images: Mapping[str, Any] = opened.preprocessing
    size, mode = images["size"], images["resize_mode"]
    height, width = (size, size) if isinstance(size, int) else size
    if height != width or mode not in CROPS:
        raise CheckpointError(
            f"{opened.source.text}: it resizes images to {height} x {width} pixels in the mode "
            f"{mode!r}, and only squares in the modes {' and '.join(CROPS)} are supported; use "
            f"another model"
        )

    # As in open_clip, where whatever is not bilinear is bicubic.
    interpolation = "bilinear" if images["interpolation"] == "bilinear" else "bicubic"
    return EvalTransform(image_size=height, crop=CROPS[mode], interpolation=interpolation)
