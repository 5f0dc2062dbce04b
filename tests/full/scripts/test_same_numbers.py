"""Comparison of results in scripts/maintainers/same_numbers.py. Its probes are run by hand."""

import runpy
from pathlib import Path

import torch

SCRIPT = runpy.run_path(
    str(Path(__file__).parents[3] / "scripts" / "maintainers" / "same_numbers.py")
)
differences, plain, verdict = (SCRIPT[name] for name in ("differences", "plain", "verdict"))


def test_only_named_exceptions_have_a_tolerance():
    before, after = {"temperature": 2.0}, {"temperature": 2.0001}
    assert verdict("calibrate_class", {"result": before}, {"result": before}) == "same"
    found = verdict("calibrate_class", {"result": before}, {"result": after})
    assert found == "same, with 1 exceptions"
    found = verdict("calibrate_class", {"result": before}, {"result": {"temperature": 2.1}})
    assert found == "differs: calibrate_class/temperature: 2.0 -> 2.1, and 0 more"
    found = verdict("evaluate_digits", {"result": before}, {"result": after})
    assert found.startswith("differs: evaluate_digits/temperature")
    found = verdict("resume", {"result": 1}, {"error": "no"})
    assert found == "failed after: no"


def test_moves_and_times_are_ignored(monkeypatch):
    monkeypatch.setenv("SIDE", "/tmp/before")
    head = {"_target_": "mldec.heads.gap.GAP", "scale": 1.0}
    result = plain({"head": head, "time": 3, "path": "/tmp/before/a.pt", "x": torch.zeros(2)})
    assert result == {
        "head": {"_target_": "GAP", "scale": 1.0},
        "path": "SIDE/a.pt",
        "x": plain(torch.zeros(2)),
    }
    assert plain(torch.zeros(2)) != plain(torch.zeros(2, dtype=torch.float64))
