"""Copy the content of an untrusted file of tensors into plain containers.

torch's restricted unpickler keeps such a file from running code. It still lets values through that
would end in a traceback or fill the memory: lists that contain themselves, dictionaries whose
methods are replaced, tensors without values.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mldec.errors import CheckpointError

# Values in a whole file. ImageNet-21K has 11 thousand classes, a large network a few thousand
# tensors.
MAX_VALUES = 1_000_000
MAX_DEPTH = 20
MAX_TEXT = 100_000  # characters
TENSOR_TYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
}
TENSOR_TYPES |= {torch.int64, torch.int32, torch.int16, torch.int8}


def plain(state: Any, path: Path) -> Any:
    """Copy a file's content into exact dict, list, tuple, str, numbers and dense tensors.

    The copy drops the attributes that objects in the file carry, such as an OrderedDict's
    `_metadata` or replaced methods.

    Args:
        state: the content of the file, as torch's restricted unpickler returns it.
        path: of the file, for messages and for its size.

    Raises:
        CheckpointError: for a value of any other type, for too many or too deeply nested values,
            and for tensors that together claim more than twice the file's size (twice, because
            tensors may share memory).
    """
    copier = _Copier(path)
    try:
        return copier.copy(state, "the file", 0)
    except TypeError as error:
        # A tensor or a list as a key of a dictionary, or a tensor without a layout.
        raise copier.refused("it", f"holds what no such file does ({error})") from error


class _Copier:
    """Copy a tree of values within a budget of values and bytes.

    Args:
        path: of the file, for messages and for its size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values_left = MAX_VALUES
        self.bytes_left = 2 * path.stat().st_size

    def copy(self, value: Any, part: str, depth: int) -> Any:
        """Copy a value.

        Args:
            value: what to copy.
            part: name of the part of the file that holds the value, for messages.
            depth: number of containers around the value.

        Raises:
            CheckpointError: if a value is of another type than `plain` allows, or a budget is
                spent.
        """
        # The depth limit ends the recursion into a container that contains itself.
        self.values_left -= 1
        if self.values_left < 0 or depth > MAX_DEPTH:
            raise self.refused(
                part, f"is nested too deep, or the file has more than {MAX_VALUES:,} values"
            )

        if isinstance(value, Tensor):
            return self._tensor(value, part)
        if isinstance(value, dict):
            return self._mapping(value, part, depth)
        if isinstance(value, list):
            return [self.copy(item, part, depth + 1) for item in value]
        if isinstance(value, tuple):
            return tuple([self.copy(item, part, depth + 1) for item in value])
        return self._scalar(value, part)

    def _scalar(self, value: Any, part: str) -> Any:
        if value is None or type(value) in (bool, float):
            return value
        if type(value) is int and abs(value) < 2**64:
            return value

        # `str` makes a plain text of an instance of a subclass.
        if isinstance(value, str) and len(value) <= MAX_TEXT:
            return str(value)
        raise self.refused(part, f"holds a {type(value).__name__} that no such file needs")

    def _tensor(self, value: Tensor, part: str) -> Tensor:
        if not _is_dense(value):
            raise self.refused(
                part, f"holds a tensor that is not dense numbers in memory ({value.dtype})"
            )

        # A tensor with a stride of 0 claims any number of elements for the memory of one.
        self.bytes_left -= value.numel() * value.element_size()
        if self.bytes_left < 0:
            raise self.refused(part, "holds tensors that claim more than the whole file has")
        return Tensor.detach(value).resolve_neg()

    def _mapping(self, value: dict[Any, Any], part: str, depth: int) -> dict[Any, Any]:
        # Not `value.items()`: the file may have replaced the methods of the object.
        items = list(dict.items(value))

        copied = {}
        for key, item in items:
            # A key of the top level names a part of the file; deeper values keep the name of
            # theirs.
            names_part = part == "the file" and isinstance(key, str)
            item_part = f"its '{key[:40]}'" if names_part else part
            copied[self.copy(key, part, depth + 1)] = self.copy(item, item_part, depth + 1)
        return copied

    def refused(self, part: str, what: str) -> CheckpointError:
        """Return the error for a part of the file."""
        return CheckpointError(f"{self.path} is refused: {part} {what}")


def _is_dense(value: Tensor) -> bool:
    """Tell whether a tensor is exactly a Tensor or a Parameter, of dense numbers in main memory."""
    kind = type(value) in (Tensor, nn.Parameter)

    return (
        kind
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.dtype in TENSOR_TYPES
    )
