"""How far a long job is: a bar on a terminal, else a line in the log now and then."""

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from tqdm import tqdm

from mldec.errors import UserError
from mldec.runtime.console import on_terminal

log = logging.getLogger("mldec")

EVERY = 60.0  # seconds between two lines of the log


class Progress:
    """A context manager that shows how many images are done.

    Args:
        title: of the bar and the lines.
        images: to count while the work goes on, in a thread: for millions it takes a while; None if
            they cannot be counted.
    """

    def __init__(self, title: str, images: Iterable[object] | None) -> None:
        self._title = title
        self._started = self._last_line = time.monotonic()
        self._first: int | None = None
        self._shows_bar = on_terminal()
        self._bar = tqdm(desc=title, unit=" images", leave=False, disable=not self._shows_bar)
        if images is not None and self._shows_bar:
            threading.Thread(target=self._count, args=(images,), daemon=True).start()

    def update(self, done: int) -> None:
        """Show that so many images are done, those of an earlier run included."""
        if self._shows_bar:
            self._bar.update(done - self._bar.n)
            return

        # The speed is that of this run.
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = done, now
        if now - self._last_line >= EVERY:
            self._last_line = now
            speed = (done - self._first) / max(1e-9, now - self._started)
            log.info(f"{self._title}: {done:,} images, {speed:.1f} images/s")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _count(self, images: Iterable[object]) -> None:
        """Count the images; the job itself reports what cannot be read."""
        with suppress(UserError):
            self._bar.total = sum(1 for _ in images)
