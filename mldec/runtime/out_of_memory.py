"""Running out of memory: what was tried, and which settings ask for less."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mldec.config.schema import Config, Precision
from mldec.errors import OutOfMemoryError
from mldec.runtime import distributed


@contextmanager
def explained(config: Config, device: torch.device) -> Iterator[None]:
    """Turn "out of memory" into a line that names batch, image size, peak and the settings that lower it.

    Raises:
        OutOfMemoryError: instead of torch's error or Python's.
    """
    with explained_by(lambda: _advice(config, device)):
        yield


@contextmanager
def explained_by(advice: Callable[[], str]) -> Iterator[None]:
    """Turn "out of memory" into a line that a command has of its own.

    Raises:
        OutOfMemoryError: with that line.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # On a CPU torch has no class of its own for it.
        if not isinstance(
            error, torch.OutOfMemoryError | MemoryError
        ) and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemoryError(advice()) from error


def _advice(config: Config, device: torch.device) -> str:
    train = config.train
    micro_batch = train.batch_size // (train.accumulate * distributed.world_size())
    peak = ""
    if device.type == "cuda":
        used, there = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
        peak = f", {used / 2**30:.1f} GiB of {there / 2**30:.1f} at the peak"
    full = train.precision.on(device.type) is Precision.fp32
    half = "train.precision=bf16, " if full and device.type == "cuda" else ""  # on a CPU it is slow
    return (
        f"out of memory on {device}: {micro_batch} training images at a time on each process, {train.eval_batch_size} "
        f"in evaluation, at {config.data.get('image_size', 'the default')} pixels{peak}; for the same batch in "
        f"smaller pieces pass train.accumulate={2 * train.accumulate}; "
        f"{half}train.eval_batch_size and data.image_size help too"
    )
