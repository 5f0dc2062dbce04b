"""What a file of tensors from a stranger may hold, checked value by value before anything is done with it.

torch's restricted unpickler keeps such a file from running code. It still lets through what would end in a traceback
or fill the memory: lists that hold themselves, dictionaries whose methods are shadowed, tensors without values,
archives that unpack to a thousand times their size.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from mldec.data.names import names_fault
from mldec.errors import CheckpointError

MAX_VALUES = 1_000_000  # in a whole file; ImageNet-21K has 11 thousand classes, a large network a few thousand tensors
MAX_DEPTH = 20
MAX_TEXT = 100_000  # characters
# What no file is too small for: the value of a setting, parameters and buffers, and the numbers in all of them.
FREE_VALUE, FREE_TENSORS, FREE_NUMBERS = 2**16, 1000, 10**7
TENSOR_TYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
TENSOR_TYPES |= {torch.int64, torch.int32, torch.int16, torch.int8}


def plain(state: Any, path: Path) -> Any:
    """Return a copy of a file's content that is made of exact dict, list, tuple, text, numbers and dense tensors.

    The copy has no attributes of the file's own, such as an OrderedDict's `_metadata` or its methods' replacements.

    Raises:
        CheckpointError: for any other value, for too many or too deep ones, and for tensors that together claim more
            than twice the file's size (twice, because tensors may share their memory).
    """
    values, room = MAX_VALUES, 2 * path.stat().st_size

    def refused(part: str, what: str) -> CheckpointError:
        return CheckpointError(f"{path} is refused: {part} {what}")

    def copy(value: Any, part: str, depth: int) -> Any:
        nonlocal values, room
        values -= 1
        if values < 0 or depth > MAX_DEPTH:
            raise refused(part, f"is nested too deep, or the file has more than {MAX_VALUES:,} values")
        if value is None or type(value) in (bool, float):
            return value
        if (type(value) is int and abs(value) < 2**64) or (isinstance(value, str) and len(value) <= MAX_TEXT):
            return str(value) if isinstance(value, str) else value
        if isinstance(value, Tensor):
            if not _is_dense(value):
                raise refused(part, f"holds a tensor that is not dense numbers in memory ({value.dtype})")
            room -= value.numel() * value.element_size()
            if room < 0:
                raise refused(part, "holds tensors that claim more than the whole file has")
            return Tensor.detach(value).resolve_neg()
        if isinstance(value, dict):
            items = list(dict.items(value))
            return {copy(key, part, depth + 1): copy(item, _name(key, part), depth + 1) for key, item in items}
        if isinstance(value, list | tuple):
            kind = list if isinstance(value, list) else tuple
            return kind([copy(item, part, depth + 1) for item in value])
        raise refused(part, f"holds a {type(value).__name__} that no such file needs")

    try:
        return copy(state, "the file", 0)
    except TypeError as error:  # a tensor or a list as a key, a tensor without a layout
        raise refused("it", f"holds what no such file does ({error})") from error


def check_parts(state: dict[str, Any], path: Path) -> None:
    """Hold each part of a checkpoint of ours, made plain, to what it must be.

    Raises:
        CheckpointError: that names the first part that is missing or something else.
    """
    for name, (fits, what) in PARTS.items():
        if name not in state or not fits(state[name]):
            raise CheckpointError(f"{path} is no whole checkpoint: its '{name}' is missing or not {what}")
    for name, (fits, what) in OPTIONAL_PARTS.items():
        if name in state and not fits(state[name]):
            raise CheckpointError(f"{path} is no whole checkpoint: its '{name}' is not {what}")

    epoch, step, steps_per_epoch = state["epoch"], state["step"], state["steps_per_epoch"]
    first, last = epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch
    if not first <= step <= last:
        raise CheckpointError(
            f"{path} is no whole checkpoint: its 'step' is {step}, and after {epoch} epochs of {steps_per_epoch} "
            f"steps it must be from {first} to {last}"
        )


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


def _is_dense(value: Tensor) -> bool:
    kind = type(value) in (Tensor, nn.Parameter)
    return kind and value.layout is torch.strided and value.device.type == "cpu" and value.dtype in TENSOR_TYPES


def _name(key: Any, part: str) -> str:
    """Return the part of the file that a key of its top level names; what is deeper keeps the part's name."""
    return f"its '{key[:40]}'" if part == "the file" and isinstance(key, str) else part


