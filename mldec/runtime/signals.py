"""Being asked to stop: SIGTERM and SIGUSR1 as schedulers send them, SIGINT as Ctrl-C does."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 5.0  # seconds that a wait for data may go on after a stop was asked for
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class NothingCame(BaseException):
    """A stop was asked for, and the data that was waited for did not come.

    Raised wherever the wait is at that moment, like KeyboardInterrupt: no `except Exception` of
    code that reads images may take it for a broken image.
    """


class StopRequest:
    """The first signal that came, if any; the training loop looks at it between two steps.

    While the loop waits for data there may be no next step: see `bounded`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.listening = False  # whether signals are handled here
        self._waiting = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """Return what the process ends with: 130 after Ctrl-C, else 143, as if the signal had ended it."""
        return 130 if self.signal is signal.SIGINT else 143

    @property
    def name(self) -> str:
        """Return the signal's name, or that it came to another process."""
        return self.signal.name if self.signal else "a signal to another process"

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second Ctrl-C stops at once."""
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)
            if self._waiting:
                signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def bounded(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over items that are waited for, but after a stop for `PATIENCE` seconds only.

        Raises:
            NothingCame: if the stop was asked for that long ago and the next item is not there.
        """
        iterator = iter(items)
        while True:
            self._waiting = True
            if self and self.listening:
                signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waiting = False
                if self and self.listening:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            yield item

    def give_up(self, number: int, frame: FrameType | None) -> None:
        """Handle the alarm that ends a wait."""
        if self._waiting:
            raise NothingCame


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Note signals instead of ending by them."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in SIGNALS}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, request.give_up)
    request.listening = True
    try:
        yield request
    finally:
        request.listening = False
        for number, handler in before.items():
            signal.signal(number, handler)
