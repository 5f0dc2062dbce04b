"""Models that a file describes, held against the tensors that are to fill them: before they take time and memory."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from mldec.errors import CheckpointError

# What no file is too small for: the value of a setting, parameters and buffers, and the numbers in all of them.
FREE_VALUE, FREE_TENSORS, FREE_NUMBERS = 2**16, 1000, 10**7


def check_sizes(nodes: Iterable[Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse numbers of layers, widths and the like that the tensors beside them rule out.

    Raises:
        CheckpointError: for a whole number that is larger than there are numbers in all tensors.
    """
    largest = max(FREE_VALUE, sum(tensor.numel() for tensor in tensors.values()))
    for node in nodes:
        for number in _whole_numbers(node):
            if abs(number) > largest:
                raise CheckpointError(
                    f"the model in {path} cannot be built: a setting of it is {number}, "
                    f"and the whole file has fewer numbers"
                )


@contextmanager
def limited(tensors: Mapping[str, Tensor], path: Path) -> Iterator[None]:
    """Stop the building of a model, in this thread, that outgrows the tensors that are to fill it.

    What a constructor makes and then replaces counts too, so that the limit is a multiple, and more for a small file.

    Raises:
        CheckpointError: as soon as it has too many parameters and buffers, or too large ones.
    """
    most_tensors = 2 * len(tensors) + FREE_TENSORS
    most_numbers = 2 * sum(tensor.numel() for tensor in tensors.values()) + FREE_NUMBERS
    count = numbers = 0
    exceeded = False
    thread = threading.get_ident()  # the hooks are those of the whole process

    def registered(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal count, numbers, exceeded
        if tensor is None or threading.get_ident() != thread:
            return
        count += 1
        numbers += tensor.numel()
        exceeded = exceeded or count > most_tensors or numbers > most_numbers
        if exceeded:
            raise CheckpointError("too large")

    hooks = [
        register_module_parameter_registration_hook(registered),
        register_module_buffer_registration_hook(registered),
    ]
    try:
        yield
    except Exception as error:  # a constructor may have made another error of ours
        if exceeded:
            raise CheckpointError(
                f"the model in {path} cannot be built: it is larger than all that the file holds"
            ) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _whole_numbers(item)
