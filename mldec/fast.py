"""A faster network for evaluation: batch norms folded into the convolutions before them.

In evaluation a batch norm is one factor and one shift a channel, and so can be part of the convolution that it follows.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Model = TypeVar("Model", bound=nn.Module)

_NORMS = (nn.BatchNorm2d, BatchNormAct2d)  # and nothing derived from them, which may do more


def fast(model: Model, device: torch.device) -> Model:
    """Make a classifier faster, for evaluation only: the very model, in evaluation mode, folded, on the device.

    The logits are within 1e-3 of those of the plain model in float32. The precision is that of the caller's autocast.
    The model can no longer be trained, and its state no longer fits a checkpoint.
    """
    fold_batch_norm(model)
    return model.to(device)


def fold_batch_norm(model: nn.Module) -> int:
    """Fold each BatchNorm2d of the backbone that follows a Conv2d into it, in place, and put the model in evaluation.

    A norm is folded if a trial image shows that it alone takes what the convolution gives, and that each of the two
    runs once and uses its parameters as they are, which weight standardisation does not. Every other norm stays, and
    all of them do where the trial does not work. The activation of a BatchNormAct2d stays. Tensors are replaced, not
    written to: a state dict from before, or a module that has the same parameter, keeps its values.

    Args:
        model: a classifier with a `backbone`, or a network that takes images [B, 3, H, W].

    Returns:
        How many norms were folded.
    """
    network: Any = getattr(model.eval(), "backbone", model)
    names = list(network.named_modules(remove_duplicate=False))
    if not any(type(module) in _NORMS for _, module in names):
        return 0
    norm: Any
    with torch.inference_mode(False), torch.no_grad():
        pairs = _pairs(network)
        for conv, norm in pairs:
            conv.weight, conv.bias = fuse_conv_bn_weights(
                conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
            rest = norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity().eval()  # its drop is for training
            for name in [name for name, module in names if module is norm]:  # it may have several
                network.set_submodule(name, rest)
    return len(pairs)


class _Trace(TorchDispatchMode):
    """Note the arguments of each convolution, by what it gives, and of each norm, and how often a tensor is used."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions: dict[int, tuple[Any, ...]] = {}
        self.norms: list[tuple[Any, ...]] = []
        self.uses: Counter[int] = Counter()
        self._alive: list[Any] = []  # so that no two tensors have the same id

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive += [args, kwargs, result]
        self.uses.update(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if func is torch.ops.aten.convolution.default:
            self.convolutions[id(result)] = args
        elif func is torch.ops.aten.native_batch_norm.default:
            self.norms.append(args)
        return result


def _pairs(network: nn.Module) -> list[tuple[nn.Conv2d, nn.Module]]:
    """Find the convolutions and norms that are one after the other, and used nowhere else, with a trial image."""
    # Not with functional_call, which does not give back the tensors of a module that has two names.
    dtype = next(network.parameters()).dtype
    holders: list[Any] = [
        (module, own) for module in network.modules() for own in (module._parameters, module._buffers)
    ]
    kept = [dict(own) for _, own in holders]
    owners: dict[int, tuple[nn.Module, str]] = {}
    try:
        # Tensors of the meta device have shapes but no values: no memory, little time, no random numbers.
        for module, own in holders:
            for key, value in own.items():
                if value is not None:
                    own[key] = torch.empty_like(value, device="meta")
                elif key == "bias" and isinstance(module, nn.Conv2d):  # it will have one: is it used?
                    own[key] = torch.empty(module.out_channels, dtype=dtype, device="meta")
                if own[key] is not None:
                    owners[id(own[key])] = (module, key)
        for height, width in _sizes(network):
            try:
                with _Trace() as trace:
                    result = network(torch.empty(1, 3, height, width, dtype=dtype, device="meta"))
            except Exception:  # whatever does not work with this size, or without values
                continue
            trace.uses.update(map(id, tree_leaves(result)))
            return _matches(trace, owners)
    finally:
        for (_, own), values in zip(holders, kept, strict=True):
            own.update(values)
    return []


def _sizes(network: nn.Module) -> list[tuple[int, int]]:
    """Return sizes of image to try: those that the network was built for, then a common one."""
    found = [getattr(module, "img_size", None) for module in network.modules()]
    found += [getattr(module, "pretrained_cfg", {}).get("input_size", ())[-2:] for module in network.modules()]
    return list(dict.fromkeys(size for size in [*found, (224, 224)] if isinstance(size, tuple) and len(size) == 2))


def _matches(trace: _Trace, owners: dict[int, tuple[nn.Module, str]]) -> list[tuple[nn.Conv2d, nn.Module]]:
    """Choose from what ran; `owners` tells whose a parameter or buffer is, by its id."""
    found = []
    for features, *state, training, _, _ in trace.norms:
        _, weight, bias, _, _, _, transposed, *_ = trace.convolutions.get(id(features), [None] * 9)
        tensors = [tensor for tensor in (features, weight, bias, *state) if tensor is not None]
        if training or transposed or any(trace.uses[id(tensor)] != 1 for tensor in tensors):
            continue
        conv, norm = owners.get(id(weight), (None, ""))[0], owners.get(id(state[-1]), (None, ""))[0]
        plain = owners.get(id(weight)) == (conv, "weight") and owners.get(id(bias)) == (conv, "bias")
        if plain and isinstance(conv, nn.Conv2d) and norm is not None and type(norm) in _NORMS:
            found.append((conv, norm))
    return found
