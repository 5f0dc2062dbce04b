"""The list of commands, help and version, which need no torch."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mldec
from mldec.__main__ import COMMANDS, main, overview
from mldec.cli import VERSION

ROOT = Path(mldec.__file__).parents[1]


def test_the_list_has_every_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"mldec": "mldec.__main__:main"}
    assert all(f"mldec {name} " in overview() for name in COMMANDS)
    tools = {path.stem.replace("_", "-") for path in (ROOT / "mldec" / "tools").iterdir()}
    assert set(COMMANDS) - {"train", "evaluate"} <= tools


@pytest.mark.parametrize(
    ("words", "status", "answer"),
    [
        (["-h"], 0, "mldec evaluate"),
        (["--version"], 0, VERSION),
        (["train", "--epochs", "3"], 1, "mldec: --epochs: unknown option"),
        (["check-data", "--ot", "x"], 2, "mldec: --ot: unknown option; did you mean '--out'?"),
        (["benchmark", "data"], 2, "scripts/benchmark.py"),
        (["predcit"], 2, "predcit: unknown command; did you mean 'predict'?"),
    ],
)
def test_without_a_command(words, status, answer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mldec", *words])
    ended = 0
    try:
        main()
    except SystemExit as stop:
        ended = stop.code or 0
    assert ended == status
    out, err = capsys.readouterr()
    assert answer in (err if status else out)


@pytest.mark.parametrize(
    ("words", "status", "answer"),
    [
        ("train --help", 0, "mldec train"),
        ("predict --help", 0, "mldec predict"),
        ("evaluate nothing", 1, "mldec: nothing: file not found"),
        ("predict nothing a.jpg", 1, "mldec: nothing: file not found"),
        ("report nothing --out x.html", 1, "mldec: nothing: file not found"),
        ("demo nothing", 1, "mldec: nothing: file not found"),
    ],
)
def test_help_and_missing_checkpoints_need_no_torch(words, status, answer):
    # They are instant without these imports; how long that is depends on how busy the machine is.
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mldec", *words.split()],
        capture_output=True,
        text=True,
    )
    imported = {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == status
    assert answer in (done.stderr if status else done.stdout)
    assert "mldec.cli" in imported
    assert not imported & {"torch", "timm", "torchvision"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_our_version(command, cli):
    assert cli(command, "--version")[:2] == (0, VERSION + "\n")
