"""Models prepared for inference: folded batch norms and compiled networks."""

import copy
from typing import TypeVar

import torch
from torch import nn

from mldec.backbones.folding import fold_batchnorms
from mldec.backbones.openvino_backbone import convert
from mldec.errors import ConfigError, brief
from mldec.model import Classifier

Model = TypeVar("Model", bound=nn.Module)


def for_inference(
    model: Model,
    image_size: int,
    half: torch.dtype | None,
    *,
    fold: bool,
    compiled: bool = False,
    openvino: bool = False,
) -> Model:
    """Return a model for inference. A folded backbone has new weights, all others are shared.

    `model` is a `Classifier`, or a module that contains one, in evaluation mode. It is returned
    itself if no option is set. For `image_size` and `half` see `fold_batchnorms`. Folded weights
    do not follow later changes. `openvino` converts the backbone, see `openvino_backbone`. Raises
    ConfigError if the compilation fails.
    """
    if not (fold or compiled or openvino):
        return model

    [classifier] = [module for module in model.modules() if isinstance(module, Classifier)]
    parts = {"backbone": classifier.backbone, "head": classifier.head}
    if openvino:
        parts["backbone"] = convert(classifier.backbone, image_size, half)
    # The conversion folds batch norms, and returns the backbone if it fails.
    if fold and parts["backbone"] is classifier.backbone:
        parts["backbone"] = fold_batchnorms(classifier.backbone, image_size, half)
    if compiled:
        device = next(model.parameters()).device
        try:
            # A small function shows whether the compilers of this device work.
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        except Exception as error:
            problem = f"torch.compile fails on {device} ({brief(error)})"
            raise ConfigError(f"--compile: {problem}; omit it") from error
        for name, part in parts.items():
            # Graphs with a dynamic batch size would be slower.
            parts[name] = torch.compile(part, dynamic=False)  # type: ignore[assignment]

    # `deepcopy` takes both parts from its memo instead of copying them.
    return copy.deepcopy(model, {id(getattr(classifier, name)): parts[name] for name in parts})
