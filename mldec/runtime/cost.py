"""Count the work of one image and the parameters of a model, without computing anything.

The GFLOPs of the paper are multiply-accumulates: one product and one sum together count once.
"""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)  # documented, though the name has an underscore
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def multiply_accumulates(
    model: nn.Module, image_size: int, queries: tuple[int, int] | None = None
) -> float:
    """Count the multiply-accumulates of one image in evaluation, without computing anything.

    What does not depend on the image, such as the projection of the queries, counts in full, as in the paper. Only
    products count (convolutions, linear layers, attention): no norms, activations, pooling.

    Args:
        model: images [1, 3, H, W] -> anything; on any device, the meta device too. It is left as it was.
        image_size: pixels a side.
        queries: shape [K, D_w] of the word vectors that a zero-shot model takes beside the image.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Tensors without values that say they are on the CPU: autocast, which the heads switch off, knows no "meta".
        with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
            state = {
                name: torch.empty(value.shape, dtype=value.dtype, device="cpu")
                for name, value in named
            }
            shapes = [(1, 3, image_size, image_size), *([queries] if queries else [])]
            functional_call(
                model, state, tuple(torch.empty(shape, device="cpu") for shape in shapes)
            )
    finally:
        for module in training:
            module.training = True
    return counter.get_total_flops() / 2


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the trainable parameters, and all of them with the frozen queries, which the head keeps as a buffer."""
    trainable = sum(value.numel() for value in model.parameters() if value.requires_grad)
    frozen = sum(value.numel() for value in model.parameters() if not value.requires_grad)
    queries = sum(
        value.numel()
        for name, value in model.named_buffers()
        if name.rpartition(".")[2] == "queries"
    )
    return trainable, trainable + frozen + queries
