"""Size limits for a model that a file describes, enforced while it is built.

A config in a stranger's file can ask for a model of any size. The tensors that are to fill the
model bound what it can reasonably need, so a larger one is refused before it takes time and memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from mldec.errors import CheckpointError

# Allowances that hold for any file, however small: the value of a setting, the number of parameters
# and buffers, and the number of elements in all of them.
FREE_VALUE, FREE_TENSORS, FREE_NUMBERS = 2**16, 1000, 10**7


def check_sizes(nodes: Iterable[Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse settings, such as a number of layers or a width, that the tensors rule out.

    Args:
        nodes: the config nodes of the parts, as nested mappings and lists.
        tensors: the weights that are to fill the model, by name.
        path: of the file, for messages.

    Raises:
        CheckpointError: if a whole number in the nodes exceeds the number of elements in all
            tensors.
    """
    largest = max(FREE_VALUE, sum(tensor.numel() for tensor in tensors.values()))

    for node in nodes:
        for number in _whole_numbers(node):
            if abs(number) > largest:
                raise CheckpointError(
                    f"the model in {path} cannot be built: one of its settings is {number}, "
                    f"more than all the numbers in the file"
                )


class _Limit:
    """What a model under construction may still register.

    Args:
        tensors: number of parameters and buffers.
        numbers: number of elements in all of them.
    """

    def __init__(self, tensors: int, numbers: int) -> None:
        self.tensors, self.numbers = tensors, numbers

    @property
    def exceeded(self) -> bool:
        """Whether the model has registered more than it may."""
        return self.tensors < 0 or self.numbers < 0

    def take(self, tensor: Tensor) -> None:
        """Count a parameter or a buffer.

        Raises:
            CheckpointError: if it is more than the model may register.
        """
        self.tensors -= 1
        self.numbers -= tensor.numel()

        if self.exceeded:
            raise CheckpointError("the model is too large")


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


def _registered(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    limit = _limit.get()
    if limit is not None and tensor is not None:
        limit.take(tensor)


# The hooks are registered once, at import, and never removed: torch iterates over its hooks without
# a lock, so none may come or go while another thread builds a model.
register_module_parameter_registration_hook(_registered)
register_module_buffer_registration_hook(_registered)


@contextmanager
def limited(tensors: Mapping[str, Tensor], path: Path) -> Iterator[None]:
    """Stop the construction of a model that outgrows the tensors that are to fill it.

    Modules that a constructor creates and then replaces count too. The limit is therefore twice the
    size of the tensors, plus a fixed allowance for small files.

    Args:
        tensors: the weights that are to fill the model, by name.
        path: of the file, for messages.

    Raises:
        CheckpointError: as soon as the model has too many parameters and buffers, or too large
            ones.
    """
    numbers = sum(tensor.numel() for tensor in tensors.values())
    limit = _Limit(2 * len(tensors) + FREE_TENSORS, 2 * numbers + FREE_NUMBERS)

    token = _limit.set(limit)
    try:
        yield
    except Exception as error:
        # A constructor may have caught our error and raised one of its own, so ask the limit
        # itself.
        if limit.exceeded:
            raise CheckpointError(
                f"the model in {path} cannot be built: it is larger than all that the file holds"
            ) from error
        raise
    finally:
        _limit.reset(token)


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yield the whole numbers in nested mappings, lists and tuples."""
    if isinstance(value, int):
        yield value

    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _whole_numbers(item)
