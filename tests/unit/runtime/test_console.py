"""Output and exit status of commands."""

import argparse
import logging
import os
import subprocess
import sys

import pytest

from mldec import errors
from mldec.cli import run_command
from mldec.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Stopped,
    naming_errors,
    one_line,
    printable,
    visible,
)
from mldec.runtime import console
from mldec.runtime.console import console_output, keep_output_clean, progress_bar, to_console

log = logging.getLogger("mldec")


@pytest.fixture(autouse=True)
def quiet():
    """Start without log handlers, and restore them."""
    handlers, level = log.handlers[:], log.level
    log.handlers.clear()
    yield
    log.handlers[:], log.level = handlers, level


def end(body, redirect="", pass_fds=(), **env):
    """Run statements under `one_line` with a shell redirection; return status, stdout, stderr."""
    code = (
        "import sys\n"
        "import mldec.errors\n"
        "from mldec.errors import ConfigError, print_error, one_line, say\n"
        "with one_line():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, code]
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **env}
    done = subprocess.run(command, capture_output=True, env=environment, pass_fds=pass_fds)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x\x1b]0;pwn\x07.png", "x?]0;pwn?.png"),
        ("two\nlines\r.png", "two?lines?.png"),
        ("\udcff\udcfe.png", "??.png"),
        ("\u202egnp.exe", "?gnp.exe"),
        ("a b\u202fc\u3000\u65e5\u672c.png", "a b\u202fc\u3000\u65e5\u672c.png"),
    ],
)
def test_visible_replaces_control_characters(text, expected):
    assert visible(text) == expected
    assert printable("two\n  lines \x1b[31m") == "two lines ?[31m"


def test_output_has_no_control_characters():
    body = r"say('a\nb', '\x1b[31mred', '  indented')" + "\n" + r"print_error('no\x07 image')"
    assert end(body) == (0, "a?b\n?[31mred\n  indented\n", "mldec: no? image\n")
    status, out, _ = end("say('\\u65e5.png')", PYTHONIOENCODING="ascii")
    assert (status, out) == (0, "\\u65e5.png\n")


def test_full_disk_is_an_error_and_a_closed_pipe_is_none():
    for body in ("say('one')", "say('x' * 100_000)", "say('one'); sys.exit(0)"):
        status, _, err = end(body, "> /dev/full")
        assert (status, err.count("\n")) == (1, 1)
        assert err.startswith("mldec: cannot write standard output")

    reader, writer = os.pipe()
    os.close(reader)
    body = "for number in range(100_000): say('line')"
    assert end(body, f"> /dev/fd/{writer}", pass_fds=[writer])[::2] == (141, "")
    os.close(writer)


def test_each_error_of_several_ranks_is_printed_once(monkeypatch, capfd):
    monkeypatch.setattr(errors, "MAIN_PRINTS_FIRST", 0)
    printed = []
    for rank, shared in (("0", False), ("1", False), ("1", True)):
        monkeypatch.setenv("RANK", rank)
        error = ConfigError("wrong")
        error.shared = shared
        with pytest.raises(SystemExit), one_line():
            raise error
        printed.append(capfd.readouterr().err)
    assert printed == ["mldec: wrong\n", "mldec: rank 1: wrong\n", ""]


@pytest.mark.parametrize(
    ("cause", "name"), [(KeyError("a"), "^x.pt.*'a'"), (ConfigError("size is 0"), "^x.pt.*size")]
)
def test_naming_errors_adds_file(cause, name):
    with pytest.raises(CheckpointError, match=name), naming_errors("x.pt"):
        raise cause


@pytest.mark.parametrize("place", ["options", "work"])
@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (DataError("two\nlines"), 1, "mldec: two lines"),
        (PermissionError(13, "Permission denied", "a/b"), 1, "mldec: cannot use a/b"),
        (Stopped("stopped by SIGTERM", 143), 143, "mldec: stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "mldec: interrupted"),
    ],
)
def test_error_of_command_is_one_line(place, error, status, line, capfd):
    def fail(*_):
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(fail if place == "options" else argparse.Namespace, fail)
    assert ended.value.code == status
    err = capfd.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError(), CheckpointError("x")])
def test_bug_and_user_error_on_request_have_a_traceback(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setenv("MLDEC_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run_command(argparse.Namespace, fail)


def test_messages_are_printed_once(capsys, monkeypatch):
    to_console()
    to_console()
    log.info("one")
    log.warning("two\nthree\x1b[31m")
    log.debug("four")
    assert capsys.readouterr() == ("one\ntwo three?[31m\n", "")

    keep_output_clean()
    log.info("one")
    assert capsys.readouterr() == ("", "one\n")

    # The next command of the same process prints to standard output.
    monkeypatch.setenv("RANK", "1")
    to_console()
    log.info("one")
    log.warning("two")
    assert capsys.readouterr() == ("two\n", ""), "other ranks print warnings only"


def test_silent_commands_print_warnings(capsys):
    with console_output(verbose=False):
        to_console()
        print("result")
        log.info("one")
        log.warning("two")
        assert progress_bar([7, 8]).disable
    assert capsys.readouterr() == ("", "two\n")

    with console_output(verbose=True):
        to_console()
        log.info("one")
        assert not progress_bar([7, 8]).disable
    assert capsys.readouterr() == ("one\n", "")


def test_progress_is_logged_without_a_terminal(capsys, monkeypatch):
    to_console()
    for hidden in (False, True):
        with progress_bar(range(4), desc="tokens", hidden=hidden) as bar:
            assert list(bar) == [0, 1, 2, 3]
    assert capsys.readouterr() == ("", ""), "short work"

    monkeypatch.setattr(console, "LOG_SECONDS", 0)
    list(progress_bar(range(4), desc="tokens"))
    out, err = capsys.readouterr()
    assert "tokens: 50% 2/4 [00:00<" in out
    assert err == ""


def test_progress_bar_of_one_item_is_hidden(monkeypatch):
    monkeypatch.setattr(console, "on_terminal", lambda: True)
    assert progress_bar([7]).disable
    assert progress_bar(iter([7]), total=1).disable
    assert not progress_bar([7, 8]).disable
    assert not progress_bar(iter([7])).disable


def test_progress_bar_is_visible_on_a_terminal_without_a_size(monkeypatch):
    pytest.importorskip("termios", reason="Windows has no pseudo-terminals")
    reader, writer = os.openpty()
    assert os.get_terminal_size(writer).columns == 0
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        list(progress_bar(range(4), desc="tokens"))
        assert b"tokens:   0%|" in os.read(reader, 1000)
    os.close(reader)
