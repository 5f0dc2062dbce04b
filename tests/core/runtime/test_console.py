"""What reaches standard output, and when a progress bar has a reader."""

import io
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from mldec.errors import UserError
from mldec.runtime.cli import keep_output_clean, on_terminal, to_console

log = logging.getLogger("mldec")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave the log as it was; start without handlers."""
    handlers, level = log.handlers[:], log.level
    log.handlers.clear()
    yield
    log.handlers[:], log.level = handlers, level


def test_messages_go_to_standard_output_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    to_console()
    to_console()
    log.info("one")
    log.warning("two\nthree\x1b[31m")
    log.debug("four")
    assert capsys.readouterr() == ("one\ntwo three?[31m\n", "")


def test_messages_leave_standard_output_to_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    to_console()
    keep_output_clean()
    log.info("one")
    assert capsys.readouterr() == ("", "one\n")

    # The next command of the same process, as in a notebook, prints as usual.
    to_console()
    log.info("two")
    assert capsys.readouterr() == ("two\n", "")


def test_other_processes_say_warnings_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    to_console()
    log.info("one")
    log.warning("two")
    assert capsys.readouterr().out == "two\n"


def test_messages_stand_above_a_progress_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tqdm import tqdm

    to_console()
    with tqdm(total=2, mininterval=0) as bar:
        bar.update()
        capsys.readouterr()
        log.info("one")
        message, drawn = capsys.readouterr()
    assert message == "one\n"
    assert drawn.startswith("\r "), "the bar is cleared first"
    assert "1/2" in drawn, "and drawn again below the message"


def test_a_full_disk_under_standard_output_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    to_console()
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(UserError, match="cannot write standard output: No space left"):
        log.info("one")


def test_a_terminal_is_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert on_terminal()
    os.close(leader)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not on_terminal()
