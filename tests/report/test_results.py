"""The numbers of a report as JSON: those of evaluate, and their intervals."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
FEW = ["--plugin", "patches", "data.val_images=40"]


def test_the_keys_are_those_of_evaluate_and_intervals_hold_the_values(
    cli: Cli,
    digits_run: Path,
    few_resamples: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = cli("report", digits_run, *FEW, "--out", "r.html", "--json", "report.json")
    assert status == 0, err
    assert cli("evaluate", digits_run, *FEW, "--json", "evaluate.json")[0] == 0
    ours, theirs = (json.loads(Path(f"{name}.json").read_text()) for name in ("report", "evaluate"))

    intervals = ours.pop("intervals")
    per_class, expected = ours.pop("per_class"), theirs.pop("per_class")
    assert ours == theirs
    assert intervals.keys() == ours["metrics"].keys()
    for name, (low, high) in intervals.items():
        assert low <= ours["metrics"][name] <= high or math.isclose(low, high), name

    for name, values in expected.items():
        for key, value in values.items():
            assert per_class[name][key] == pytest.approx(value), (name, key)
        assert per_class[name]["AP_low"] <= per_class[name]["AP"] <= per_class[name]["AP_high"]


def test_targets_that_collide_are_refused(cli: Cli, digits_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    status, _, err = cli("report", digits_run, *FEW, "--out", target, "--json", target)
    assert status == 1
    assert "cannot write two results" in err
