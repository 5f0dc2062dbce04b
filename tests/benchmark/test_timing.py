"""How jobs are timed."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from mldec.benchmark.timing import in_turns, peak_gib, seconds, times_as_long

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let time pass while a job sleeps: one thread would be measured in processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_seconds_are_the_median_after_the_warm_up() -> None:
    durations = iter([0.2, 0.1, 0.001, 0.01, 0.02])
    measured = seconds(lambda: time.sleep(next(durations)), device=CPU, repeats=3, warmup=2)
    assert 0.01 <= measured < 0.02
    assert next(durations, None) is None


def test_jobs_take_turns() -> None:
    calls: list[str] = []
    jobs = {name: partial(calls.append, name) for name in ("a", "b")}
    times = in_turns(jobs, device=CPU, rounds=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_one_thread_is_measured_in_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert seconds(lambda: time.sleep(0.02), device=CPU, repeats=1) < 0.02


def test_a_ratio_compares_within_rounds() -> None:
    # The second round was disturbed on both sides.
    times = {"a": [2.0, 20.0, 2.2], "b": [1.0, 10.0, 1.0]}
    assert times_as_long(times, "a", "b") == pytest.approx(2)


def test_the_peak_never_falls() -> None:
    before = peak_gib(CPU)
    torch.ones(2**24)
    assert 0 < before <= peak_gib(CPU)
