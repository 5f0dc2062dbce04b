"""Checkpoints of an earlier version load, evaluate and resume to the numbers of that version.

`released_versions/0_1` holds two runs of commit f473d21 with tiny networks, stopped after two
epochs, and the numbers that this commit gave for them. A file of the authors would have 100 MB or
more: `parity/` holds the names and shapes of three of them, fills them with values that anyone can
rebuild, and compares the logits.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldec import train
from mldec.config.compose import parse
from mldec.files.torch_files import read_torch

FOLDER = Path(__file__).parent / "released_versions" / "0_1"
NUMBERS = json.loads((FOLDER / "numbers.json").read_text())


@pytest.mark.parametrize("weights", ["raw", "ema"])
@pytest.mark.parametrize("run", NUMBERS)
def test_evaluates_to_the_same_numbers(
    run: str, weights: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"

    outcome = cli("evaluate", FOLDER / f"{run}.pt", "--weights", weights, "--json", report)

    assert outcome.status == 0, outcome.err
    # A later version may have more metrics.
    metrics, expected = json.loads(report.read_text())["metrics"], NUMBERS[run]["evaluate"][weights]
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("run", NUMBERS)
def test_resumes_to_the_same_numbers(run: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "last.pt"
    checkpoint.parent.mkdir()
    shutil.copy(FOLDER / f"{run}.pt", checkpoint)
    saved = read_torch(checkpoint)["config"]
    config = parse({**saved, "resume": "auto", "train": {**saved["train"], "epochs": 3}})

    train.run(config, tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line, expected in zip(
        lines[-len(NUMBERS[run]["resumed_epoch"]) :], NUMBERS[run]["resumed_epoch"], strict=True
    ):
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-5)
