"""Stop requests by signals of schedulers and by Ctrl-C."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# Maximum seconds to wait for data after a stop request.
PATIENCE = 5.0
# SLURM sends SIGUSR1 before the time limit. Windows has SIGBREAK (Ctrl-Break) instead.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGBREAK", "SIGINT")
    if hasattr(signal, name)
)
# Windows has no SIGALRM: a wait for data is not interrupted there.
ALARM = getattr(signal, "SIGALRM", None)


class DataTimeout(BaseException):
    """Raised if the next item does not arrive in time after a stop request.

    It is not an `Exception`, so that image readers do not handle it as an unreadable image.
    """


class StopRequest:
    """The first signal that was received, which is falsy until then."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.listening = False  # whether the methods below are the signal handlers
        self._waiting = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of the signal: 130 for Ctrl-C, else 143."""
        return 130 if self.signal is signal.SIGINT else 143

    @property
    def name(self) -> str:
        """The name of the signal, for messages. Another process may have received it."""
        return self.signal.name if self.signal else "a signal to another process"

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Ctrl-C after another signal raises KeyboardInterrupt."""
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt

        if self.signal is None:
            self.signal = signal.Signals(number)
            # The loop is waiting in `bounded` and cannot check for signals, so set an alarm.
            if self._waiting:
                _set_alarm(PATIENCE)

    def bounded(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items. After a stop request, a wait of `PATIENCE` seconds raises DataTimeout."""
        iterator = iter(items)
        while True:
            # After a stop request, set the alarm here. `note` sets it if the request comes later.
            self._waiting = True
            if self and self.listening:
                _set_alarm(PATIENCE)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waiting = False
                if self and self.listening:
                    _set_alarm(0)
            yield item

    def give_up(self, number: int, frame: FrameType | None) -> None:
        """Handle the alarm that ends a wait."""
        if self._waiting:
            raise DataTimeout


def _set_alarm(seconds: float) -> None:
    """Set an alarm, or cancel it with 0 seconds."""
    if ALARM is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Record signals in the yielded `StopRequest`, instead of ending the process.

    Python handles signals in the main thread only. In other threads no signal is recorded.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    before = {number: signal.signal(number, request.note) for number in SIGNALS}
    if ALARM is not None:
        before[ALARM] = signal.signal(ALARM, request.give_up)
    request.listening = True

    try:
        yield request
    finally:
        request.listening = False
        for number, handler in before.items():
            signal.signal(number, handler)
