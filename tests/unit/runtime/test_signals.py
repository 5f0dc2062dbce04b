"""Requests to stop, with real signals to this process."""

import os
import signal
import time

import pytest

from mldec.runtime import signals
from mldec.runtime.signals import SIGNALS, DataTimeout, StopRequest, listening


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE", 0.2)


def send(number):
    """Send this process a signal; Python handles it before the next statement."""
    os.kill(os.getpid(), number)


def handlers():
    return [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)]


@pytest.mark.parametrize(
    ("number", "status"), [("SIGTERM", 143), ("SIGUSR1", 143), ("SIGINT", 130)]
)
def test_a_signal_is_noted_and_nothing_else_happens(number, status):
    before = handlers()
    with listening() as stop:
        assert not stop
        assert stop.name == "a signal to another process"
        send(signal.Signals[number])
        assert stop
        assert (stop.name, stop.status) == (number, status)
    assert handlers() == before
    assert not stop.listening


def test_the_first_signal_counts_and_a_second_ctrl_c_ends_the_program():
    before = handlers()
    with listening() as stop:
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert stop.name == "SIGUSR1"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert stop.name == "SIGUSR1"
    assert handlers() == before


def test_items_pass_as_they_are():
    with listening() as stop:
        assert list(stop.bounded(range(5))) == [0, 1, 2, 3, 4]
        assert list(stop.bounded([])) == []
        with pytest.raises(ZeroDivisionError):
            list(stop.bounded(1 // number for number in (1, 0)))
    assert list(StopRequest().bounded("ab")) == ["a", "b"], "without listening too"


def stuck(*, requested):
    """Yield one item; the next one takes longer than anybody waits, with or without a request."""
    yield 0
    if requested:
        send(signal.SIGTERM)
    time.sleep(60)
    pytest.fail("the wait was not ended")


def test_a_wait_without_a_request_is_not_bounded():
    def alarm():
        yield signal.getitimer(signal.ITIMER_REAL)

    with listening() as stop:
        assert list(stop.bounded(alarm())) == [(0, 0)]


def test_a_request_during_a_wait_ends_it():
    start = time.monotonic()
    with listening() as stop:
        items = stop.bounded(stuck(requested=True))
        assert next(items) == 0
        with pytest.raises(DataTimeout):
            next(items)
    assert time.monotonic() - start > 0.2


def test_a_wait_that_begins_after_a_request_ends_too():
    with listening() as stop:
        items = stop.bounded(stuck(requested=False))
        next(items)
        send(signal.SIGTERM)
        with pytest.raises(DataTimeout):
            next(items)
    assert not issubclass(DataTimeout, Exception), "what reads images must not catch it"


def test_an_item_in_time_switches_the_alarm_off(monkeypatch):
    """An alarm that goes on would end the work on the item, such as a save."""
    monkeypatch.setattr(signals, "PATIENCE", 60)

    def in_time():
        send(signal.SIGTERM)
        yield signal.getitimer(signal.ITIMER_REAL) > (0, 0)

    with listening() as stop:
        assert next(stop.bounded(in_time()))
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert stop
