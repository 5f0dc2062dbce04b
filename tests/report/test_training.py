import json
import shutil
from pathlib import Path

import pytest

from mldec.report.training import MOST_POINTS, folder_of_run, learning_curves, of_run


@pytest.fixture
def best(digits_run: Path, tmp_path: Path) -> Path:
    """The best checkpoint in a copy of a run."""
    copy = tmp_path / "run"
    shutil.copytree(digits_run, copy)
    return copy / "checkpoints" / "best.pt"


def test_a_run_has_a_cost_and_curves(best: Path) -> None:
    summary, curves, notes = of_run(best)
    facts = json.loads((best.parents[1] / "run.json").read_text())
    assert dict(summary)["Trainable parameters"] == f"{facts['parameters']:,}"
    assert facts["command"] in dict(summary)["Trained by"]
    assert dict(summary)["Training time"].startswith("0:00:")
    assert [curve.name for curve in curves] == ["train/loss", "val/mAP", "val_raw/mAP"]
    lines = (best.parents[1] / "metrics.jsonl").read_text().splitlines()
    assert curves[1].values[-1] == json.loads(lines[-1])["val/mAP"]
    assert notes == []


def test_a_checkpoint_alone_has_neither(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "best.pt"
    assert folder_of_run(path) is None
    summary, curves, [note] = of_run(path)
    assert (summary, curves) == ([], [])
    assert "Neither metrics.jsonl nor run.json lies beside the checkpoint" in note


def test_files_beside_a_checkpoint_count_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "time": 2, "val/mAP": 3}\n')
    assert folder_of_run(tmp_path / "best.pt") == tmp_path
    summary, [curve], notes = of_run(tmp_path / "best.pt")
    assert (curve.steps, curve.values) == ([1], [3.0])
    assert dict(summary) == {"Training time": "0:00:02"}
    assert notes == ["There is no run.json beside the checkpoint: its cost is not known."]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1, "val/mAP": 3}'])
def test_damaged_files_are_named_and_do_not_end_a_report(best: Path, line: str) -> None:
    (best.parents[1] / "metrics.jsonl").write_text(line + "\n")
    (best.parents[1] / "run.json").write_text("[")
    _, _, notes = of_run(best)
    assert len(notes) == 2
    assert "run.json is not what a run writes" in notes[0]
    assert "metrics.jsonl is not what a run writes" in notes[1]


def test_long_curves_are_thinned_and_gaps_left_out() -> None:
    count = 2 * MOST_POINTS + 1
    lines = [{"step": step, "train/loss": 1.0 * step, "train/lr": 1} for step in range(count)]
    lines.append({"step": count, "val/top1": None, "val/top5": 3.0, "val_raw/top1": 5})
    loss, raw = learning_curves(lines)
    assert len(loss.steps) <= MOST_POINTS
    assert (loss.steps[-1], loss.values[-1]) == (count - 1, count - 1)
    assert (raw.name, raw.steps, raw.values) == ("val_raw/top1", [count], [5.0])
