"""Being asked to stop: SIGTERM and SIGUSR1 as schedulers send them, SIGINT as Ctrl-C does."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """The first signal that came, if any. It is noted only: the training loop looks at it between two steps."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

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
        self.signal = self.signal or signal.Signals(number)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Note signals instead of ending by them."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
