"""What the commands share: values of options, and how a command ends."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from mldec.errors import DataError, Stopped
from mldec.runtime import cli
from mldec.runtime.cli import (
    VERSION,
    add_model_options,
    chosen_model,
    command,
    fraction,
    image_side,
    positive,
    run_command,
)
from mldec.runtime.devices import MAX_IMAGE_SIZE


@pytest.fixture(autouse=True)
def no_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "to_console", lambda: None)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (positive, "1", 1),
        (positive, "1000000", 1_000_000),
        (image_side, "224", 224),
        (image_side, str(MAX_IMAGE_SIZE), MAX_IMAGE_SIZE),
        (fraction, "0", 0.0),
        (fraction, "1", 1.0),
        (fraction, "1e-3", 0.001),
    ],
)
def test_values(read: Any, text: str, value: float) -> None:
    assert read(text) == value
    assert type(read(text)) is type(value)


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (positive, ["0", "-1", "1.5", "", "x", "+3", "\u00b2"]),
        (image_side, ["0", str(MAX_IMAGE_SIZE + 1), "9" * 5000, "x"]),
        (fraction, ["-0.1", "1.1", "nan", "inf", "", "x"]),
    ],
)
def test_other_values_are_refused(read: Any, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            read(text)

        # And argparse turns that into one line, not into a traceback.
        parser = command("x", "y")
        parser.add_argument("--option", type=read)
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([f"--option={text}"])
        assert ended.value.code == 2


def test_the_parser_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command("look", "First line.\n\n  second line")
    with pytest.raises(SystemExit):
        parser.parse_args(["--version"])
    assert capsys.readouterr().out == f"{VERSION}\n"
    assert "First line.\n\n  second line\n" in parser.format_help()
    assert "usage: python -m mldec.look " in parser.format_help()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.pt"], {"weights": None, "image_size": None, "class_names": None, "plugins": []}),
        (
            ["a.pt", "--weights=raw", "--image-size=96", "--class-names=n", "--plugin=a"],
            {"weights": "raw", "image_size": 96, "class_names": "n", "plugins": ["a"]},
        ),
    ],
)
def test_options_become_the_arguments_of_load_model(
    words: list[str], expected: dict[str, Any]
) -> None:
    import inspect

    from mldec.checkpoint import load_model

    parser = command("x", "y")
    add_model_options(parser)
    chosen = chosen_model(parser.parse_args(words))
    assert chosen == {"path": "a.pt", **expected}
    inspect.signature(load_model).bind(**chosen)


def no_options() -> argparse.Namespace:
    return argparse.Namespace(a=3)


@pytest.mark.parametrize(("result", "status"), [(None, 0), (0, 0), (1, 1)])
def test_the_status_is_that_of_the_work(result: int | None, status: int) -> None:
    seen = []
    with pytest.raises(SystemExit) as ended:
        run_command(no_options, lambda args: seen.append(args.a) or result)
    assert (ended.value.code or 0) == status
    assert seen == [3]


@pytest.mark.parametrize("place", ["options", "work"])
@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (DataError("two\nlines"), 1, "mldec: two lines"),
        (Stopped("stopped by SIGTERM", 143), 143, "mldec: stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "mldec: interrupted"),
    ],
)
def test_an_error_is_one_line(
    place: str, error: BaseException, status: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(fail if place == "options" else no_options, fail)
    assert ended.value.code == status
    assert capfd.readouterr().err == f"{line}\n"


def test_a_bug_stays_a_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(no_options, lambda args: 1 // 0)


def test_it_imports_no_torch() -> None:
    """So that --help and a wrong argument answer at once."""
    import subprocess

    script = "import sys, mldec.runtime.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent).returncode == 0
