"""Functions of the null GPU for scripts."""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

# Functions that draw the random numbers of new weights.
INITIALIZE = (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.erfinv_)


@cache
def library() -> ctypes.CDLL:
    """Return the preloaded library."""
    library = ctypes.CDLL(None)
    library.null_gpu_counts.restype = ctypes.c_char_p
    return library


def counts() -> dict[str, int]:
    """Return the counts of this process since its start; see null_gpu.h."""
    return json.loads(library().null_gpu_counts())


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Yield a dictionary that receives the counts of the block at its end."""
    before = counts()
    result: dict[str, int] = {}
    yield result
    for name, value in counts().items():
        result[name] = value - before[name]


@contextmanager
def truths() -> Iterator[None]:
    """Let the host read bytes of 1 from the device instead of zeros.

    Booleans are then true, and floats are small. Wider integers are huge.
    """
    library().null_gpu_read_unknown_as(1)
    yield
    library().null_gpu_read_unknown_as(0)


class UninitializedWeights(TorchFunctionMode):
    """Leave new weights as they are, because the null GPU computes nothing with their values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function of torch, unless it draws weights."""
        if func in INITIALIZE:
            return args[0]
        return func(*args, **(kwargs or {}))


def reporting(job: Callable[..., Any], *arguments: Any) -> None:
    """Run a job. Then write the counts as at the end of a process, which a fork does not reach."""
    try:
        job(*arguments)
    finally:
        if counts()["allocations"] > 0:
            path = Path(os.environ["NULL_GPU_COUNTS"], f"{os.getpid()}.json")
            path.write_text(json.dumps(counts()))


def finish(result: Any) -> NoReturn:
    """Print a result as JSON, and end the process immediately.

    A regular exit can abort, because a thread of torch waits for the interpreter after a backward
    pass.
    """
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)
