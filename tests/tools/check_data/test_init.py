"""The command `mldec.check_data`: its arguments, and when it answers."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import one_line

from mldec.check_data import number_or_all, parser

Cli = Callable[..., tuple[int, str, str]]


def test_a_look_at_the_digits_takes_seconds(cli: Cli) -> None:
    before = time.process_time()
    assert cli("check_data", "data=digits", "train.workers=0", "--decode", "5")[0] == 0
    assert time.process_time() - before < 6  # a process with the labels of painted scenes: 26


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "no dataset is chosen: pass data=NAME"),
        (["data=cocoo"], "did you mean 'coco'?"),
        (["data=coco", "data.rot=/x"], "coco takes no such argument; did you mean 'root'?"),
        (["data=coco", "data.root=/nowhere"], "/nowhere is not a folder"),
        (["data=digits", "--json", "/nowhere/r.json"], "cannot write /nowhere/r.json"),
    ],
)
def test_wrong_arguments(cli: Cli, args: list[str], part: str) -> None:
    status, _, err = cli("check_data", *args)
    assert status == 1
    one_line(err, part)


def test_data_without_files(cli: Cli) -> None:
    status, out, err = cli(
        "check_data", "data=digits", "data.train_images=6", "data.val_images=5", "train.workers=0"
    )
    assert status == 0, err
    assert "val: 5 images, 10 classes" in out


@pytest.mark.parametrize(("word", "count"), [("all", None), ("0", 0), ("12", 12)])
def test_the_number_of_images_to_decode(word: str, count: int | None) -> None:
    assert number_or_all(word) == count
    assert parser().parse_args(["--decode", word]).decode == count
    assert parser().parse_args([]).decode is None


@pytest.mark.parametrize("word", ["-1", "1.5", "some", ""])
def test_another_number_of_images_to_decode_is_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither all nor a whole number"):
        number_or_all(word)


def test_the_last_choice_of_a_dataset_counts(cli: Cli, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    words = ["data=coco", "data=digits", "data.train_images=6", "data.val_images=5"]
    status, out, err = cli("check_data", *words, "train.workers=0", "--json", report)
    assert status == 0, err
    assert "published" not in out
    assert json.loads(report.read_text())["train"]["images"] == 6
