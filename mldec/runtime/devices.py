"""Names of devices and of number formats, which can be checked before torch is imported."""

import re
from enum import Enum

from mldec.errors import ConfigError


def check_device(name: str) -> None:
    """Check the name of a device; `distributed.pick_device` checks that it is available.

    Raises:
        ConfigError: if it is not auto, cpu, cuda or cuda:<number>.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", name):
        raise ConfigError(
            f"device '{name[:40]}' is unknown: choose auto, cpu, cuda or cuda:<number>"
        )


class Precision(Enum):
    """Number format of the forward pass; weights, losses and metrics stay in float32."""

    auto = "auto"  # fp16 on CUDA, as the official recipes; fp32 elsewhere
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"

    def on(self, device_type: str) -> "Precision":
        """Return the number format for a type of device, such as "cuda"; never `auto`."""
        if self is not Precision.auto:
            return self
        return Precision.fp16 if device_type == "cuda" else Precision.fp32

    def warning(self, device_type: str) -> str | None:
        """Return a line of warning if this number format is slow on a type of device, else None."""
        if device_type != "cpu" or self.on(device_type) is Precision.fp32:
            return None

        times = {Precision.fp16: "nine", Precision.bf16: "eight"}[self]
        return (
            f"train.precision={self.value} is slow on a CPU without instructions for it, "
            f"up to {times} times slower than fp32: compare with train.precision=fp32"
        )
