"""Devices, processors and number formats; their names can be checked before torch is imported."""

import os
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from mldec.errors import ConfigError
from mldec.runtime.signals import NothingCame

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# The first GPUs whose tensor cores multiply bfloat16; older ones emulate it.
BF16_CAPABILITY = (8, 0)
MAX_IMAGE_SIZE = 4096  # pixels per side of a model's input, in a setting or in a checkpoint


def check_device(name: str) -> None:
    """Check the name of a device; `distributed.pick_device` checks that it is available."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,4})?", name):
        raise ConfigError(
            f"device '{name[:40]}' is unknown: choose auto, cpu, mps, cuda or cuda:<number>"
        )


def in_double(values: "torch.Tensor") -> "torch.Tensor":
    """Return values as float64; on the CPU if they are on an Apple GPU, which has no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def moved(tensor: "torch.Tensor", device: "torch.device", **options: Any) -> "torch.Tensor":
    """Return a tensor on a device; of CUDA alone this process need not wait for the copy."""
    # Cached tokens [B, N, C] and targets have no channels.
    if tensor.ndim != 4:
        options.pop("memory_format", None)
    return tensor.to(device, non_blocking=device.type == "cuda", **options)


def processors() -> int:
    """Return the number of processors for this process; torchrun's processes share them."""
    # Not every system can limit a process to some processors.
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, count // env_number("LOCAL_WORLD_SIZE", 1, smallest=1))


def env_number(name: str, default: int, *, smallest: int = 0) -> int:
    """Return a number that torchrun sets as an environment variable."""
    text = os.environ.get(name) or str(default)
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < smallest:
        raise ConfigError(
            f"{name}={text[:40]}: it must be a whole number from {smallest} on; unset it, or start "
            f"with torchrun"
        )
    return int(text)


class Precision(Enum):
    """Number format of the forward pass; weights, losses and metrics stay in float32."""

    auto = "auto"  # what the device does well: see `on`
    fp32 = "fp32"
    fp16 = "fp16"  # on CUDA, as the official recipes; fp32 on a CPU
    bf16 = "bf16"

    def on(self, device: "torch.device") -> "Precision":
        """Return the number format that is used on a device; never `auto`.

        `auto` is bf16 on CUDA devices that compute with it (capability 8.0 and above), fp16 on
        older ones, and fp32 elsewhere.
        """
        if device.type != "cuda":
            return Precision.bf16 if self is Precision.bf16 else Precision.fp32
        if self is not Precision.auto:
            return self

        from torch.cuda import get_device_capability

        # `torch.cuda.is_bf16_supported` counts emulation too.
        has_bf16 = get_device_capability(device) >= BF16_CAPABILITY
        return Precision.bf16 if has_bf16 else Precision.fp16

    def may_mean(self, used: "Precision") -> bool:
        """Tell whether a run with this setting uses another one of them on some device."""
        on_a_cpu = self is Precision.fp16 and used is Precision.fp32
        return self in (Precision.auto, used) or on_a_cpu

    @property
    def half(self) -> "torch.dtype | None":
        """Return the dtype of matrix products and convolutions under autocast; None for fp32."""
        import torch

        return {Precision.fp16: torch.float16, Precision.bf16: torch.bfloat16}.get(self)

    def warning(self, device: "torch.device") -> str | None:
        """Return a line of warning if this number format is slow on a device, else None."""
        if device.type != "cpu" or self is not Precision.bf16:
            return None
        return (
            "train.precision=bf16 is slow on a CPU without instructions for it, "
            "up to eight times slower than fp32: compare with train.precision=fp32"
        )


def autocast(device: "torch.device", precision: Precision) -> "torch.autocast":
    """Return the context of a forward pass in a precision; it does nothing for fp32."""
    import torch

    half = precision.on(device).half
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


def memory_format(*, channels_last: bool) -> "torch.memory_format":
    """Return the order in which images, feature maps and convolution weights lie in memory."""
    import torch

    return torch.channels_last if channels_last else torch.contiguous_format


class Copies:
    """Copies of tensors on their way to main memory; a tensor that is there stays as it is."""

    def __init__(self, *tensors: "torch.Tensor") -> None:
        # From CUDA into page-locked memory, for which this process need not wait.
        self._tensors = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
        self._arrived = None
        if any(tensor.is_cuda for tensor in tensors):
            from torch.cuda import Event, current_stream

            # The copies run on the stream of their own device, not of the current one.
            device = next(tensor.device for tensor in tensors if tensor.is_cuda)
            self._arrived = Event()
            self._arrived.record(current_stream(device))

    def wait(self) -> list["torch.Tensor"]:
        """Return the copies once they are complete, whatever the device was given since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors


def one_late(items: Iterable[T]) -> Iterator[T]:
    """Yield each item after the next one was made, so that a device works on that one meanwhile.

    After an error or a stop the last item still comes first.
    """
    iterator = iter(items)
    waiting: list[T] = []
    fault: BaseException | None = None
    while fault is None:
        try:
            waiting.append(next(iterator))
        except StopIteration:
            break
        except (Exception, NothingCame) as error:
            fault = error
        if len(waiting) == 2:
            yield waiting.pop(0)

    yield from waiting
    if fault is not None:
        raise fault
