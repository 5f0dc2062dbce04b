"""How far a run is, from logs as runs write them and as they do not."""

import json
import math
from pathlib import Path

import pytest

from mldec.errors import CheckpointError
from mldec.training.log import Evaluation, read_progress


def test_the_time_of_a_resumed_run_counts_every_process(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = [(5.0, 1), (3600.0, 1), (2.0, 2), (70.0, 2)]
    path.write_text(
        "".join(json.dumps({"time": time, "epoch": e, "val/mAP": 1.0}) + "\n" for time, e in times)
    )
    done = read_progress(path)
    assert (done.epoch, done.seconds) == (2, 3670.0)


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", '{"time": "x", "epoch": 1}', "[" * 100_000, '{"epoch": 1}']
)
def test_a_log_that_no_run_writes_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(CheckpointError, match="is not what a run writes"):
        read_progress(tmp_path / "metrics.jsonl")


def test_each_evaluation_has_the_better_value_and_the_time_until_then(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"time": 5.0, "epoch": 0, "train/loss": 1.0},
        {"time": 10.0, "epoch": 1, "val/mAP": 3.0, "val/CF1": 9.0, "val_raw/mAP": 7.0},
        {"time": 4.0, "epoch": 2, "val/mAP": 7.0, "val_raw/mAP": 7.0},
        {"time": 6.0, "epoch": 3, "val/mAP": None, "val_raw/mAP": 1.0},
        {"time": 8.0, "epoch": 4, "val/mAP": None},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress = read_progress(path)
    assert progress.evaluations[:3] == [
        Evaluation(1, 10.0, "mAP", 7.0, "raw"),
        Evaluation(2, 14.0, "mAP", 7.0, "ema"),
        Evaluation(3, 16.0, "mAP", 1.0, "raw"),
    ]
    assert math.isnan(progress.evaluations[3].value)
    assert progress.best == {"metric": "mAP", "value": 7.0, "weights": "raw"}
    assert (progress.epoch, progress.seconds) == (4, 18.0)


def test_a_run_without_a_log_has_no_progress(tmp_path: Path) -> None:
    progress = read_progress(tmp_path / "metrics.jsonl")
    assert (progress.epoch, progress.seconds, progress.best) == (0, 0.0, {})
