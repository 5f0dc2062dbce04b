"""The report of a GPU: its parts, what is kept of those that fail, and the goals."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import process_state, wait_until

from mldec.errors import ConfigError

TOP = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "gpu_report", TOP / "scripts" / "maintainers" / "gpu_report.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_report"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measured(script, tmp_path):
    """Measure a part that runs commands of Python, and return what the file says of it."""
    setup = script.Setup(tmp_path, tmp_path / "out.json", "cpu")

    def measure(*codes, limit=60.0, result="x.json"):
        commands = [[sys.executable, "-S", "-c", code] for code in codes]
        file = tmp_path / result if result else None
        part = script.Part("x", 60, commands, file)
        script.measure(part, {"environment": {}, "parts": {}}, setup, limit)
        return json.loads(setup.out.read_text())["parts"]["x"]

    return measure


def test_the_parts_come_in_the_order_of_their_value(script, tmp_path):
    parts = script.training(script.Setup(tmp_path, tmp_path / "out.json", "cuda"))
    names = ["throughput", "profile", "official", "head_80", "head_9605", "head", "compile"]
    assert [part.name for part in parts[:7]] == names
    assert {goal.part for goal in script.GOALS.values()} < {*names, "loader", "loader_alone"}

    # The batches are those of the review, the first of them the recipe's.
    assert sorted(int(part.name.split("_")[1]) for part in parts[7:]) == [64, 128, 256]
    [command] = parts[0].commands
    assert command[1:5] == ["-m", "mldec", "benchmark", "throughput"]
    assert "device=cuda" in command
    assert not any(word.startswith(("backbone=", "train.")) for word in command)
    [command] = parts[1].commands
    assert command[command.index("--trace") + 1] == str(tmp_path / "out.trace.json.gz")

    [part] = script.tests(script.Setup(tmp_path, tmp_path / "out.json", "cuda"))
    assert "-n 8 --dist load -m gpu" in " ".join(part.commands[0])


def test_what_fails_is_recorded_with_its_last_lines(measured):
    outcome = measured("print('first')", "print('last'); 1 / 0")
    assert outcome["status"] == "failed with status 1"
    assert outcome["last_lines"][:2] == ["first", "last"]
    assert outcome["last_lines"][-1].startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("Duplicate GPU detected : rank 1", "not possible here: NCCL says Duplicate GPU detected"),
        (
            "Multiple Ranks are using the same GPU",
            "not possible here: NCCL says Multiple Ranks are using the same GPU",
        ),
    ],
)
def test_a_limit_of_the_machine_is_no_failure(measured, text, status):
    assert measured(f"raise MemoryError({text!r})")["status"] == status


def test_missing_and_outdated_packages_are_named_together(script, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name in ("hydra-core", "antlr4-python3-runtime", "pytest-xdist"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.1" if name == "filelock" else real(name)

    script.check_packages("tests")
    monkeypatch.setattr(importlib.metadata, "version", version)
    for command, more in (("training", False), ("tests", True)):
        with pytest.raises(ConfigError, match=r"hydra-core.*filelock.* 3.1.*antlr4") as caught:
            script.check_packages(command)
        assert ("pytest-xdist" in str(caught.value)) is more
        assert "timm" not in str(caught.value)


def test_images_fill_whole_batches(script, tmp_path, monkeypatch):
    counts = {}
    monkeypatch.setattr(script, "_make_coco", lambda root, **of_split: counts.update(of_split))
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: 1)
    script.inference(script.Setup(tmp_path, tmp_path / "out.json", "cuda"))
    # Batches of training, and of evaluation; two_ranks trains on the validation images.
    assert counts["train"] % 56 == counts["val"] % 56 == counts["val"] % 64 == 0


WRITE = "open({file!r}, 'w').write('{{\"figures\": {{\"speed\": 7}}}}')"


def test_a_figure_is_in_the_file_while_its_part_still_runs(measured, tmp_path):
    write = WRITE.format(file=str(tmp_path / "x.json"))
    out = str(tmp_path / "out.json")
    outcome = measured(f"{write}\nwhile 'speed' not in open({out!r}).read(): pass")
    assert (outcome["status"], outcome["figures"]) == ("done", {"speed": 7})


def test_what_was_measured_stays_when_the_time_is_over(measured, tmp_path):
    write = WRITE.format(file=str(tmp_path / "x.json"))
    outcome = measured(f"{write}\nimport time; time.sleep(600)", limit=3)
    assert (outcome["status"], outcome["figures"]) == ("timed out after 3 s", {"speed": 7})
    assert measured("1", limit=0)["status"] == "not run: MINUTES are over"


def test_what_takes_too_long_is_ended_with_its_processes(script, tmp_path):
    # A shell with a child in a session of its own, as torchrun's are, which has a child too.
    file = tmp_path / "pids"
    child = f"sleep 600 & echo $$ $! > {file}; wait"
    part = script.Part("x", 9, [["sh", "-c", f"setsid sh -c '{child}' & wait"]])
    limit = 2.0
    while not (file.exists() and file.read_text()):
        assert limit < 100
        status = script.run(part, limit, tmp_path / "log", lambda: None)
        assert status.startswith("timed out")
        limit *= 2
    numbers = [int(number) for number in file.read_text().split()]
    wait_until(lambda: all(process_state(number) == "Z" for number in numbers))


def test_the_outcomes_of_tests_are_read_from_their_output(measured):
    line = "[gw{0}] [ 10%] {1} tests/gpu/test_step.py::test_a[{0}]"
    lines = [line.format(0, "PASSED"), line.format(1, "FAILED")]
    outcome = measured(f"print({lines[0]!r}); print({lines[1]!r}); raise SystemExit(1)", result="")
    assert outcome["figures"] == {
        "tests/gpu/test_step.py::test_a[0]": "passed",
        "tests/gpu/test_step.py::test_a[1]": "failed",
    }


def test_the_speed_of_a_run_leaves_out_its_warm_up(script):
    reports = [
        {"train/loss": 3.0, "train/images_per_second": speed, "train/data_wait": wait}
        for speed, wait in ((10, 0.9), (200, 0.01), (180, 0.03), (9000, 0.02))
    ]
    lines = [json.dumps(line) for line in ({"val/mAP": 1}, *reports)]
    figures = script.run_figures("\n".join([*lines, '{"train/lo']))
    assert figures["images_per_second"] == 200
    assert figures["data_wait_percent"] == pytest.approx(2)
    assert script.run_figures("") == {}


def test_goals_are_compared_with_what_was_measured(script):
    parts = {
        "official": {"figures": {"times_official_step": 1.6, "times_official_step_equal": 0.9}},
        "head_80": {"figures": {"beyond_percent": 3.5}},
        "profile": {"figures": {"mfu_percent": 12.3}},
        "compile": {"figures": {}},
    }
    compared = script.goals(parts)
    assert {name: entry["met"] for name, entry in compared.items()} == {
        "times_official_step": True,
        "times_official_step_equal": False,
        "head_percent_80": True,
        "product_percent": None,
        "times_eager": None,
    }
    assert script.goal_lines(compared)[1:] == [
        "missed: times_official_step_equal 0.9 (goal: >= 1.0)",
        "met: head_percent_80 3.5 (goal: <= 4)",
        "product_percent 12.3",
        "times_eager not measured",
    ]


# The other parts are further calls of the same commands.
@pytest.mark.parametrize(
    ("command", "parts"),
    [("training", ["throughput_64"]), ("inference", ["loader", "loader_alone", "predict"])],
)
def test_parts_run_on_a_cpu(tmp_path, command, parts):
    out = tmp_path / "report.json"
    words = [str(TOP / "scripts" / "maintainers" / "gpu_report.sh"), command, str(out), *parts]
    environment = {**os.environ, "DEVICE": "cpu", "MINUTES": "60"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()

    report = json.loads(out.read_text())
    assert {part["status"] for part in report["parts"].values()} == {"done"}
    assert list(report["parts"]) == parts
    for part in report["parts"].values():
        assert any(isinstance(value, float) for value in part["figures"].values())
    assert {"commit", "nccl", "gpus_before", "gpus_after"} <= report["environment"].keys()
    assert done.stdout.splitlines()[-1] == f"written: {out}"


def test_nvidia_smi_is_asked_for_each_gpu(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.gpu_state() is None

    command = tmp_path / "nvidia-smi"
    row = "580.1, 1980, 1980, 2619, 41, 95.20, 700.00"
    command.write_text(f"#!/bin/sh\necho '{row}'\necho '{row}'\n")
    command.chmod(0o755)
    [first, _] = script.gpu_state()
    assert first["clocks.sm"] == "1980"
    assert first["power.limit"] == "700.00"
