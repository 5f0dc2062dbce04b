"""What an evaluation writes."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import one_line

from mldec.config.compose import compose, override
from mldec.evaluation import Results, memory_advice, report, to_csv
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files.results import to_json

Cli = Callable[..., Any]
NAMES = ("\u65e5\u672c", "b")


def results(
    evaluator: Evaluator, targets: torch.Tensor, confusions: list[tuple[int, int, int]] | None
) -> Results:
    evaluator.update(torch.tensor([[1.0, 0], [0, 1], [2, 1]]), targets)
    return Results(evaluator.compute(), evaluator.per_class(), 3, [], confusions)


def test_numbers_that_do_not_exist_are_null() -> None:
    found = results(MultiLabelEvaluator(2), torch.zeros(3, 2), None)
    content = report(found, "ema", "best.pt", NAMES)
    parsed = json.loads(to_json(content), parse_constant=lambda name: pytest.fail(name))
    assert parsed["metrics"]["mAP"] == 0
    assert parsed["metrics"]["mAP_skip_empty"] is None
    assert parsed["per_class"][NAMES[0]]["AP"] is None
    assert [row["class"] for row in csv.DictReader(io.StringIO(to_csv(found, NAMES)))] == list(
        NAMES
    )


def test_confusions_are_those_of_one_label_per_image() -> None:
    several = results(MultiLabelEvaluator(2), torch.ones(3, 2), None)
    assert "confusions" not in report(several, "ema", "best.pt", NAMES)
    one = results(SingleLabelEvaluator(2, top_k=2), torch.tensor([[1, 0], [0, 1], [1, 0]]), [])
    assert report(one, "ema", "best.pt", NAMES)["confusions"] == []


def test_the_advice_for_too_little_memory_keeps_the_size_of_the_batch() -> None:
    device = torch.device("cpu")
    config = compose(["+experiment=digits", "train.batch_size=32", "train.accumulate=2"])
    assert "16 training images at a time" in memory_advice(config, device)
    assert "in smaller pieces pass train.accumulate=4; " in memory_advice(config, device)

    per_gpu = override(config, ["train.batch_per_gpu=16"])
    assert "pass train.accumulate=4 train.batch_per_gpu=8; " in memory_advice(per_gpu, device)


def test_files_are_refused_first_and_a_full_disk_is_one_line(
    cli: Cli, digits_run: Path, tmp_path: Path
) -> None:
    for words in (["--json", tmp_path], ["--csv", tmp_path / "missing" / "r.csv"]):
        status, out, err = cli("evaluate", "no.pt", *words)
        assert (status, out) == (1, "")
        one_line(err, f"cannot write {words[1]}")
    best = digits_run / "checkpoints" / "best.pt"
    for option in ("--json", "--csv"):
        status, _, err = cli(
            "evaluate", best, "--plugin", "patches", "data.val_images=1", option, "/dev/full"
        )
        assert status == 1
        one_line(
            err,
            "cannot write /dev/full: No space left on device; "
            "free space, or write to another place",
        )
