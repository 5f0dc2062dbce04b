"""The report of a GPU: its parts, their limits, what is kept of them, and the goals."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support import process_state, wait_until

TOP = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(TOP / "scripts" / "gpu_report.py"))


def python(code):
    return [sys.executable, "-S", "-c", code]


def test_the_parts_come_in_the_order_of_their_value(script, tmp_path):
    parts = script["parts"](tmp_path, {"BATCH_SIZE": "128"})
    names = list(dict.fromkeys(part.name.partition(".")[0] for part in parts))
    order = "throughput profile official processes digits tests"
    assert names == order.split()
    assert sum(part.limit for part in parts) < 20 * 60

    compiled = next(part for part in parts if part.name == "throughput.compile")
    [command] = compiled.commands
    assert command[1:4] == ["-m", "mldec.benchmark", "throughput"]
    for setting in ("device=cuda", "train.precision=bf16", "train.batch_size=128"):
        assert setting in command
    assert "train.compile=true" in command

    [command] = parts[-1].commands
    assert "-n 8 --dist load" in " ".join(command)
    assert "tests" not in [part.name for part in script["parts"](tmp_path, {"TESTS": "0"})]


def test_what_fails_is_recorded_with_its_last_lines(script):
    part = script["Part"]("x", 9, [python("print('first')"), python("print('last'); 1 / 0")])
    outcome = script["run"](part, 9)
    assert outcome["status"] == "failed with status 1"
    assert outcome["last_lines"][:2] == ["first", "last"]
    assert outcome["last_lines"][-1].startswith("ZeroDivisionError")


def test_what_takes_too_long_is_ended_with_its_processes(script, tmp_path, monkeypatch):
    # A shell with a child in a session of its own, as torchrun's are, which has a child too.
    file, wait = tmp_path / "pids", subprocess.Popen.wait
    child = f"sleep 600 & echo $$ $! > {file}; wait"
    command = ["sh", "-c", f"echo begun; setsid sh -c '{child}' & wait"]

    def until_all_run(process, limit=None):
        """Let the time be over when all of them run."""
        if limit is None:
            return wait(process)
        wait_until(lambda: file.exists() and file.read_text())
        raise subprocess.TimeoutExpired("sh", limit)

    monkeypatch.setattr(subprocess.Popen, "wait", until_all_run)
    outcome = script["run"](script["Part"]("x", 9, [command]), 9)
    assert (outcome["status"], outcome["last_lines"]) == ("timed out after 9 s", ["begun"])
    numbers = [int(number) for number in file.read_text().split()]
    wait_until(lambda: all(process_state(number) == "Z" for number in numbers))


def test_the_whole_report_on_a_cpu(tmp_path):
    out = tmp_path / "report.json"
    command = [str(TOP / "scripts" / "gpu_report.sh"), str(out)]
    environment = {**os.environ, "DEVICE": "cpu", "MINUTES": "60"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()

    report = json.loads(out.read_text())
    assert {part["status"] for part in report["parts"].values()} == {"done"}
    assert set(report["tests"].values()) == {"skipped"}
    assert report["throughput"].keys() == {
        "eager",
        "channels_last",
        "compile",
        "compile_channels_last",
        "gap",
    }
    for name in ("profile", "official", "digits"):
        assert report[name]
    assert report["official"].keys() == {"step", "head"}
    assert report["goals"]["times_eager"]["value"] > 0
    assert done.stdout.splitlines()[-1] == f"written: {out}"
