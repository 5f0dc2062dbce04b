"""How the jobs of `mldec.benchmark` measure time and memory."""

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def seconds(
    job: Callable[[], Any], *, device: torch.device, repeats: int, warmup: int = 2
) -> float:
    """Return the median time of a job in seconds, until the device has finished it."""
    times = in_turns({"job": job}, device=device, rounds=repeats, warmup=warmup)
    return statistics.median(times["job"])


def in_turns(
    jobs: Mapping[str, Callable[[], Any]], *, device: torch.device, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Time several jobs in turns, so that all of them meet the same load of the machine.

    One thread on a CPU is measured in processor time, which other processes hardly change; several
    threads, and a GPU, in time that passes until the work is finished.

    Args:
        jobs: by name.
        device: that the jobs compute on.
        rounds: timed rounds of all jobs.
        warmup: rounds before them, which allocate memory and choose kernels.

    Returns:
        The seconds of each job in each round.
    """
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter

    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(warmup + rounds):
        for name, job in jobs.items():
            start = clock()
            job()

            # A kernel is only queued when the call returns.
            if not on_cpu:
                torch.cuda.synchronize(device)
            if turn >= warmup:
                times[name].append(clock() - start)
    return times


def times_as_long(times: Mapping[str, list[float]], job: str, other: str) -> float:
    """Return how many times as long as another job one takes: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(times[job], times[other], strict=True))


def peak_gib(device: torch.device) -> float:
    """Return the largest memory so far: of the device, or on a CPU of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
