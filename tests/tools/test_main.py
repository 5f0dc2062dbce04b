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


RUN_ALL = """
import sys
from mldec.__main__ import main

for line in sys.argv[1:]:
    sys.argv = ["mldec", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(f"status {end.code or 0}")
print(sorted({"numpy", "timm", "torch", "torchvision"} & sys.modules.keys()))
"""


def test_help_and_missing_checkpoints_need_no_torch():
    """They are instant without these imports. All commands run in one new process."""
    helped = ["train --help", "train +experiment=digits -h", "predict --help"]
    missing = ["evaluate nothing", "predict nothing a.jpg", "report nothing --out x.html"]
    missing.append("demo nothing")
    command = [sys.executable, "-c", RUN_ALL, *helped, *missing]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done
    for part in ("mldec train", "optim.name=muon", "mldec predict"):
        assert part in done.stdout
    assert done.stdout.count("status 1\n") == len(missing)
    assert done.stderr.count("mldec: nothing: file not found") == len(missing)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_our_version(command, cli):
    assert cli(command, "--version")[:2] == (0, VERSION + "\n")
