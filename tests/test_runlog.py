"""The log on the console."""

import pytest

from mldec.runlog import log, to_console


def test_a_name_in_a_warning_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    to_console()
    log.warning("left out: x\x1b]0;pwn\x07.png\nmldec: all is well \udcff")
    assert capsys.readouterr().out == "left out: x?]0;pwn?.png mldec: all is well ?\n"
