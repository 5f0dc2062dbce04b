"""From the features of an image network to tokens [B, N, C], tried once without memory."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

# B batch, H and W height and width of a map, N tokens, C width of the features


def misfit(features: str, width: int) -> ValueError:
    """Return the error for features that are neither one map nor one sequence of tokens."""
    return ValueError(f"its features are {features}, not one map or sequence of {width} channels")


# Any: timm's networks have no common interface that a type checker could know.
def norm_behind_pooling(network: Any) -> str | None:
    """Return the path of the norm behind the pooling: `head.norm` of ConvNeXt, often None."""
    for path in ("head.norm", "fc_norm"):
        try:
            # Only norms over channels have this attribute. A norm of another width comes after a
            # further layer.
            if tuple(network.get_submodule(path).normalized_shape) == (network.num_features,):
                return path
        except AttributeError:
            continue
    return None


def timm_tokens(network: Any, images: Tensor, *, norm_path: str | None) -> Tensor:
    """Compute the tokens [B, N, C] of a network of timm, without its class and register tokens.

    Its features are a map [B, C, H, W] or [B, H, W, C], or a sequence [B, N, C]. A norm inside the
    network may be applied to them.
    """
    features = network.forward_features(images)
    shape = features.shape if isinstance(features, Tensor) else ()
    channels_last = len(shape) == 3 or getattr(network, "output_fmt", "NCHW") == "NHWC"
    if len(shape) not in (3, 4) or shape[-1 if channels_last else 1] != network.num_features:
        raise misfit(
            f"{list(shape)}" if shape else f"a {type(features).__name__}", network.num_features
        )

    # Before the map is flattened: the norm is made for the layout of its own network.
    if norm_path:
        features = network.get_submodule(norm_path)(features)

    if len(shape) == 3:
        # The attribute is missing or None on a CNN, and missing on VOLO, which has one class token.
        num_prefix = getattr(network, "num_prefix_tokens", hasattr(network, "cls_token")) or 0
        return features[:, int(num_prefix) :]
    return features.flatten(1, 2) if channels_last else features.flatten(2).transpose(1, 2)


def check_patches(network: Any, tokens: Tensor) -> None:
    """Raise a `ValueError` for no tokens, or more than patches: some are then class tokens."""
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    most = math.prod(grid) if grid else tokens.shape[1]
    if not 0 < tokens.shape[1] <= most:
        raise misfit(
            f"{tokens.shape[1]} tokens where there are {most} patches", network.num_features
        )


def try_out(module: nn.Module, image_shape: tuple[int, ...]) -> tuple[Tensor, set[str]]:
    """Run one image through a module from images to tokens, on the meta device, in evaluation mode.

    The image has the shape [C, H, W]. Returns the tokens [1, N, C], without values, and the names
    of the parameters that they do not depend on.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = [name for name, _ in module.named_parameters()]
    dtype = next(value.dtype for value in own.values() if value.is_floating_point())
    modes = {part: part.training for part in module.modules()}

    # The meta device has shapes but no values: the trial takes no memory and draws no random
    # numbers.
    module.eval()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            meta = {name: torch.empty_like(value, device="meta") for name, value in own.items()}
            inputs = [meta[name].requires_grad_() for name in names]
            image = torch.empty(1, *image_shape, dtype=dtype, device="meta")
            tokens = functional_call(module, meta, (image,))
            gradients = torch.autograd.grad(tokens.sum(), inputs, allow_unused=True)
    finally:
        for part, training in modes.items():
            part.training = training

    pairs = zip(names, gradients, strict=True)
    return tokens, {name for name, gradient in pairs if gradient is None}


def freeze(module: nn.Module, names: set[str]) -> None:
    """Freeze parameters that the tokens do not depend on, which are kept so that weights fit.

    They get no gradient, which DDP would refuse, and weight decay would shrink them to zero.
    """
    for name in names:
        module.get_parameter(name).requires_grad_(False)
