"""The metrics of a card: from a file, which must be of this model, or from the checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch

from mldec.checkpoint import Checkpoint
from mldec.data.types import Classes
from mldec.errors import DataError
from mldec.publish import of_checkpoint, read_results

CLASSES = Classes(("a", "b"))
CONTENT: dict[str, Any] = {
    "metrics": {"mAP": 50.5, "OP": None, "classes_seen": 2},
    "intervals": {"mAP": [40.0, 60.25], "OP": [None, None]},
    "images": 7,
    "left_out": [],
    "weights": "ema",
    "checkpoint": "best.pt",
    "per_class": {"a": {"AP": 1.0, "positives": 3}, "b": {"AP": None, "positives": 0}},
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps({**CONTENT, **changes}))
    return path


def test_results_of_another_name_are_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_results(written(tmp_path), CLASSES, "ema", "best.pt")
    assert caplog.text == ""
    assert read_results(written(tmp_path), CLASSES, "ema", "outputs/a").images == 7
    assert "is of best.pt, and outputs/a is published" in caplog.text


def test_a_file_of_results_is_read(tmp_path: Path) -> None:
    measured = read_results(written(tmp_path), CLASSES, "ema", "best.pt")
    assert measured.source == "from results.json"
    assert measured.images == 7
    assert measured.metrics == CONTENT["metrics"]
    assert measured.intervals == {"mAP": (40.0, 60.25)}
    assert measured.per_class == CONTENT["per_class"]

    # That of evaluate has no intervals, and a zero-shot model is evaluated on any classes.
    content = {key: value for key, value in CONTENT.items() if key != "intervals"}
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert read_results(tmp_path / "results.json", CLASSES, "ema", "best.pt").intervals == {}
    zero_shot = Classes(("x",), queries=torch.zeros(1, 3))
    assert read_results(written(tmp_path), zero_shot, "ema", "best.pt").per_class.keys() == {
        "a",
        "b",
    }


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"weights": "raw"}, "it is of the raw weights, and the ema ones are published"),
        ({"weights": None}, "it is of the None weights"),
        ({"per_class": {"a": {}}}, "it is of other classes"),
        ({"per_class": []}, "it is of other classes"),
        ({"per_class": {"a": {"AP": "1"}, "b": {}}}, "a value in it is no number"),
        ({"per_class": {"a": 1, "b": {}}}, "a value in it is no number"),
        ({"metrics": {"mAP": True}}, "a value in it is no number"),
        ({"metrics": []}, "a value in it is no number"),
        ({"images": "7"}, "a value in it is no number"),
        ({"intervals": {"mAP": [1]}}, "a value in it is no number"),
        ({"intervals": {"mAP": ["1", 2]}}, "a value in it is no number"),
        ({"intervals": []}, "a value in it is no number"),
    ],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(DataError, match=rf"^--results {tmp_path}.*: {fault}"):
        read_results(written(tmp_path, **changes), CLASSES, "ema", "best.pt")


@pytest.mark.parametrize("text", ["[]", "{}", '{"metrics": {}}', "{", ""])
def test_a_file_that_is_no_result_names_the_command_that_writes_one(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"mldec\.report --json"):
        read_results(path, CLASSES, "ema", "best.pt")


def test_the_metrics_of_a_run_are_those_of_the_chosen_weights() -> None:
    saved = Checkpoint.from_state(hostile.good(), Path("x"))
    both = replace(saved, epoch=3, metrics={"val/mAP": 90.0, "val_raw/mAP": 80.0})
    assert of_checkpoint(both, "ema").metrics == {"mAP": 90.0}
    assert of_checkpoint(both, "raw").metrics == {"mAP": 80.0}
    alone = replace(saved, metrics={"val/mAP": 70.0})
    assert of_checkpoint(alone, "raw").metrics == {"mAP": 70.0}
    measured = of_checkpoint(replace(saved, metrics={}), "raw")
    assert (measured.metrics, measured.images, measured.per_class) == ({}, None, {})
