"""Processes and devices: the only module that uses torch.distributed; a no-op with one process."""

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mldec import triton_can_compile
from mldec.errors import ConfigError, Stopped, UserError
from mldec.runtime.devices import check_device, env_number

T = TypeVar("T")
log = logging.getLogger("mldec")

# How long a process waits for the others before it gives up: longer than what one of them does
# alone, such as a download. Without it, NCCL would take the half hour of gloo.
TIMEOUT = timedelta(minutes=20)

DEVICE_FILES = Path("/dev")
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def rank() -> int:
    """Return the rank of this process, 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Tell whether this process writes files and prints."""
    return rank() == 0


def pick_device(name: str) -> torch.device:
    """Return the device of a name: "auto", "cpu", "mps", "cuda" or "cuda:<n>".

    "auto" is CUDA where there is such a GPU, else an Apple GPU ("mps"), else the CPU. Under
    torchrun "auto" and "cuda" give each process its own GPU, otherwise the first one. A device of
    CUDA always has an index.
    """
    if name == "auto":
        elsewhere = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else elsewhere
        if name == "cpu":
            _warn_of_unused_gpu()
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    check_device(name)

    kind, _, number = name.partition(":")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device mps is not there: this is no Apple GPU; use device=cpu")
    if kind != "cuda":
        return torch.device(kind)
    if int(number) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not there: {torch.cuda.device_count()} CUDA devices; use device=cpu"
        )
    return torch.device("cuda", int(number))


@cache
def _warn_of_unused_gpu() -> None:
    """Log a warning if there is an NVIDIA GPU that torch cannot use."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or not any(DEVICE_FILES.glob("nvidia[0-9]*")):
        return

    driver = "this driver"
    if DRIVER_FILE.is_file():
        version = re.search(r"\b\d{3}\.[\d.]+", DRIVER_FILE.read_text(encoding="utf-8"))
        driver = f"driver {version[0]}" if version else driver
    log.warning(
        f"device=auto: an NVIDIA GPU is not used, as torch {torch.__version__} finds no CUDA "
        f"device with {driver}; update the driver, or install a torch build that supports it"
    )


def prepare_device(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """Make a device the one of this process, say what float32 means on it, and tune convolutions.

    With `tf32`, CUDA rounds the factors of float32 products to TF32 (10 bits of mantissa instead of
    23), in matrix products and convolutions alike; torch would by default in convolutions only.
    Unless `deterministic`, cuDNN tries several kernels for each new shape and keeps the fastest.
    """
    if device.type == "cuda":
        _warn_without_compiler()
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = not deterministic
        # cuDNN of torch 2.11 rounds the dropout of attention to multiples of 1/16.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "mps":
        log.info("device mps: float64 and what torch cannot do on an Apple GPU go to the CPU")


@cache
def _warn_without_compiler() -> None:
    """Log a warning if torch was imported before mldec and its Triton kernels cannot run."""
    has_kernels = "torch._native.ops.bmm_outer_product" in sys.modules
    is_disabled = os.environ.get("TORCH_DISABLE_NATIVE_JIT") == "1"
    if has_kernels and not is_disabled and not triton_can_compile():
        log.warning(
            "torch was imported before mldec, and without a C compiler and Python.h its Triton "
            "kernels fail in training: set TORCH_DISABLE_NATIVE_JIT=1, or import mldec first"
        )


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the group that torchrun describes, and leave it at the end."""
    if "RANK" not in os.environ:
        yield
        return

    rank_and_world_size()
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"{name} is not set, but RANK is; unset RANK, or start with torchrun")
    store, number, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    # After a restart by torchrun the store still holds the keys of the processes before.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        # Evaluation exchanges scores in main memory, gradients travel between GPUs.
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=dist.PrefixStore(f"restart {restart}", store),
        rank=number,
        world_size=size,
        timeout=TIMEOUT,
        # With it NCCL connects now, and its faults are named here instead of in the first step.
        device_id=device if on_cuda else None,
    )
    try:
        yield
    except Stopped:
        dist.destroy_process_group()
        raise

    # Not after an error: the others may be waiting inside the group.
    dist.destroy_process_group()


