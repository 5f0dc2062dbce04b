"""What a file of weights from a stranger may hold, checked value by value before anything is done with it.

torch's restricted unpickler keeps such a file from running code. It still lets through what would end in a traceback
or fill the memory: lists that hold themselves, dictionaries whose methods are shadowed, tensors without values,
archives that unpack to a thousand times their size.
"""

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mldec.errors import CheckpointError

MAX_VALUES = 1_000_000  # in a whole file; ImageNet-21K has 11 thousand classes, a large network a few thousand tensors
MAX_DEPTH = 20
MAX_TEXT = 100_000  # characters
MAX_IMAGE_SIZE = 8192  # pixels a side
TENSOR_TYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
TENSOR_TYPES |= {torch.int64, torch.int32, torch.int16, torch.int8}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # would steer the terminal that prints a class name


def refuse_bomb(path: Path) -> None:
    """Refuse an archive that unpacks to more than its own size; torch.save compresses nothing.

    Raises:
        CheckpointError: if a member is compressed, members overlap, or it is no whole archive.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # what torch goes by
            return
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # zipfile raises almost anything on damaged bytes
        raise CheckpointError(f"{path} is no checkpoint, or a damaged one: {error}; use another copy") from error
    unpacked, size = sum(member.file_size for member in members), path.stat().st_size
    if unpacked > size or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError(
            f"{path} is refused: its {size:,} bytes unpack to {unpacked:,}, and torch.save compresses nothing"
        )


def plain(state: dict[Any, Any], path: Path) -> dict[Any, Any]:
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
            return Tensor.detach(value)
        if isinstance(value, dict):
            items = list(dict.items(value))
            return {copy(key, part, depth + 1): copy(item, _name(key, part), depth + 1) for key, item in items}
        if isinstance(value, list | tuple):
            kind = list if isinstance(value, list) else tuple
            return kind([copy(item, part, depth + 1) for item in value])
        raise refused(part, f"holds a {type(value).__name__} that no checkpoint needs")

    try:
        copied = copy(state, "the file", 0)
    except TypeError as error:  # a tensor or a list as a key, a tensor without a layout
        raise refused("it", f"holds what no checkpoint does ({error})") from error
    assert isinstance(copied, dict)
    return copied


def check_parts(state: dict[str, Any], path: Path) -> None:
    """Hold each part of a checkpoint of ours, made plain, to what it must be.

    Raises:
        CheckpointError: that names the first part that is missing or something else.
    """
    for name, (fits, what) in PARTS.items():
        if name not in state or not fits(state[name]):
            raise CheckpointError(f"{path} is no whole checkpoint: its '{name}' is missing or not {what}")


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
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _classes(value: Any) -> bool:
    if not _mapping(value) or {"names", "exclusive", "queries"} - value.keys() or type(value["exclusive"]) is not bool:
        return False
    names, queries = value["names"], value["queries"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return False
    if len(set(names)) < len(names) or any(map(CONTROL.search, names)):
        return False
    rows = isinstance(queries, Tensor) and queries.ndim == 2 and len(queries) == len(names)
    return queries is None or (rows and queries.is_floating_point())


def _transform(value: Any) -> bool:
    return (
        _settings(value)
        and _mapping(value)
        and _count(value.get("image_size"))
        and (0 < value["image_size"] <= MAX_IMAGE_SIZE)
    )


def _best(value: Any) -> bool:
    return (
        _mapping(value)
        and isinstance(value.get("metric"), str | None)
        and _number(value.get("value"))
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
    return _mapping(value) and all(_count(value.get(name)) for name in counts) and _number(value.get("loss"))


Check = tuple[Callable[[Any], bool], str]
PARTS: dict[str, Check] = {
    "config": (lambda value: isinstance(value, dict) and _settings(value), "a mapping of plain settings"),
    "classes": (_classes, "different class names, whether one excludes another, and their word vectors or none"),
    "transform": (_transform, f"an image size from 1 to {MAX_IMAGE_SIZE}"),
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
