"""Devices, processors and number formats. Importing this module does not import torch."""

import os
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from mldec.errors import ConfigError
from mldec.runtime.signals import DataTimeout

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Minimum compute capability of tensor cores with bfloat16. Older GPUs emulate it.
BF16_CAPABILITY = (8, 0)
MAX_IMAGE_SIZE = 4096  # maximum pixels per side of a model's input


def check_device(name: str) -> None:
    """Raise ConfigError for an invalid device name. `distributed.pick_device` opens the device."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,4})?", name):
        raise ConfigError(
            f"device: '{name}' is unknown; choose auto, cpu, mps, cuda or cuda:<number>"
        )


def as_float64(values: "torch.Tensor") -> "torch.Tensor":
    """Return values as float64. Values on MPS, which has no float64, are moved to the CPU."""
    if values.device.type == "mps":
        values = values.cpu()
    return values.double()


def to_device(tensor: "torch.Tensor", device: "torch.device", **options: Any) -> "torch.Tensor":
    """Move a tensor to a device, with options of `Tensor.to`. The copy is asynchronous on CUDA."""
    # Memory formats such as channels_last need four dimensions.
    if tensor.ndim != 4:
        options.pop("memory_format", None)
    return tensor.to(device, non_blocking=device.type == "cuda", **options)


def processors() -> int:
    """Return the number of processors of this process. The ranks of a host share them equally."""
    # macOS and Windows have no `sched_getaffinity`.
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, count // env_number("LOCAL_WORLD_SIZE", 1, smallest=1))


def loader_processes(device_type: str) -> int:
    """Return a number of loader processes, at least 1.

    A GPU needs two processors of the rank for the main thread and for copies to pinned memory.
    """
    return max(1, processors() - (2 if device_type == "cuda" else 0))


def env_number(name: str, default: int, *, smallest: int = 0) -> int:
    """Return an integer environment variable of torchrun, at least `smallest`."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < smallest:
        raise ConfigError(f"{name}={text}: it must be an integer, at least {smallest}; unset it")
    return int(text)


class Precision(Enum):
    """Number format of the forward pass. Weights, losses and metrics are always float32."""

    auto = "auto"  # bf16 on CUDA devices of capability 8.0 or higher, else fp16; fp32 on a CPU
    fp32 = "fp32"
    fp16 = "fp16"  # as in the official recipes; falls back to fp32 without CUDA
    bf16 = "bf16"

    def for_device(self, device: "torch.device") -> "Precision":
        """Return the number format on a device, which is never `auto`."""
        if device.type != "cuda":
            return Precision.bf16 if self is Precision.bf16 else Precision.fp32
        if self is not Precision.auto:
            return self

        from torch.cuda import get_device_capability

        # `torch.cuda.is_bf16_supported` is also True for emulation.
        has_bf16 = get_device_capability(device) >= BF16_CAPABILITY
        return Precision.bf16 if has_bf16 else Precision.fp16

    def after_training(self, device: "torch.device") -> "Precision":
        """Return the default number format of a model that was trained in this one.

        Only CUDA keeps it. Elsewhere all commands use fp32, like exported files, because the
        rounding errors of bf16 change decisions.
        """
        return self if device.type == "cuda" else Precision.fp32

    def may_fall_back_to(self, used: "Precision") -> bool:
        """Return True if this setting can select the number format `used` on some device."""
        is_fallback = self is Precision.fp16 and used is Precision.fp32
        return self in (Precision.auto, used) or is_fallback

    @property
    def half(self) -> "torch.dtype | None":
        """The dtype of matrix products and convolutions under autocast, or None for fp32."""
        import torch

        return {Precision.fp16: torch.float16, Precision.bf16: torch.bfloat16}.get(self)

    def warning(self, device: "torch.device") -> str | None:
        """Return a warning if this number format is slow on a device, else None."""
        if device.type != "cpu" or self is not Precision.bf16 or has_fast_bf16(device):
            return None
        return (
            "train.precision=bf16: up to eight times slower than fp32, because this CPU has "
            "neither AVX512-BF16 nor AMX; use fp32"
        )


class EngineName(Enum):
    """Program that computes a backbone on a CPU; see `openvino_backbone.uses_openvino`."""

    auto = "auto"  # openvino if it is installed
    torch = "torch"
    openvino = "openvino"


def has_fast_bf16(device: "torch.device") -> bool:
    """Return True for a CPU with instructions for bfloat16 products: AVX512-BF16 or AMX."""
    from torch.cpu import get_capabilities

    if device.type != "cpu":
        return False
    instructions = get_capabilities()
    return bool(instructions.get("avx512_bf16") or instructions.get("amx_bf16"))


def autocast(device: "torch.device", precision: Precision) -> "torch.autocast":
    """Return the autocast context of a precision. It is disabled for fp32."""
    import torch

    half = precision.for_device(device).half
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


def memory_format(*, channels_last: bool) -> "torch.memory_format":
    """Return the memory format of images, feature maps and convolution weights."""
    import torch

    return torch.channels_last if channels_last else torch.contiguous_format


def pad_batch(batch: "torch.Tensor", size: int) -> "torch.Tensor":
    """Append images of zeros to a batch of fewer than `size` images."""
    from torch.nn.functional import pad

    missing = size - len(batch)
    if missing <= 0:
        return batch
    return pad(batch, [0, 0] * (batch.ndim - 1) + [0, missing])


class PinnedCopies:
    """Asynchronous copies of tensors to main memory. CPU tensors are not copied."""

    def __init__(self, *tensors: "torch.Tensor") -> None:
        # Copies from CUDA go to pinned memory, so that they are asynchronous.
        self._tensors = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
        self._arrived = None
        if any(tensor.is_cuda for tensor in tensors):
            from torch.cuda import Event, current_stream

            # The copies run on the stream of their device, which may not be the current device.
            device = next(tensor.device for tensor in tensors if tensor.is_cuda)
            self._arrived = Event()
            self._arrived.record(current_stream(device))

    def wait(self) -> list["torch.Tensor"]:
        """Wait for the copies, but not for later work on the device, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors


def prefetch_one(items: Iterable[T]) -> Iterator[T]:
    """Yield items one step late, so that the device can work on the next one.

    If `items` raises an error, the previous item is yielded first.
    """
    waiting: list[T] = []
    try:
        for item in items:
            yield from waiting
            waiting = [item]
    except (Exception, DataTimeout):
        yield from waiting
        raise
    yield from waiting
