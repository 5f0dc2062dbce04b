"""Modules with random weights, for comparisons to the last digits."""

import torch
from torch import nn


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Return the module in float64, in evaluation mode, with every parameter random."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return module
