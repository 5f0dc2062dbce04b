"""What is kept in memory: for how long, how much, and for whom."""

import pytest

from mldec.demo.shelf import FullError, Shelf


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_thing_is_taken_once() -> None:
    shelf: Shelf[str] = Shelf(10, 60)
    first, second = shelf.add("a", 4), shelf.add("b", 4)
    assert len({first, second}) == 2
    assert len(first) > 20, "nobody guesses it"
    assert shelf.get(first) == "a"
    assert shelf.take(first) == "a"
    assert shelf.take(first) is shelf.get(first) is None
    assert (shelf.take(second), shelf.used) == ("b", 0)


def test_a_full_shelf_refuses_or_drops_the_oldest() -> None:
    shelf: Shelf[str] = Shelf(10, 60)
    names = [shelf.add(letter, 4) for letter in "ab"]
    with pytest.raises(FullError, match="too many photos are waiting"):
        shelf.add("c", 4)
    assert [shelf.get(name) for name in names] == ["a", "b"], "nothing is lost"

    shelf.add("c", 4, replace=True)
    assert [shelf.get(name) for name in names] == [None, "b"]
    assert shelf.used == 8
    with pytest.raises(FullError):
        shelf.add("d", 11, replace=True)


def test_what_waits_too_long_is_dropped() -> None:
    clock = Clock()
    shelf: Shelf[str] = Shelf(10, 60, clock)
    first = shelf.add("a", 5)
    clock.now = 59
    second = shelf.add("b", 5)
    assert shelf.get(first) == "a"
    clock.now = 60
    shelf.expire()
    assert shelf.used == 5
    assert shelf.get(first) is None
    assert shelf.take(second) == "b"
