"""How this process handles main memory that it frees."""

import ctypes
import os

# Options of glibc's mallopt, from malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# Larger blocks go back to the system one by one. Older versions of glibc take at most the second.
LARGEST_KEPT = (2**30, 2**25)  # bytes
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep what torch frees for the tensors of the next step, instead of returning it.

    By default glibc returns blocks above 32 MiB at once, and the end of its heap soon. The system
    then clears each page again when the next step touches it: 2 to 18 percent of a training step on
    a CPU, by the size of its tensors. The peak of memory stays as it is.

    Returns:
        Whether it is so now: another C library has no such setting, and settings of the user in the
        environment stay.
    """
    if any(name in os.environ for name in OF_THE_USER):
        return False

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    takes_threshold = any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT)
    return bool(takes_threshold and mallopt(TRIM_THRESHOLD, 2**31 - 1))
