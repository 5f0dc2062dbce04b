"""How a command ends, in real processes that import `mldec.errors` alone to start fast."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mldec.errors import CheckpointError, ConfigError, one_line, printable, refusing, visible


def end(body: str, redirect: str = "", **env: str) -> tuple[int, str, str]:
    """Run statements under `one_line` with a shell redirection; return status, stdout, stderr."""
    code = (
        "import os, sys\n"
        "from mldec.errors import ConfigError, Stopped, complain, one_line, say\n"
        "with one_line():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, code]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONUNBUFFERED": "", **env}
    )
    return (
        done.returncode,
        done.stdout.decode("utf-8", "replace"),
        done.stderr.decode("utf-8", "replace"),
    )


FULL = (
    "mldec: cannot write standard output: No space left on device; "
    "free space, or write to another place\n"
)


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
def test_a_name_is_visible_and_on_one_line(text: str, expected: str) -> None:
    assert visible(text) == expected


def test_a_message_keeps_its_words_apart() -> None:
    assert printable("two\n  lines \x1b[31m") == "two lines ?[31m"


def test_what_is_said_cannot_steer_the_terminal() -> None:
    status, out, err = end(
        r"say('a\nb', '\x1b[31mred', '  indented')" + "\n" + r"complain('no\x07 image')"
    )
    assert (status, out, err) == (0, "a?b\n?[31mred\n  indented\n", "mldec: no? image\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_a_letter_gets_its_number(encoding: str) -> None:
    body = "say('\\u65e5.png')\nprint('\\u65e5.jpg')\ncomplain('\\u65e5')"
    status, out, err = end(body, PYTHONIOENCODING=encoding)
    assert (status, out, err) == (0, "\\u65e5.png\n\\u65e5.jpg\n", "mldec: \\u65e5\n")


@pytest.mark.parametrize("body", ["say('one')", "say('x' * 100_000)", "say('one'); sys.exit(0)"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_standard_output_is_one_line(body: str, unbuffered: str) -> None:
    assert end(body, "> /dev/full", PYTHONUNBUFFERED=unbuffered) == (1, "", FULL)


def test_a_full_disk_does_not_hide_how_a_command_ended() -> None:
    assert end("print('one')\nraise Stopped('by SIGTERM', 143)", "> /dev/full") == (
        143,
        "",
        "mldec: by SIGTERM\n",
    )
    assert end("print('one')\nraise ConfigError('wrong')", "> /dev/full") == (
        1,
        "",
        "mldec: wrong\n",
    )
    assert end("complain('lost')\nsay('done')", "2> /dev/full") == (0, "done\n", "")
    assert end("raise Stopped('by SIGTERM', 143)", "2> /dev/full") == (143, "", "")


def test_closed_streams_are_no_reason_to_fail(tmp_path: Path) -> None:
    file = tmp_path / "file"
    # A file that is opened then does not get the number of a stream, which libraries write to.
    body = (
        "say('one'); complain('two'); sys.stderr.isatty()\n"
        f"file = open({str(file)!r}, 'w')\n"
        "file.write(str(file.fileno() > 2)); file.close()\n"
        "sys.stdout.flush()"
    )
    for redirect, expected in (
        (">&-", (0, "", "mldec: two\n")),
        ("2>&-", (0, "one\n", "")),
        ("<&- >&- 2>&-", (0, "", "")),
    ):
        assert end(body, redirect) == expected
        assert file.read_text() == "True"


def test_a_closed_pipe_ends_without_a_word() -> None:
    body = "for number in range(100_000): say('line')"
    code = f"from mldec.errors import one_line, say\nwith one_line():\n    {body}"
    pipe = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert pipe.stdout is not None
    assert pipe.stderr is not None
    pipe.stdout.readline()
    pipe.stdout.close()
    assert pipe.wait() == 141
    assert pipe.stderr.read() == b""
    pipe.stderr.close()


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (KeyError("a"), r"^x\.pt cannot be used \(KeyError: 'a'\); use another copy$"),
        (ConfigError("size is 0"), r"^x\.pt cannot be used: size is 0$"),
        (CheckpointError("of another file"), r"^of another file$"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(cause: Exception, line: str) -> None:
    with pytest.raises(CheckpointError, match=line), refusing("x.pt"):
        raise cause


def test_the_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLDEC_TRACEBACK", "1")
    with pytest.raises(CheckpointError), one_line():
        raise CheckpointError("x")