def _mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _settings(value: Any) -> bool:
    """Tell whether a value is a tree of what YAML can hold."""
    if isinstance(value, dict):
        return _mapping(value) and all(map(_settings, value.values()))
    if isinstance(value, list):
        return all(map(_settings, value))
    return not isinstance(value, Tensor | tuple)


def _tensors(value: Any) -> bool:
    return _mapping(value) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _number(value: Any) -> bool:
    """Tell whether a value is a number, which may be infinite or NaN."""
    return type(value) in (int, float)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _classes(value: Any) -> bool:
    if not _mapping(value) or {"names", "exclusive", "queries"} - value.keys() or type(value["exclusive"]) is not bool:
        return False
    names, queries = value["names"], value["queries"]
    if not isinstance(names, list) or not names or names_fault(names):
        return False
    rows = isinstance(queries, Tensor) and queries.ndim == 2 and len(queries) == len(names)
    return queries is None or (rows and queries.is_floating_point())


def _best(value: Any) -> bool:
    if not _mapping(value):
        return False
    none_yet = value.get("metric") is None and value.get("value") == -math.inf
    return (
        (none_yet or (isinstance(value.get("metric"), str) and _finite(value.get("value"))))
        and value.get("weights") in ("ema", "raw")
        and _count(value.get("epoch"))
    )


def _optimizer(value: Any) -> bool:
    if not _mapping(value) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    return (
        all(map(_mapping, value["state"].values()))
        and isinstance(groups, list)
        and all(_mapping(group) and isinstance(group.get("params"), list) for group in groups)
    )


def _log(value: Any) -> bool:
    counts = ("lines", "steps", "skipped", "bad_images")
    if not _mapping(value) or not all(_count(value.get(name)) for name in counts):
        return False
    # A loss that was not finite, in a step that was skipped, is in the sum.
    return _finite(value.get("loss")) or (_number(value.get("loss")) and value["skipped"] > 0)


def _fingerprint(value: Any) -> bool:
    texts = ("files", "labels", "classes")
    return (
        _mapping(value)
        and value.keys() == {"images", *texts}
        and _count(value["images"])
        and all(isinstance(value[name], str) for name in texts)
    )


Check = tuple[Callable[[Any], bool], str]
PARTS: dict[str, Check] = {
    "config": (lambda value: isinstance(value, dict) and _settings(value), "a mapping of plain settings"),
    "classes": (_classes, "different class names, whether one excludes another, and their word vectors or none"),
    "transform": (lambda value: _mapping(value) and _settings(value), "a mapping of plain settings"),
    "metrics": (lambda value: _mapping(value) and all(map(_number, value.values())), "numbers by name"),
    "best": (_best, "a metric, its value, its weights and its epoch"),
    "epoch": (_count, "a whole number from 0 on"),
    "step": (_count, "a whole number from 0 on"),
    "steps_per_epoch": (lambda value: _count(value) and value > 0, "a whole number from 1 on"),
    "model": (_tensors, "tensors by name"),
    "ema": (lambda value: value is None or _tensors(value), "tensors by name, or none"),
    "optimizer": (_optimizer, "the state and the groups of an optimiser"),
    "scaler": (_mapping, "a mapping"),
    "loss": (_mapping, "a mapping"),
    "log": (_log, "the place in metrics.jsonl and the sums since the last line of it"),
}
# What checkpoints of older versions do not have.
OPTIONAL_PARTS: dict[str, Check] = {
    "fingerprint": (_fingerprint, "the number of training images and the hashes of their table"),
}
