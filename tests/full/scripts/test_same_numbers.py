"""Comparison of results in scripts/maintainers/same_numbers.py. Its probes are run by hand."""

import runpy
from pathlib import Path

import torch

SCRIPT = runpy.run_path(
    str(Path(__file__).parents[3] / "scripts" / "maintainers" / "same_numbers.py")
)
plain, verdict = SCRIPT["plain"], SCRIPT["verdict"]


def test_only_exceptions_have_a_tolerance():
    before, after = {"result": {"temperature": 2.0}}, {"result": {"temperature": 2.0001}}
    assert verdict("calibrate_class", before, before) == "same"
    assert verdict("calibrate_class", before, after).startswith("same, with 1")
    assert verdict("evaluate_digits", before, after).startswith("differs: evaluate_digits/temp")
    assert verdict("resume", before, {"error": "no"}).startswith("failed after")


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
