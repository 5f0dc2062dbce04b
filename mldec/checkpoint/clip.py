"""Models of open_clip as checkpoints without training: `clip:MODEL[:WEIGHTS]` or `clip:FOLDER`.

What a checkpoint of ours takes of such a model is the image tower, how it wants its images, and the
scale and the offset of the logits. The text tower makes the word vectors of the classes.
"""

from pathlib import Path
from typing import Any

import torch

from mldec.checkpoint.state import Checkpoint
from mldec.config.compose import option
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import CheckpointError
from mldec.words.encoder import ClipModel, open_model
from mldec.words.types import PROMPT, VectorOrigin

# open_clip's ways to make an image square, as the crop of an `EvalTransform`.
CROPS = {"squash": None, "shortest": 1.0}


def convert(source: str) -> tuple[Path, Checkpoint]:
    """Open a model of open_clip; return the path of its weights, and its image side."""
    opened = open_model(source)
    model: Any = opened.model
    transform = _transform(opened)
    has_bias = model.logit_bias is not None

    tensors = {f"backbone.network.{name}": t for name, t in model.visual.state_dict().items()}
    for name in ("logit_scale", "logit_bias") if has_bias else ("logit_scale",):
        # A few models have a tensor of one number.
        tensors[f"head.{name}"] = getattr(model, name).detach().reshape(())

    # The last part of the address.
    name = Path(opened.source.model.partition(":")[2] or opened.source.model).name
    backbone = {
        "_target_": "mldec.backbones.OpenClipBackbone",
        "name": name,
        "embed_dim": opened.width,
        "vision": opened.config["vision_cfg"],
        "image_size": transform.image_size,
        "quick_gelu": opened.config["quick_gelu"],
        "mean": _of_channels(opened.preprocessing["mean"]),
        "std": _of_channels(opened.preprocessing["std"]),
    }
    data = {
        "image_size": transform.image_size,
        "test_size": None,
        "test_crop": transform.crop,
        "test_interpolation": transform.interpolation,
        "resize": transform.resize,
    }

    checkpoint = Checkpoint(
        config={
            "name": name,
            "data": data,
            "backbone": backbone,
            "head": {"_target_": "mldec.heads.Cosine", "bias": has_bias},
            "loss": option("loss", "bce"),
        },
        # Without an offset of its own, a logit has a meaning beside those of other classes only.
        classes=Classes(
            (),
            exclusive=not has_bias,
            queries=torch.zeros(0, opened.width),
            origin=VectorOrigin(opened.source.anywhere, opened.sha256, (PROMPT,)),
        ),
        transform=transform,
        model=tensors,
    )
    return opened.weights, checkpoint


def _of_channels(values: Any) -> list[float]:
    """Return a number per channel of what open_clip takes: three, or one for all."""
    channels = values if isinstance(values, list | tuple) else [values] * 3
    return [float(value) for value in channels]


def _transform(opened: ClipModel) -> EvalTransform:
    """Return how a model wants its images, as far as the pixels before the normalisation."""
    images = opened.preprocessing
    size, mode = images["size"], images["resize_mode"]
    height, width = (size, size) if isinstance(size, int) else size
    if height != width or mode not in CROPS:
        raise CheckpointError(
            f"{opened.source.text}: it resizes images to {height} x {width} pixels in the mode "
            f"{mode!r}, and only squares in the modes {' and '.join(CROPS)} are supported"
        )

    # As in open_clip, where whatever is not bilinear is bicubic.
    interpolation = "bilinear" if images["interpolation"] == "bilinear" else "bicubic"
    return EvalTransform(image_size=height, crop=CROPS[mode], interpolation=interpolation)
