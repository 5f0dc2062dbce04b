"""What the hardware can do at most: a large matrix product, and the maker's figure."""

from typing import NamedTuple

import torch

from mldec.benchmark.timing import in_turns
from mldec.runtime.devices import Precision

SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices, by type of device
ROUNDS = 10


class Peak(NamedTuple):
    """The published peak of a GPU for dense matrix products, in 10^12 operations per second."""

    half: float  # float16 and bfloat16, with tensor cores
    tf32: float  # float32 whose products are rounded to TF32, with tensor cores
    single: float  # float32
    source: str


# By the name that torch gives the device, a longer name first. The data sheets of Hopper state
# tensor cores with sparsity, which is twice the dense figure.
PUBLISHED = {
    "H200 NVL": Peak(835.5, 417.5, 60, "NVIDIA H200 data sheet"),
    "H200": Peak(989.5, 494.5, 67, "NVIDIA H200 data sheet"),
    "H100 PCIe": Peak(756.5, 378, 51, "NVIDIA H100 data sheet"),
    "H100 NVL": Peak(835.5, 417.5, 60, "NVIDIA H100 data sheet"),
    "H100": Peak(989.5, 494.5, 67, "NVIDIA H100 data sheet"),
    "A100": Peak(312, 156, 19.5, "NVIDIA A100 data sheet"),
}


def product_flops(device: torch.device, precision: Precision) -> float:
    """Measure the floating-point operations per second of a large product of square matrices.

    Args:
        device: to compute on.
        precision: of the matrices; float32 is rounded to TF32 with train.tf32=true.
    """
    precision = precision.on(device)
    side = SIDE[device.type]
    matrices = torch.randn(2, side, side, device=device, dtype=precision.half)

    product = {"product": lambda: matrices[0] @ matrices[1]}
    times = in_turns(product, device=device, rounds=ROUNDS, warmup=2)

    # The fastest round: what the hardware can do when nothing disturbs it.
    return 2 * side**3 / min(times["product"])


def published(device_name: str, precision: Precision) -> tuple[float, str] | None:
    """Return the published operations per second of a GPU and their source; None if unknown.

    Args:
        device_name: that torch gives.
        precision: of the products, not `auto`.
    """
    for name, peak in PUBLISHED.items():
        if name in device_name:
            if precision.half:
                value = peak.half
            else:
                value = peak.tf32 if torch.backends.cudnn.allow_tf32 else peak.single
            return value * 1e12, peak.source
    return None
