"""The comparison of two results: what is slower, on one side only, or measured elsewhere."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import one_line

TOP = Path(__file__).parents[3]
SCRIPT = TOP / "scripts" / "compare_benchmarks.py"
direction = runpy.run_path(str(SCRIPT))["direction"]

Compare = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Run the script; return status, lines of standard output, and standard error."""

    def run(*words: str | Path) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out.splitlines(), captured.err

    return run


def write(path: Path, figures: dict[str, Any], **environment: Any) -> Path:
    content = {"benchmark": "x", "figures": figures, "environment": environment}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("figures.coco_seconds", -1),
        ("seconds_per_run", -1),
        ("ms_full_81", -1),
        ("peak_gib", -1),
        ("first_start_mib", -1),
        ("train_images_per_second", 1),
        ("gflop_per_second", 1),
        ("times_faster", 1),
        ("times_official", 1),
        ("digits.mAP", 1),
        ("zsl_mAP", 1),
        ("mfu_percent", 1),
        ("open_images_times_products", -1),
        ("batch_size", None),
        ("head_percent", None),
        ("gmac_full_81", None),
        ("file_kib", None),
        ("items", None),
    ],
)
def test_the_name_says_which_direction_is_better(name: str, better: int | None) -> None:
    assert direction(name) == better


def test_slower_figures_are_listed(compare: Compare, tmp_path: Path) -> None:
    old = write(tmp_path / "old", {"a_ms": 100.0, "b_per_second": 100, "c_ms": 1.0, "d_ms": 1.0})
    new = write(tmp_path / "new", {"a_ms": 106.0, "b_per_second": 94, "c_ms": 1.04, "d_ms": 0.5})
    assert compare(old, new) == (
        1,
        [
            "slower by 6.0 %: figures.a_ms 100 -> 106",
            "slower by 6.4 %: figures.b_per_second 100 -> 94",
            "4 figures compared, 2 slower by more than 5 %",
        ],
        "",
    )
    assert compare(old, new, "--limit", "7")[:2] == (
        0,
        ["4 figures compared, 0 slower by more than 7 %"],
    )
    # The other way round, only d is slower.
    assert compare(new, old)[1][0].startswith("slower by 100.0 %: figures.d_ms")


def test_what_differs_besides_is_named(compare: Compare, tmp_path: Path) -> None:
    old = write(
        tmp_path / "old",
        {"a_ms": 1.0, "old_ms": 1.0, "zero_ms": 0.0, "batch_size": 8, "largest_difference": 1e-6},
        torch="2.15.0",
        cores=2,
        date="2026-01-01",
    )
    new = write(
        tmp_path / "new",
        {"a_ms": 1.0, "new_ms": 1.0, "zero_ms": None, "batch_size": 16, "largest_difference": 0.1},
        torch="2.16.0",
        cores=2,
        date="2026-01-02",
    )
    assert compare(old, new)[:2] == (
        0,
        [
            "other environment: torch 2.15.0 -> 2.16.0",
            "only in OLD: figures.old_ms",
            "not comparable: figures.zero_ms 0.0 -> None",
            "other measurement: figures.batch_size 8 -> 16",
            "only in NEW: figures.new_ms",
            "1 figures compared, 0 slower by more than 5 %",
        ],
    )


def test_folders_are_compared_file_by_file(compare: Compare, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    write(old / "gone.json", {"a_ms": 1.0})
    write(old / "same.json", {"a_ms": 1.0})
    write(new / "same.json", {"a_ms": 2.0})
    status, lines, _ = compare(old, new)
    assert (status, lines[:2]) == (
        1,
        [f"only in {old}: gone.json", "same.json: slower by 100.0 %: figures.a_ms 1 -> 2"],
    )


def test_the_committed_results_are_not_slower_than_themselves(compare: Compare) -> None:
    status, lines, err = compare(TOP / "benchmarks", TOP / "benchmarks")
    assert (status, err) == (0, "")
    count = int(lines[-1].split()[0])
    assert count > 30


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_bad_input_is_one_line(compare: Compare, tmp_path: Path, content: str | None) -> None:
    good, bad = write(tmp_path / "good", {"a_ms": 1.0}), tmp_path / "bad"
    if content is not None:
        bad.write_text(content)
    status, _, err = compare(good, bad)
    assert status == 1
    one_line(err, str(bad))


def test_a_file_and_a_folder_are_not_compared(compare: Compare, tmp_path: Path) -> None:
    status, _, err = compare(write(tmp_path / "old", {}), tmp_path)
    assert status == 1
    one_line(err, "a file and a folder")
    status, _, err = compare(tmp_path, tmp_path)
    assert status == 1
    one_line(err, "no JSON file")
