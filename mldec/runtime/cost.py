"""Count the multiply-accumulates per image and the parameters of a model, without computing them.

The GFLOPs of the paper are multiply-accumulates: one product and one sum together count once.
"""

import torch
from torch import Tensor, nn

# Documented, though the module has an underscore.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def multiply_accumulates(
    model: nn.Module, image_size: int, queries: tuple[int, int] | None = None
) -> float:
    """Count the multiply-accumulates per image in evaluation mode, without computing anything.

    Work that does not depend on the image, such as the projection of the queries, counts in full,
    as in the paper. Only products count (convolutions, linear layers, attention), not norms,
    activations and pooling.

    Args:
        model: images [1, 3, H, W] -> anything; on any device, including meta. It is left as it was.
        image_size: pixels per side.
        queries: shape [K, D_w] of the word vectors that a zero-shot model takes beside the image.

    Returns:
        The number of multiply-accumulates, not in billions.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Fake tensors claim to be on the CPU: the heads switch autocast off, which does not accept
        # the device "meta".
        with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
            state = {
                name: torch.empty(value.shape, dtype=value.dtype, device="cpu")
                for name, value in named
            }

            shapes: list[tuple[int, ...]] = [(1, 3, image_size, image_size)]
            if queries:
                shapes.append(queries)
            inputs = tuple(torch.empty(shape, device="cpu") for shape in shapes)
            functional_call(model, state, inputs)
    finally:
        # Module by module: a part that was frozen in evaluation mode stays there.
        for module in training:
            module.training = True

    # torch counts a product and a sum as two.
    return counter.get_total_flops() / 2


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the trainable parameters, and all parameters.

    All parameters include the frozen queries of the head, although it keeps them as a buffer.
    """
    trainable = sum(value.numel() for value in model.parameters() if value.requires_grad)
    frozen = sum(value.numel() for value in model.parameters() if not value.requires_grad)

    queries = sum(
        value.numel()
        for name, value in model.named_buffers()
        if name.rpartition(".")[2] == "queries"
    )
    return trainable, trainable + frozen + queries
