"""Models that a file describes, held against the tensors that are to fill them: before they take time and memory."""

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
                    f"the model in {path} cannot be built: one of its settings is {number}, more than all the "
                    f"numbers in the file"
                )


class _Limit:
    """What a model that is being built may still register."""

    def __init__(self, tensors: int, numbers: int) -> None:
        self.tensors, self.numbers = tensors, numbers

    @property
    def exceeded(self) -> bool:
        return self.tensors < 0 or self.numbers < 0

    def take(self, tensor: Tensor) -> None:
        """Count a parameter or a buffer."""
        self.tensors -= 1
        self.numbers -= tensor.numel()
        if self.exceeded:
            raise CheckpointError("the model is too large")


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


def _registered(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    limit = _limit.get()
    if limit is not None and tensor is not None:
        limit.take(tensor)


# Once and for all: torch walks over its hooks without a lock, so that none may come or go while another thread builds.
register_module_parameter_registration_hook(_registered)
register_module_buffer_registration_hook(_registered)


@contextmanager
def limited(tensors: Mapping[str, Tensor], path: Path) -> Iterator[None]:
    """Stop the building of a model that outgrows the tensors that are to fill it.

    What a constructor makes and then replaces counts too, so that the limit is a multiple, and more for a small file.

    Raises:
        CheckpointError: as soon as it has too many parameters and buffers, or too large ones.
    """
    numbers = sum(tensor.numel() for tensor in tensors.values())
    limit = _Limit(2 * len(tensors) + FREE_TENSORS, 2 * numbers + FREE_NUMBERS)
    token = _limit.set(limit)
    try:
        yield
    except Exception as error:  # a constructor may have made another error of ours
        if limit.exceeded:
            raise CheckpointError(
                f"the model in {path} cannot be built: it is larger than all that the file holds"
            ) from error
        raise
    finally:
        _limit.reset(token)


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _whole_numbers(item)
