"""How jobs are timed."""

import itertools
import time
from functools import partial

import pytest
import torch

from mldec.benchmark.timing import in_turns, peak_gib, seconds, times_as_long

CPU = torch.device("cpu")


def test_seconds_are_the_median_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    durations, now = iter([20, 10, 1, 2, 5]), 0

    def job() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert seconds(job, device=CPU, repeats=3, warmup=2) == 2
    assert next(durations, None) is None


def test_jobs_take_turns() -> None:
    calls: list[str] = []
    jobs = {name: partial(calls.append, name) for name in ("a", "b")}
    times = in_turns(jobs, device=CPU, rounds=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_one_thread_is_measured_in_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(time, "process_time", lambda: next(ticks))
    assert seconds(lambda: None, device=CPU, repeats=1) == 1


def test_a_ratio_compares_within_rounds() -> None:
    # The second round was disturbed on both sides.
    times = {"a": [2.0, 20.0, 2.2], "b": [1.0, 10.0, 1.0]}
    assert times_as_long(times, "a", "b") == pytest.approx(2)


def test_the_peak_never_falls() -> None:
    before = peak_gib(CPU)
    torch.ones(2**24)
    assert 0 < before <= peak_gib(CPU)
