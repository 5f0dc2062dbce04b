"""Things kept in memory for a while under a name that nobody can guess, within a limit of bytes."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mldec.errors import UserError

T = TypeVar("T")


class FullError(UserError):
    """There is no room for another thing at the moment."""


@dataclass(frozen=True)
class _Entry(Generic[T]):
    value: T
    size: int
    until: float


class Shelf(Generic[T]):
    """Keep things under random names, in the order of their arrival; safe for several threads.

    Args:
        limit: bytes of all things together.
        seconds: that a thing is kept at most.
        clock: returns seconds.
    """

    def __init__(
        self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of all things that are kept."""
        return self._used

    def add(self, value: T, size: int, *, replace: bool = False) -> str:
        """Keep a thing, and return its name.

        Args:
            value: the thing.
            size: its bytes.
            replace: if there is no room, drop the oldest things.

        Raises:
            FullError: if there is no room.
        """
        with self._lock:
            self._expire()
            while replace and self._entries and self._used + size > self._limit:
                self._drop(next(iter(self._entries)))
            if self._used + size > self._limit:
                raise FullError("too many photos are waiting: try again in a minute")

            name = secrets.token_urlsafe(16)
            self._entries[name] = _Entry(value, size, self._clock() + self._seconds)
            self._used += size
            return name

    def get(self, name: str) -> T | None:
        """Return a thing, or None if it is not kept, or no longer."""
        with self._lock:
            self._expire()
            entry = self._entries.get(name)
            return None if entry is None else entry.value

    def take(self, name: str) -> T | None:
        """Return a thing as `get` does, and keep it no longer."""
        with self._lock:
            self._expire()
            return self._drop(name) if name in self._entries else None

    def expire(self) -> None:
        """Drop what has been kept for too long."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        now = self._clock()
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if entry.until > now:
                return
            self._drop(name)

    def _drop(self, name: str) -> T:
        entry = self._entries.pop(name)
        self._used -= entry.size
        return entry.value
