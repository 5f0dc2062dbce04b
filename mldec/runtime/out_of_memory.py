"""Replace the message of torch or Python for running out of memory by advice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mldec.errors import OutOfMemoryError


@contextmanager
def explained(advice: Callable[[], str]) -> Iterator[None]:
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
