"""Fold batch norms into convolutions, for inference."""

import copy
from typing import Any

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

MAX_ERROR = 1e-3  # relative to the norm of the output; rounding errors are near 1e-6


@torch.no_grad()
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # and without its search
def fold_batchnorms(
    backbone: nn.Module, image_size: int, half: torch.dtype | None = None
) -> nn.Module:
    """Return a copy of a backbone whose batch norms are folded into the preceding convolutions.

    Convolutions are matched, and the result is validated, on a random image uint8 [1, 3, S, S].
    Batch norms without a convolution directly before them are kept. The backbone itself is returned
    if it has no batch norms, or if the tokens differ by more than rounding, as with weights that
    are standardized in each forward pass. `half` is the number format of the convolutions for
    autocast, which would otherwise convert their weights in each forward pass.
    """
    if not any(isinstance(module, nn.BatchNorm2d) for module in backbone.modules()):
        return backbone

    folded = copy.deepcopy(backbone)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 3, image_size, image_size)
    image = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    image = image.to(next(backbone.parameters()).device)
    expected, pairs = _find_pairs(folded, image)
    for norm, conv in pairs.items():
        statistics = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
        conv.weight, conv.bias = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics)

    for module in list(folded.modules()):
        for name, child in list(module.named_children()):
            if child in pairs:
                # timm's layer includes the activation.
                rest = child.act if isinstance(child, BatchNormAct2d) else nn.Identity()
                setattr(module, name, rest)

    error = (folded(image) - expected).norm()
    for module in folded.modules():
        if type(module) is nn.Conv2d and half is not None:
            module.to(half)
    return folded if error <= MAX_ERROR * expected.norm() else backbone


def _find_pairs(network: nn.Module, image: Tensor) -> tuple[Tensor, dict[Any, Any]]:
    """Return the output, and the convolution directly before each batch norm."""
    pairs: dict[Any, Any] = {}
    last: tuple[Any, Any] = (None, None)  # the last convolution and its output

    def after_conv(conv: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal last
        last = (conv, output)

    def before_norm(norm: nn.Module, args: Any) -> None:
        conv, output = last
        if args[0] is output and norm.running_mean is not None:
            pairs[norm] = conv

    hooks = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_hook(after_conv))
        elif type(module) in (nn.BatchNorm2d, BatchNormAct2d):
            hooks.append(module.register_forward_pre_hook(before_norm))
    output = network(image)
    for hook in hooks:
        hook.remove()
    return output, pairs
