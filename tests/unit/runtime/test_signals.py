"""Stop requests, with real signals to this process."""

import os
import signal
import time

import pytest

from mldec.runtime import signals
from mldec.runtime.signals import SIGNALS, DataTimeout, listening


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
def test_signal_is_recorded(number, status):
    before = handlers()
    with listening() as stop:
        assert not stop
        assert stop.name == "a signal to another process"
        send(signal.Signals[number])
        assert stop
        assert (stop.name, stop.status) == (number, status)
    assert handlers() == before
    assert not stop.listening


def test_second_ctrl_c_raises():
    before = handlers()
    with listening() as stop:
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert stop.name == "SIGUSR1"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert stop.name == "SIGUSR1"
    assert handlers() == before


def stuck(*, requested):
    """Yield one item, and block before the second one."""
    yield 0
    if requested:
        send(signal.SIGTERM)
    time.sleep(60)
    pytest.fail("the wait did not end")


@pytest.mark.parametrize("during", [True, False])
def test_request_before_or_during_wait_ends_it(during):
    start = time.monotonic()
    with listening() as stop:
        items = stop.bounded(stuck(requested=during))
        assert next(items) == 0
        if not during:
            send(signal.SIGTERM)
        with pytest.raises(DataTimeout):
            next(items)
    assert time.monotonic() - start > 0.2
    assert not issubclass(DataTimeout, Exception), "image readers must not catch it"


def test_item_cancels_alarm(monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE", 60)

    def in_time():
        send(signal.SIGTERM)
        yield signal.getitimer(signal.ITIMER_REAL) > (0, 0)

    with listening() as stop:
        assert next(stop.bounded(in_time()))
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert stop
