"""The record of the parts of a GPU report; tests/gpu_host runs the parts."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from support import process_state, wait_until

TOP = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    path = TOP / "scripts" / "maintainers" / "gpu_report.py"
    spec = importlib.util.spec_from_file_location("gpu_report", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_report"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measured(script, tmp_path):
    """Measure a part that runs Python code, and return its entry in the report."""
    setup = script.Setup(tmp_path, tmp_path / "out.json", "cpu")

    def measure(*codes, limit=60.0, result="x.json"):
        commands = [[sys.executable, "-S", "-c", code] for code in codes]
        part = script.Part("x", 60, commands, tmp_path / result if result else None)
        script.measure(part, {"environment": {}, "parts": {}}, setup, limit)
        return json.loads(setup.out.read_text())["parts"]["x"]

    return measure


def test_failed_parts_are_recorded_with_their_last_lines(measured):
    outcome = measured("print('first')", "print('last'); 1 / 0")
    assert outcome["status"] == "failed with status 1"
    assert outcome["last_lines"][:2] == ["first", "last"]
    assert outcome["last_lines"][-1].startswith("ZeroDivisionError")
    for text, status in (
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("Duplicate GPU detected : rank 1", "not possible here"),
    ):
        assert measured(f"raise MemoryError({text!r})")["status"].startswith(status)


def test_figures_are_written_while_a_part_runs_and_kept_at_its_limit(measured, tmp_path):
    file, out = str(tmp_path / "x.json"), str(tmp_path / "out.json")
    write = f"open({file!r}, 'w').write('{{\"figures\": {{\"speed\": 7}}}}')"
    outcome = measured(f"{write}\nwhile 'speed' not in open({out!r}).read(): pass")
    assert (outcome["status"], outcome["figures"]) == ("done", {"speed": 7})
    outcome = measured(f"{write}\nimport time; time.sleep(600)", limit=3)
    assert (outcome["status"], outcome["figures"]) == ("timed out after 3 s", {"speed": 7})
    assert measured("1", limit=0)["status"].startswith("not run")


def test_figures_of_an_evaluation_are_its_main_metric_and_weights(measured, tmp_path):
    evaluated = {"metrics": {"mAP": 7.5, "CF1": 3.0}, "weights": "ema", "images": 40}
    (tmp_path / "x.json").write_text(json.dumps(evaluated))
    assert measured("1")["figures"] == {"mAP": 7.5, "weights": "ema"}


def test_a_part_is_killed_with_its_descendants(script, tmp_path):
    # Like torchrun: a child in another session, with a child process.
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
