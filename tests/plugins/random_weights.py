"""Random modules and inputs in float64, and gradients of losses."""

from typing import Any

import torch
from torch import Tensor, nn


def randomize(module: nn.Module, seed: int = 0) -> Any:
    """Return the module in float64, in evaluation mode, with every parameter random."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return module


def batch_norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def randomize_norms(network: nn.Module) -> Any:
    """Return the network in evaluation mode, with random batch norms."""
    torch.manual_seed(0)
    for norm in batch_norms(network):
        for tensor in (norm.running_mean, norm.bias):
            nn.init.normal_(tensor, std=0.1)
        for tensor in (norm.running_var, norm.weight):
            nn.init.uniform_(tensor, 0.5, 1.5)
    return network.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Return normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_gradient(loss: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss and its gradient with respect to the logits."""
    logits = logits.detach().requires_grad_()
    value = loss(logits, targets)
    return value.detach(), torch.autograd.grad(value, logits)[0]
