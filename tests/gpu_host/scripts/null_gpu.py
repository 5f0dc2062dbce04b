"""What scripts on the null GPU can ask of it."""

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_library = ctypes.CDLL(None)
_library.null_gpu_counts.restype = ctypes.c_char_p


def counts() -> dict[str, int]:
    """Return what this process has asked of the device since its start, see null_gpu.h."""
    return json.loads(_library.null_gpu_counts())


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Yield a dictionary that has the counts of the block at its end."""
    before = counts()
    result: dict[str, int] = {}
    yield result
    for name, value in counts().items():
        result[name] = value - before[name]


@contextmanager
def truths() -> Iterator[None]:
    """Let the host read what kernels have computed as true and as small numbers, not as zeros.

    It is for code that asks the device whether something holds. Numbers in main memory that are
    made of these bytes are huge integers.
    """
    _library.null_gpu_read_unknown_as(1)
    yield
    _library.null_gpu_read_unknown_as(0)


def finish(result: Any) -> NoReturn:
    """Print a result, and end the process at once.

    After a backward pass a thread of torch may still wait for the interpreter, which would abort
    the process at a regular end.
    """
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)
