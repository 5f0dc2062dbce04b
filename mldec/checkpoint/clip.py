"""Convert models of open_clip to checkpoints: `clip:MODEL[:WEIGHTS]` or `clip:FOLDER`.

The checkpoint contains the image tower, the preprocessing, and the scale and bias of the logits.
The text tower computes the word vectors of the classes.
"""

from pathlib import Path
from typing import Any

import torch

from mldec.checkpoint.state import Checkpoint
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import CheckpointError
from mldec.words.encoder import ClipModel, open_model
from mldec.words.types import PROMPT, VectorOrigin

# Resize modes of open_clip -> crop of an `EvalTransform`.
CROPS = {"squash": None, "shortest": 1.0}


def convert(source: str) -> tuple[Path, Checkpoint]:
    """Return the path of the weights of an open_clip model, and the checkpoint of its image tower.

    The config has no data set and no loss. Raises CheckpointError if the preprocessing is not
    supported.
    """
    opened = open_model(source)
    model: Any = opened.model
    transform = _transform(opened)
    has_bias = model.logit_bias is not None

    tensors = {f"backbone.network.{name}": t for name, t in model.visual.state_dict().items()}
    # The shape of the scalars is [1] in a few models.
    tensors["head.logit_scale"] = model.logit_scale.detach().reshape(())
    if has_bias:
        tensors["head.logit_bias"] = model.logit_bias.detach().reshape(())

    name = Path(opened.source.model.partition(":")[2] or opened.source.model).name
    backbone = {
        "_target_": "mldec.backbones.OpenClipBackbone",
        "name": name,
        "embed_dim": opened.width,
        "vision": opened.config["vision_cfg"],
        "image_size": transform.image_size,
        # The activation is a property of the weights, not of the model name.
        "quick_gelu": opened.config["quick_gelu"],
        "mean": _per_channel(opened.preprocessing["mean"]),
        "std": _per_channel(opened.preprocessing["std"]),
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
        },
        # Logits without a bias are only comparable between classes.
        classes=Classes(
            (),
            exclusive=not has_bias,
            word_vectors=torch.zeros(0, opened.width),
            origin=VectorOrigin(opened.source.absolute, opened.sha256, (PROMPT,)),
        ),
        transform=transform,
        model=tensors,
    )
    return opened.weights, checkpoint


def _per_channel(values: Any) -> list[float]:
    """Return one value per channel, from three values or one for all channels."""
    channels = values if isinstance(values, list | tuple) else [values] * 3
    return [float(value) for value in channels]


def _transform(opened: ClipModel) -> EvalTransform:
    """Return the transform of a model up to the normalization, which is in the backbone."""
    images = opened.preprocessing
    size = images["size"]
    mode = images["resize_mode"]
    height, width = (size, size) if isinstance(size, int) else size
    if height != width or mode not in CROPS:
        raise CheckpointError(
            f"{opened.source.text}: its preprocessing to {height} x {width} pixels with "
            f"resize_mode={mode!r} is not supported; choose a square model with resize_mode "
            f"{' or '.join(CROPS)}"
        )

    # open_clip uses bicubic for every other value.
    interpolation = "bilinear" if images["interpolation"] == "bilinear" else "bicubic"
    return EvalTransform(image_size=height, crop=CROPS[mode], interpolation=interpolation)
