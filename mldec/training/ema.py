"""Exponential moving average of the weights."""

import copy

import torch
from torch import Tensor, nn


class ModelEma:
    """Exponential moving average of all parameters and buffers of a model.

    It gives the same values as timm's ModelEmaV3. That class collects the state of both models in
    each step, whereas here the tensors are collected once, so they must stay the same objects:
    `load_state_dict` is fine, but moving the model to another device is not.

    Args:
        model: The model, on its final device.
        decay: Factor of the average in each update, between 0 and 1.

    Attributes:
        module: Copy of the model with the averaged values, in evaluation mode.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        # The copy shares no tensors. Its batch norms always use the averaged statistics.
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

        # Integers, such as the number of batches of a batch norm, are copied.
        self._averages: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._integer_copies: list[Tensor] = []
        self._integers: list[Tensor] = []
        states = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for average, value in states:
            if value.is_floating_point():
                self._averages.append(average)
                self._weights.append(value)
            else:
                self._integer_copies.append(average)
                self._integers.append(value)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current values of the model."""
        # One call for all tensors, because a kernel launch per tensor is slow on a GPU.
        torch._foreach_lerp_(self._averages, self._weights, weight=1.0 - self.decay)
        if self._integers:
            torch._foreach_copy_(self._integer_copies, self._integers)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the average to the current values of the model."""
        torch._foreach_copy_(self._averages + self._integer_copies, self._weights + self._integers)
