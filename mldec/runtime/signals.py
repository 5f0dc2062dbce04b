"""Requests to stop: the signals of schedulers, and of Ctrl-C."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# Seconds that a wait for data may go on after a stop was requested.
PATIENCE = 5.0
# SIGUSR1 comes from SLURM before the time is over. Windows has no such signal, but Ctrl-Break.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGBREAK", "SIGINT")
    if hasattr(signal, name)
)
# Without it, as on Windows, a wait for data ends when the data comes.
ALARM = getattr(signal, "SIGALRM", None)


class NothingCame(BaseException):
    """A stop was requested, and the next item did not come in time.

    It is no `Exception`, so that code that reads images does not take it for a broken image.
    """


class StopRequest:
    """The first signal that came; false as long as there is none."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.listening = False  # whether `note` and `give_up` are the signal handlers
        self._waiting = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """Return the exit status that the signal itself would cause: 130 for Ctrl-C, else 143."""
        return 130 if self.signal is signal.SIGINT else 143

    @property
    def name(self) -> str:
        """Return the name of the signal, or that another process got it."""
        return self.signal.name if self.signal else "a signal to another process"

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second Ctrl-C stops at once."""
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt

        if self.signal is None:
            self.signal = signal.Signals(number)
            # The loop is inside `bounded` and looks at no signal: an alarm must end the wait.
            if self._waiting:
                _set_alarm(PATIENCE)

    def bounded(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over items; after a request to stop, wait at most `PATIENCE` seconds for each."""
        iterator = iter(items)
        while True:
            self._waiting = True
            if self and self.listening:
                _set_alarm(PATIENCE)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waiting = False
                # Switch the alarm off: it may be set by this wait or by `note`.
                if self and self.listening:
                    _set_alarm(0)
            yield item

    def give_up(self, number: int, frame: FrameType | None) -> None:
        """Handle the alarm that ends a wait."""
        if self._waiting:
            raise NothingCame


def _set_alarm(seconds: float) -> None:
    """Ask for an alarm after this time; 0 takes it back."""
    if ALARM is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Record signals in a `StopRequest` instead of ending the process."""
    request = StopRequest()
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
