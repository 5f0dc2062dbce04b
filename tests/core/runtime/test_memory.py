"""Memory that is freed is used again, without page faults."""

import os
import subprocess
import sys

import pytest

from mldec.runtime import memory

# Blocks of 40 MiB, each of which has 10,240 pages; the first one has to be paid for.
CODE = """
import resource, sys
from mldec.runtime.memory import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
bytearray(b"x" * 40) * 2**20
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    bytearray(b"x" * 40) * 2**20
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(argument: str, **environment: str) -> tuple[str, int]:
    clean = {key: value for key, value in os.environ.items() if key not in memory.OF_THE_USER}
    command = [sys.executable, "-c", CODE, argument]
    done = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    kept, count = done.stdout.split()
    return kept, int(count)


def test_freed_memory_is_used_again() -> None:
    assert page_faults("leave")[1] > 25_000
    kept, count = page_faults("keep")
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert count < 1_000


def test_settings_of_the_user_stay() -> None:
    kept, count = page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert count > 25_000
