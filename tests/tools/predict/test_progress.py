import logging
import time

import pytest
from support import wait_until

from mldec.errors import DataError
from mldec.predict import results as progress_module
from mldec.predict.results import Progress


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(progress_module, "on_terminal", lambda: False)
    caplog.set_level(logging.INFO, "mldec")
    with Progress("out.jsonl", None) as progress:
        for done in range(1000, 3001, 100):
            now += 10
            progress.update(done)
    assert caplog.messages == [
        f"out.jsonl: {done:,} images, 10.0 images/s" for done in (1500, 2100, 2700)
    ]


def test_on_a_terminal_there_is_a_bar_that_learns_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "on_terminal", lambda: True)
    with Progress("out.jsonl", range(7)) as progress:
        wait_until(lambda: progress._bar.total == 7)
        progress.update(3)
        assert progress._bar.n == 3
    assert "out.jsonl" in capsys.readouterr().err


def test_a_list_that_cannot_be_counted_is_not_reported_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def __iter__(self) -> object:
            raise DataError("damaged")

    monkeypatch.setattr(progress_module, "on_terminal", lambda: True)
    with Progress("out.jsonl", Broken()) as progress:  # type: ignore[arg-type]
        progress.update(1)
        assert progress._bar.total is None
