"""Ranks and devices. All functions also work without torchrun, with one rank.

Other modules do not use torch.distributed directly.
"""

import inspect
import os
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

from mldec.errors import ConfigError, Stopped, UserError, log
from mldec.runtime.devices import check_device, env_number

T = TypeVar("T")

# Timeout of collectives, for both backends. It must exceed the work of a single rank, such as a
# download.
TIMEOUT = timedelta(minutes=20)

# Shorter jobs do not search for the fastest kernels of cuDNN, which takes seconds for each shape.
MIN_BATCHES = 20

DEVICE_FILES = Path("/dev")  # of the NVIDIA driver on Linux


def rank() -> int:
    """Return the rank of this process; 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return True on rank 0, which writes files and prints."""
    return rank() == 0


def pick_device(name: str) -> torch.device:
    """Return the device "auto", "cpu", "mps", "cuda" or "cuda:<n>". CUDA devices have an index.

    "auto" selects CUDA if available, else MPS, else the CPU. "cuda" selects the GPU of the local
    rank under torchrun, else the first GPU. Raises ConfigError if the name is invalid or the device
    is not available.
    """
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
        else:
            name = "cpu"
            _warn_about_unused_gpu()
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    check_device(name)

    kind, _, number = name.partition(":")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: there is no Apple GPU; pass device=cpu")
    if kind != "cuda":
        return torch.device(kind)
    if int(number) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name}: there are {torch.cuda.device_count()} CUDA devices; pass device=cpu"
        )
    return torch.device("cuda", int(number))


@cache
def _warn_about_unused_gpu() -> None:
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or not any(DEVICE_FILES.glob("nvidia[0-9]*")):
        return

    log.warning(
        f"device=auto: using the CPU, because torch {torch.__version__} finds no CUDA device with "
        f"this driver; update the driver, or install a torch build that supports it"
    )


def prepare_device(
    device: torch.device, *, tf32: bool, deterministic: bool, batches: int = MIN_BATCHES
) -> None:
    """Set the current device, the precision of float32 products and the cuDNN options.

    TF32 has 10 instead of 23 bits of mantissa. torch allows it in convolutions by default.
    `batches` is the number of batches with images of one shape, which selects the search of cuDNN.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = not deterministic and batches >= MIN_BATCHES
        # cuDNN of torch 2.11 rounds the dropout rate of attention to multiples of 1/16.
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Initialize the process group of torchrun, and destroy it at the end."""
    if "RANK" not in os.environ:
        yield
        return

    # Validate the environment variables.
    rank_and_world_size()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(f"{name}: it is not set, but RANK is; use torchrun, or unset RANK")
    env_number("MASTER_PORT", 1, smallest=1)
    store, number, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    # After a restart by torchrun, the store has the keys of the previous processes.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    on_cuda = device.type == "cuda"
    dist.init_process_group(
        # Evaluation exchanges scores on the CPU, training all-reduces gradients on the GPUs.
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=dist.PrefixStore(f"restart {restart}", store),
        rank=number,
        world_size=size,
        timeout=TIMEOUT,
        # With `device_id`, NCCL connects here and not in the first step.
        device_id=device if on_cuda else None,
    )
    try:
        yield
    except Stopped:
        dist.destroy_process_group()
        raise
    except BaseException:
        # Other ranks may be waiting in a collective, so do not wait for them. Without an end of the
        # group, NCCL adds a warning to the error. gloo does not, and cannot abort.
        if on_cuda:
            cast(dist.ProcessGroup, dist.group.WORLD)._get_backend(device).abort()
        raise
    dist.destroy_process_group()


def wrap(model: nn.Module, *, static: bool, same_buffers: bool) -> nn.Module:
    """Wrap a model in DistributedDataParallel. Returns the model itself without torchrun.

    `static`: all steps run the same graph, so that all-reduces overlap more. `same_buffers`: each
    forward pass first broadcasts the buffers of rank 0.
    """
    if not dist.is_initialized():
        return model

    options: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": static}
    # Older versions of torch have neither argument, and always broadcast the buffers.
    newer = {"batched_grad_copy": True, "forward_sync_buffers": same_buffers}
    known = inspect.signature(DistributedDataParallel).parameters
    for name, value in newer.items():
        if name in known:
            options[name] = value
    return DistributedDataParallel(model, **options)


def copy_buffers(model: nn.Module) -> None:
    """Broadcast the buffers of rank 0, such as batch-norm statistics."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def no_sync(model: nn.Module, *, unless: bool) -> AbstractContextManager[None]:
    """Return a context that disables the gradient all-reduce, unless `unless` is True."""
    if unless or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def total(value: Tensor) -> Tensor:
    """All-reduce the sum of a tensor in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def gather_rows(value: Tensor) -> Tensor:
    """Gather a tensor [N] of each rank on all ranks: [ranks, N]."""
    rows = value.new_empty(world_size() * len(value))
    dist.all_gather_into_tensor(rows, value)
    return rows.view(world_size(), len(value))


def start_total(value: Tensor) -> Callable[[], Tensor]:
    """All-reduce the sum of a CPU tensor; the returned function waits for it, and returns it."""
    work = dist.all_reduce(value, async_op=True) if dist.is_initialized() else None

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return value

    return finish


def broadcast(value: T) -> T:
    """Return the value of rank 0 on all ranks."""
    if not dist.is_initialized():
        return value

    box: list[T] = [value]
    dist.broadcast_object_list(box)
    return box[0]


def on_main(job: Callable[[], T]) -> T:
    """Run a job on rank 0 only, and return its value on all ranks.

    A UserError or OSError is raised on all ranks, and only rank 0 prints it.
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
    """Gather one value per rank, in the order of ranks, on all ranks."""
    if not dist.is_initialized():
        return [value]

    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def share_columns(rows: list[Tensor]) -> list[Tensor]:
    """Exchange rows of a matrix for columns, so that no rank holds the whole matrix.

    `rows` are blocks [n, K] of the images of this rank. Returns one block [N_r, K / ranks] per rank
    r, with its N_r images and the columns of this rank, in the order of ranks.
    """
    if not dist.is_initialized():
        return rows

    own_rows = torch.cat(rows).cpu()
    heights = gather(len(own_rows))
    column_groups = own_rows.tensor_split(world_size(), dim=1)
    widths = [group.shape[1] for group in column_groups]
    own_width = widths[rank()]

    # `all_to_all_single` splits flat tensors, so the sizes count elements, not rows.
    sent = torch.cat([group.flatten() for group in column_groups])
    sent_sizes = [len(own_rows) * width for width in widths]
    received_sizes = [height * own_width for height in heights]
    received = torch.empty(sum(received_sizes), dtype=own_rows.dtype)
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes)

    blocks = zip(received.split(received_sizes), heights, strict=True)
    return [block.view(height, own_width) for block, height in blocks]


def join_columns(values: Tensor) -> Tensor:
    """Gather the columns of all ranks on all ranks: [..., K / ranks] -> [..., K]."""
    return torch.cat(gather(values), dim=-1)


def rank_and_world_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE of torchrun; 0 and 1 without torchrun."""
    rank = env_number("RANK", 0)
    size = env_number("WORLD_SIZE", 1, smallest=1)
    if rank >= size:
        raise ConfigError(f"RANK={rank}: it must be below WORLD_SIZE={size}; unset both")
    return rank, size
