"""Models prepared for inference: folded batch norms and compiled networks."""

import copy
from typing import TypeVar

import torch
from torch import nn

from mldec.backbones.folding import fold_batchnorms
from mldec.errors import ConfigError, brief
from mldec.model import Classifier

Model = TypeVar("Model", bound=nn.Module)


def for_inference(
    model: Model,
    image_size: int,
    *,
    fold: bool,
    half: torch.dtype | None = None,
    compiled: bool = False,
) -> Model:
    """Return a copy of a model for inference. The weights of its head are shared.

    Args:
        model: A `Classifier`, or a module that contains one, in evaluation mode.
        image_size: Pixels per side of the images.
        fold: Whether to fold batch norms. Later changes of the backbone are then ignored.
        half: Number format of autocast, see `fold_batchnorms`.
        compiled: Whether to compile backbone and head.
    """
    if not (fold or compiled):
        return model

    [classifier] = [module for module in model.modules() if isinstance(module, Classifier)]
    backbone = classifier.backbone
    head = classifier.head
    if fold:
        backbone = fold_batchnorms(backbone, image_size, half)
    if compiled:
        # By default, torch compiles slower graphs with a dynamic batch size after a second size.
        backbone = torch.compile(backbone, dynamic=False)  # type: ignore[assignment]
        head = torch.compile(head, dynamic=False)  # type: ignore[assignment]
    # `deepcopy` takes these modules from its memo instead of copying them.
    return copy.deepcopy(model, {id(classifier.backbone): backbone, id(classifier.head): head})


def check_compile(device: torch.device) -> None:
    """Raise ConfigError unless torch.compile works on a device, by compiling a small function."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # depends on the device and the missing compiler
        raise ConfigError(
            f"--compile: torch.compile does not work on {device} ({brief(error)}); omit it"
        ) from error
