"""Conversion of backbone features to tokens [B, N, C], and its validation on the meta device."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

# Shapes: B batch, H and W height and width of a feature map, N tokens, C feature width


# timm's networks have no common type, so they are annotated with Any.
def norm_behind_pooling(network: Any) -> str | None:
    """Return the path of the norm after the pooling, such as `head.norm` of ConvNeXt, or None."""
    for path in ("head.norm", "fc_norm"):
        try:
            # Only norms over channels have this attribute. If the width differs, another layer
            # precedes the norm.
            if tuple(network.get_submodule(path).normalized_shape) == (network.num_features,):
                return path
        except AttributeError:
            continue
    return None


def classifier_paths(network: Any) -> tuple[str, ...]:
    """Return the paths of the classifiers of a timm network. Distilled networks have two."""
    paths = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    return (paths,) if isinstance(paths, str) else tuple(paths)


def timm_tokens(network: Any, images: Tensor, *, norm_path: str | None) -> Tensor:
    """Compute the tokens [B, N, C] of a timm network, without class and register tokens.

    Its features must be [B, C, H, W], [B, H, W, C] or [B, N, C]. The images are normalized.
    `norm_path` is the path of a norm in the network that is applied to the features, or None.
    """
    return as_tokens(network, network.forward_features(images), norm_path=norm_path)


def as_tokens(network: Any, features: Any, *, norm_path: str | None) -> Tensor:
    """Convert the features of a timm network to tokens; see `timm_tokens`."""
    shape = features.shape if isinstance(features, Tensor) else ()
    channels_last = len(shape) == 3 or getattr(network, "output_fmt", "NCHW") == "NHWC"
    channel_dim = -1 if channels_last else 1
    if len(shape) not in (3, 4) or shape[channel_dim] != network.num_features:
        found = f"{list(shape)}" if shape else f"a {type(features).__name__}"
        raise ValueError(
            f"the features are {found}, not one map or sequence of {network.num_features} channels"
        )

    # Apply the norm before flattening, because it expects the layout of its network.
    if norm_path:
        features = network.get_submodule(norm_path)(features)

    if len(shape) == 3:
        # CNNs have no attribute `num_prefix_tokens` or None. VOLO has none, but one class token.
        num_prefix = getattr(network, "num_prefix_tokens", hasattr(network, "cls_token")) or 0
        return features[:, int(num_prefix) :]
    if channels_last:
        return features.flatten(1, 2)
    return features.flatten(2).transpose(1, 2)


def check_patches(network: Any, tokens: Tensor) -> None:
    """Raise ValueError if there are no tokens, or class tokens in addition to the patches."""
    num_tokens = tokens.shape[1]
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    num_patches = math.prod(grid) if grid else num_tokens
    if not 0 < num_tokens <= num_patches:
        raise ValueError(f"the features are {num_tokens} tokens for {num_patches} patches")


def try_out(module: nn.Module, image_shape: tuple[int, ...]) -> tuple[Tensor, set[str]]:
    """Run one image [C, H, W] through a backbone on the meta device, in evaluation mode.

    Returns the tokens [1, N, C] without values, and the names of the unused parameters.
    """
    parameters = dict(module.named_parameters())
    tensors = parameters | dict(module.named_buffers())
    dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())
    modes = {part: part.training for part in module.modules()}

    # Meta tensors have no values. They take no memory and draw no random numbers.
    module.eval()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            meta = {}
            for name, value in tensors.items():
                meta[name] = torch.empty_like(value, device="meta")
            inputs = [meta[name].requires_grad_() for name in parameters]
            image = torch.empty(1, *image_shape, dtype=dtype, device="meta")
            tokens = functional_call(module, meta, (image,))
            gradients = torch.autograd.grad(tokens.sum(), inputs, allow_unused=True)
    finally:
        for part, training in modes.items():
            part.training = training

    by_name = dict(zip(parameters, gradients, strict=True))
    return tokens, {name for name, gradient in by_name.items() if gradient is None}


def freeze(module: nn.Module, names: set[str]) -> None:
    """Freeze unused parameters, which are kept so that pretrained weights load strictly.

    DDP raises an error for parameters without a gradient, and weight decay would shrink them.
    """
    for name in names:
        module.get_parameter(name).requires_grad_(False)
