"""Processes and devices: the only module that knows torch.distributed; with one process a pass-through."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mldec.config.schema import check_device
from mldec.errors import ConfigError, UserError

T = TypeVar("T")

GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
MAIN_SPEAKS_FIRST = timedelta(seconds=10)  # how long a fault of another process waits for its word


def rank() -> int:
    """Return the number of this process, 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Tell whether this process writes files and prints."""
    return rank() == 0


def pick_device(name: str) -> torch.device:
    """Return the device called "auto", "cpu", "cuda" or "cuda:<n>"; under torchrun each process takes its own GPU.

    Raises:
        ConfigError: if it has another name or is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    check_device(name)

    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not there: {torch.cuda.device_count()} CUDA devices; use device=cpu"
        )
    return torch.device(kind, int(number)) if number else torch.device(kind)


def check_environment() -> None:
    """Check that the variables which describe a group of processes are there together.

    Raises:
        ConfigError: if only some of them are set, or they are no numbers of processes.
    """
    missing = [name for name in GROUP if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is set, {', '.join(missing)} not: start several processes with torchrun, "
            f"which sets {', '.join(GROUP)}, or unset RANK to train with one"
        )
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    are_numbers = rank.isdecimal() and world_size.isdecimal()
    if not are_numbers or not int(rank) < int(world_size):
        raise ConfigError(
            f"RANK is {rank!r} and WORLD_SIZE {world_size!r}: they must be numbers, "
            f"RANK from 0 to WORLD_SIZE - 1; start with torchrun, which sets them"
        )


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the group that torchrun describes (NCCL on CUDA, gloo on the CPU) and leave it at the end.

    Raises:
        ConfigError: if the variables that describe the group are incomplete.
    """
    if "RANK" in os.environ:
        check_environment()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield
        return
    store, number, size = _rendezvous()
    # Evaluation exchanges scores between processes in main memory, gradients travel between GPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=size)
    yield
    dist.destroy_process_group()  # not after an error: the others may be waiting inside the group


def said_once(line: str) -> str:
    """Return what this process should print of a fault that may be that of all processes.

    The main process prints its line and leaves it in the store of torchrun; another one waits a
    moment for it, prints nothing if it is the same, and else its own with its rank.
    """
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank == "0" and size == "1":
        return line
    own = line if rank == "0" else f"rank {rank}: {line}"
    # Without torchrun's store, which outlives its processes, nobody can ask the others.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return own

    # torchrun ends all processes as soon as one of them has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        store, number, _ = _rendezvous()
        if number == 0:
            store.set("fault", line)
            return line
        store.wait(["fault"], MAIN_SPEAKS_FIRST)
        same = store.get("fault").decode() == line
    except dist.DistError:  # the main process has no fault, or torchrun is gone
        same = False
    return "" if same else own


def _rendezvous() -> tuple[dist.Store, int, int]:
    """Return the store of the group, the number of this process, and how many there are."""
    store, number, size = next(dist.rendezvous("env://"))
    # After a restart by torchrun the store still has what the processes before left there.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"restart {restart}", store), number, size


def wrap(model: nn.Module, *, static: bool) -> nn.Module:
    """Return the model itself, or under torchrun one that averages gradients over the processes.

    Every parameter must get a gradient in every step. A `static` graph, the same operations in every step, lets the
    averaging overlap more of the backward pass.
    """
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static)


def synchronised_batch_norm(model: nn.Module) -> nn.Module:
    """Return the model with batch norms that take mean and variance over all processes."""
    from timm.layers import convert_sync_batchnorm  # slow to import, and for several GPUs only

    return convert_sync_batchnorm(model)


def copy_buffers(model: nn.Module) -> None:
    """Give every process the main one's buffers: batch-norm statistics are of each process's own images."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def no_sync(model: nn.Module, *, unless: bool) -> AbstractContextManager[None]:
    """Leave out the averaging of gradients, unless this is the last micro-batch of its step."""
    return (
        nullcontext()
        if unless or not isinstance(model, DistributedDataParallel)
        else model.no_sync()
    )


def total(value: Tensor) -> Tensor:
    """Return the sum of a tensor over the processes; the tensor itself is overwritten."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def broadcast(value: T) -> T:
    """Return what the main process passed."""
    if not dist.is_initialized():
        return value
    box: list[T] = [value]
    dist.broadcast_object_list(box)
    return box[0]


def on_main(job: Callable[[], T]) -> T:
    """Do a job on the main process only, and return its value on all of them.

    Raises:
        UserError: on all processes, so that none waits for one that has ended; likewise an `OSError`.
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
        raise error
    return cast(T, value)


def gather(value: T) -> list[T]:
    """Return what each process passed, by rank, on every one of them."""
    if not dist.is_initialized():
        return [value]
    found: list[T] = [value] * world_size()
    dist.all_gather_object(found, value)
    return found


def share_columns(rows: list[Tensor]) -> list[Tensor]:
    """Give each process some columns of all rows: row blocks [n, K] -> blocks [N_r, K / processes], one a process.

    So no process holds the scores of all images and classes. Columns are dealt in runs, see `join_columns`; a process
    without images passes one block of 0 rows.
    """
    if not dist.is_initialized():
        return rows
    mine = torch.cat(rows).cpu()
    heights = gather(len(mine))
    widths = [len(part) for part in torch.arange(mine.shape[1]).tensor_split(world_size())]
    sent = torch.cat([part.flatten() for part in mine.tensor_split(world_size(), dim=1)])
    got = torch.empty(sum(heights) * widths[rank()], dtype=mine.dtype)
    sizes = [height * widths[rank()] for height in heights]
    dist.all_to_all_single(got, sent, sizes, [len(mine) * width for width in widths])
    return [
        part.view(height, widths[rank()])
        for part, height in zip(got.split(sizes), heights, strict=True)
    ]


def join_columns(values: Tensor) -> Tensor:
    """Put together what each process found for its columns: [..., K / processes] -> [..., K], on every process."""
    return torch.cat(gather(values), dim=-1)
