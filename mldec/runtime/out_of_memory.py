"""Error messages for running out of memory: what was tried, and which settings need less."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mldec.config.schema import Config, Precision
from mldec.errors import OutOfMemoryError
from mldec.runtime import distributed


@contextmanager
def explained(config: Config, device: torch.device) -> Iterator[None]:
    """Name batch size, image size and peak memory, and the settings that lower them.

    Raises:
        OutOfMemoryError: instead of the error of torch or Python.
    """
    with explained_by(lambda: _advice(config, device)):
        yield


@contextmanager
def explained_by(advice: Callable[[], str]) -> Iterator[None]:
    """Replace the message of an out-of-memory error.

    Args:
        advice: returns the message; called after the error.

    Raises:
        OutOfMemoryError: with that message, instead of the error of torch or Python.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # On a CPU torch raises a plain RuntimeError.
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_known and "can't allocate memory" not in str(error):
            raise

        raise OutOfMemoryError(advice()) from error


def _advice(config: Config, device: torch.device) -> str:
    """Return the message for a training run or an evaluation."""
    train = config.train
    micro_batch = train.batch_size // (train.accumulate * distributed.world_size())
    image_size = config.data.get("image_size", "the default")

    peak = half = ""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device) / 2**30
        capacity = torch.cuda.mem_get_info(device)[1] / 2**30
        peak = f", {used:.1f} GiB of {capacity:.1f} at the peak"

        # Half precision is advised on CUDA only: on a CPU it is slow.
        if train.precision.on(device.type) is Precision.fp32:
            half = "train.precision=bf16, "

    return (
        f"out of memory on {device}: {micro_batch} training images at a time on each process, "
        f"{train.eval_batch_size} in evaluation, at {image_size} pixels{peak}; "
        f"for the same batch in smaller pieces pass train.accumulate={2 * train.accumulate}; "
        f"{half}train.eval_batch_size and data.image_size help too"
    )