def wrap(model: nn.Module, *, static: bool, same_buffers: bool) -> nn.Module:
    """Return the model itself, or under torchrun one that averages gradients over the processes.

    `static` says that every step does the same operations, so that averaging overlaps more. With
    `same_buffers` each forward pass begins with the buffers of the main process.
    """
    if not dist.is_initialized():
        return model

    # Gradients are copied bucket by bucket instead of one by one; older versions of torch have
    # neither argument, and always copy the buffers.
    newer = {"batched_grad_copy": True, "forward_sync_buffers": same_buffers}
    known = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {name: value for name, value in newer.items() if name in known}
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=static, **options
    )


def copy_buffers(model: nn.Module) -> None:
    """Copy the buffers of the main process, such as batch-norm statistics, to all others."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def no_sync(model: nn.Module, *, unless: bool) -> AbstractContextManager[None]:
    """Return a context in which a model of `wrap` does not average gradients, `unless` it must."""
    if unless or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def total(value: Tensor) -> Tensor:
    """Return the sum of a tensor over the processes; the tensor itself is overwritten."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def start_total(value: Tensor) -> Callable[[], Tensor]:
    """Begin to sum a tensor in main memory over the processes; the result waits for the sum."""
    if not dist.is_initialized():
        return lambda: value

    work = dist.all_reduce(value, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return value

    return finish


def broadcast(value: T) -> T:
    """Return the value of the main process on all processes."""
    if not dist.is_initialized():
        return value

    box: list[T] = [value]
    dist.broadcast_object_list(box)
    return box[0]


def on_main(job: Callable[[], T]) -> T:
    """Do a job on the main process only, and return its value on all processes.

    A `UserError` or an `OSError` is raised on all of them; the main process prints it for all.
    """
    if not dist.is_initialized():
        return job()

    value: T | None = None
    error: UserError | OSError | None = None
    if is_main():
        try:
            value = job()
        except (UserError, OSError) as fault:
            error = fault

    value, error = broadcast((value, error))
    if error is not None:
        error.shared = not is_main()  # type: ignore[union-attr]
        raise error
    return cast(T, value)


def gather(value: T) -> list[T]:
    """Gather one value from each rank, on all ranks."""
    if not dist.is_initialized():
        return [value]

    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def share_columns(rows: list[Tensor]) -> list[Tensor]:
    """Exchange rows for columns, so that no process holds the scores of all images and classes.

    From blocks [n, K] of this process's images to one block [N_r, K / processes] per process, of
    the N_r images of its rank. Columns are in the order of the ranks; see `join_columns`.
    """
    if not dist.is_initialized():
        return rows

    own_rows = torch.cat(rows).cpu()
    heights = gather(len(own_rows))
    column_groups = own_rows.tensor_split(world_size(), dim=1)
    widths = [group.shape[1] for group in column_groups]
    own_width = widths[rank()]

    # The exchange knows flat tensors only: their sizes are in numbers, not in rows.
    sent = torch.cat([group.flatten() for group in column_groups])
    sent_sizes = [len(own_rows) * width for width in widths]
    received_sizes = [height * own_width for height in heights]
    received = torch.empty(sum(received_sizes), dtype=own_rows.dtype)
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes)

    blocks = zip(received.split(received_sizes), heights, strict=True)
    return [block.view(height, own_width) for block, height in blocks]


def join_columns(values: Tensor) -> Tensor:
    """Join the columns of all processes: [..., K / processes] -> [..., K], on all of them."""
    return torch.cat(gather(values), dim=-1)


def rank_and_world_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE as torchrun sets them; 0 and 1 without torchrun."""
    rank = env_number("RANK", 0)
    size = env_number("WORLD_SIZE", 1, smallest=1)
    if rank >= size:
        raise ConfigError(
            f"RANK={rank} is not below WORLD_SIZE={size}; unset both, or start with torchrun"
        )
    return rank, size
