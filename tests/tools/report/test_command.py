"""The command from a checkpoint to a page, on data of each kind, and what it refuses."""

import argparse
import importlib.util
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import QUICK, one_line

from mldec import checkpoint, report
from mldec.data.types import Classes
from mldec.errors import ConfigError, DataError
from mldec.report import make
from mldec.report.make import prepare, prepare_other
from mldec.report.page import Content
from mldec.report.training import MOST_POINTS, learning_curves, of_run

Cli = Callable[..., tuple[int, str, str]]
WORDS = ["--plugin", "patches"]


@pytest.fixture
def contents(few_resamples: None, monkeypatch: pytest.MonkeyPatch) -> list[Content]:
    """What the reports of a test say, while it writes them."""
    said: list[Content] = []
    gather = make.gather

    def keep(*subjects: object) -> Content:
        said.append(gather(*subjects))
        return said[-1]

    monkeypatch.setattr(make, "gather", keep)
    return said


def evaluated(cli: Cli, path: Path, *words: str | Path) -> dict[str, dict[str, float]]:
    """Return the JSON of evaluate."""
    status, _, err = cli("evaluate", path, *WORDS, *words, "--json", "evaluated.json")
    assert status == 0, err
    return json.loads(Path("evaluated.json").read_text())


def test_a_report_on_a_run_and_its_comparison(
    cli: Cli,
    digits_run: Path,
    contents: list[Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    best = digits_run / "checkpoints" / "best.pt"
    small = ["data.val_images=90"]
    assert cli("calibrate", best, *WORDS, *small, "--out", "calibrated.pt")[0] == 0
    words = [*WORDS, *small, "--compare", digits_run / "checkpoints" / "last.pt"]
    status, out, err = cli("report", "calibrated.pt", *words, "--out", "r.html")
    assert status == 0, err
    assert re.search(r"^r.html: a report on calibrated.pt, \d+\.\d MB, made in \d+ s$", out, re.M)
    assert "<html" in Path("r.html").read_text(encoding="utf-8")

    # The numbers are those of evaluate, and the other model's are at its own thresholds.
    [content] = contents
    expected = evaluated(cli, Path("calibrated.pt"), *small)
    assert {name: shown.value for name, shown in content.metrics.items()} == expected["metrics"]
    for index, name in enumerate(content.table.names):
        for own, other in (("AP", "AP"), ("recall", "recall"), ("threshold", "threshold")):
            value = expected["per_class"][name][other]
            assert content.table.columns[own][index] == pytest.approx(value)
    assert content.comparison is not None
    others = evaluated(cli, digits_run / "checkpoints" / "last.pt", *small)["metrics"]
    for name, (_, other, gap) in content.comparison.metrics.items():
        assert other.value == pytest.approx(others[name])
        assert gap.value == pytest.approx(content.metrics[name].value - other.value)
        assert np.isnan(gap.low) or gap.low <= gap.high
    assert "fitted on these very images" in " ".join(content.notes)
    assert len(content.comparison.per_class) == 10

    # Images by class, each with a place where the model looked.
    assert content.heat_method
    assert any(example.heat is not None for example in content.examples)
    for example in content.examples:
        assert (
            content.table.names[example.class_index] in content.pictures[example.row].labels
        ) == (example.kind != "wrong")
    assert content.histograms.positives.sum(1).tolist() == content.table.columns["positives"]


def test_a_fold_of_files_with_a_damaged_one(
    cli: Cli, squares: Path, contents: list[Content]
) -> None:
    status, _, err = cli("report", squares, *WORDS, "data.fold=2/2", "--out", "r.html")
    assert status == 0, err
    status, _, err = cli("report", squares, *WORDS, "--threshold", "0.3", "--out", "r.html")
    assert status == 0, err
    assert sum(len(content.unreadable) for content in contents) == 1
    [message] = contents[0].unreadable + contents[1].unreadable
    assert "7.png" in message

    content = contents[1]
    assert content.table.columns["threshold"] == pytest.approx([0.3] * 3)
    assert content.curves.keys() == {"train/loss", "val/mAP", "val_raw/mAP"}
    assert "The threshold is 0.3, as the command line says." in content.notes
    assert "Training time" in content.summary
    assert "squares" in content.settings


@pytest.mark.parametrize("experiment", ["digits_single", "digits_zsl"])
def test_one_label_and_unseen_classes(
    cli: Cli,
    contents: list[Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    experiment: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"+experiment={experiment}", *QUICK[1:]]
    status, _, err = cli("train", *words, "train.epochs=1")
    assert status == 0, err
    run = Path("outputs", experiment)
    status, _, err = cli("report", run, *WORDS, "--compare", run, "--out", "r.html")
    assert status == 0, err

    [content] = contents
    metrics = evaluated(cli, run)["metrics"]
    assert {name: shown.value for name, shown in content.metrics.items()} == metrics
    assert np.isfinite(content.metrics["top1"].low) if "top1" in metrics else "zsl_mAP" in metrics
    assert content.exclusive == (experiment == "digits_single")
    assert content.comparison is not None
    assert (content.comparison.fixed, content.comparison.broken) == (0, 0)
    assert content.comparison.p_value == 1 or "zsl_mAP" in metrics
    assert "<html" in Path("r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--out", "-"], "--out -: a report is written to a file"),
        (["--out", "{folder}"], "cannot write {folder}: it is a folder"),
        (["--out", "{folder}/no/r.html"], "there is no folder {folder}/no"),
        (["--out", "r.html", "--compare", "{folder}/no.pt"], "no file at {folder}/no.pt"),
        (["--out", "r.html", "data=coco", "data.root={folder}/no"], "{folder}/no is not a folder"),
        (["--out", "r.html", "data.val_image=1"], "data.val_image"),
        (["--out", "r.html", "data.val_images=0"], "val_images is 0"),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    cli: Cli,
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make, "gather", None)  # which scores the images
    filled = [word.format(folder=tmp_path) for word in words]
    status, _, err = cli("report", digits_run, *WORDS, *filled)
    assert status == 1
    one_line(err, part.format(folder=tmp_path))
    assert not Path("r.html").exists()


def test_other_classes_are_refused_before_the_first_image(
    cli: Cli, digits_run: Path, squares: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "gather", None)
    words = [*WORDS, "--compare", squares, "--out", "r.html"]
    status, _, err = cli("report", digits_run, *words)
    assert status == 1
    one_line(err, f"{squares} knows 3 classes, the data has 10")


def test_the_libraries_of_the_page_are_looked_for_first(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name)
    )
    status, _, err = cli("report", tmp_path / "no.pt", "--out", tmp_path / "r.html")
    assert status == 1
    one_line(err, "a report needs plotly, not installed here; run pip install 'mldec[report]'")


def test_classes_in_another_order_are_compared_by_their_names(
    cli: Cli,
    digits_run: Path,
    contents: list[Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = checkpoint.load_model(digits_run, plugins=["patches"]).classes.names
    Path("names.txt").write_text("\n".join(names[::-1]) + "\n")
    words = [*WORDS, "--class-names", "names.txt", "--out", "r.html"]
    status, out, err = cli("report", digits_run, *words)
    assert status == 0, err
    assert "in another order: its logits are reordered" in out
    assert contents[0].table.names == names
    metrics = evaluated(cli, digits_run, "--class-names", "names.txt")["metrics"]
    assert contents[0].metrics["mAP"].value == metrics["mAP"]


def test_the_json_is_that_of_evaluate_with_intervals(
    cli: Cli,
    digits_run: Path,
    few_resamples: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    few = "data.val_images=40"
    status, _, err = cli("report", digits_run, *WORDS, few, "--out", "r.html", "--json", "r.json")
    assert status == 0, err
    ours, theirs = json.loads(Path("r.json").read_text()), evaluated(cli, digits_run, few)

    intervals = ours.pop("intervals")
    per_class, expected = ours.pop("per_class"), theirs.pop("per_class")
    assert ours == theirs
    assert intervals.keys() == {"mAP", "CF1", "OF1"}
    for name, (low, high) in intervals.items():
        assert low <= ours["metrics"][name] <= high or math.isclose(low, high), name

    for name, values in expected.items():
        for key, value in values.items():
            assert per_class[name][key] == pytest.approx(value), (name, key)
        assert per_class[name]["AP_low"] <= per_class[name]["AP"] <= per_class[name]["AP_high"]


def arguments(run: Path, *words: str) -> argparse.Namespace:
    return report.parser().parse_intermixed_args(
        [str(run), "--plugin", "patches", "data.val_images=20", "--out", "r.html", *words]
    )


def test_the_thresholds_are_those_of_the_command_line(digits_run: Path) -> None:
    subject = prepare(arguments(digits_run, "--threshold", "0.75"))
    assert subject.thresholds == [0.75]
    assert subject.threshold_notes == ["The threshold is 0.75, as the command line says."]
    lowest = subject.evaluator().logit_threshold  # type: ignore[attr-defined]
    assert torch.sigmoid(lowest).tolist() == pytest.approx([0.75])

    without = replace(subject, data=replace(subject.data, make_evaluator=lambda _: object()))
    with pytest.raises(ConfigError, match="takes no thresholds"):
        without.evaluator()

    subject = prepare(arguments(digits_run, "data.threshold=0.6"))
    assert subject.thresholds is None
    assert "data.threshold" in subject.threshold_notes[0]


def test_without_a_readable_image_there_is_no_report(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object, **__: object) -> object:
        return make.Scores(*torch.zeros(3, 0).numpy(), ["a.png is damaged"])

    monkeypatch.setattr(make, "all_scores", nothing)
    with pytest.raises(DataError, match=r"no validation image can be scored: a\.png is damaged"):
        prepare(arguments(digits_run)).scores()


def test_models_of_one_and_of_several_labels_are_not_compared(digits_run: Path) -> None:
    args = arguments(digits_run, "--compare", str(digits_run))
    subject = prepare(args)
    exclusive = Classes(subject.loaded.classes.names, exclusive=True)
    single = replace(subject, loaded=replace(subject.loaded, classes=exclusive))
    with pytest.raises(ConfigError, match="one of the models is for one label per image"):
        prepare_other(args, single)


def test_a_run_has_a_cost_and_curves(digits_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(digits_run, copy)
    best = copy / "checkpoints" / "best.pt"
    summary, curves, notes = of_run(best)
    facts = json.loads((copy / "run.json").read_text())
    assert summary["Trainable parameters"] == f"{facts['parameters']:,}"
    assert facts["command"] in summary["Trained by"]
    assert summary["Training time"].startswith("0:00:")
    assert list(curves) == ["train/loss", "val/mAP", "val_raw/mAP"]
    assert notes == []

    # Damaged files do not end a report.
    (copy / "metrics.jsonl").write_text('{"step": 1, "val/mAP": 3}\n')
    (copy / "run.json").write_text("[")
    _, _, notes = of_run(best)
    assert "run.json is not what a run writes" in notes[0]
    assert "metrics.jsonl is not what a run writes" in notes[1]

    _, curves, [note] = of_run(tmp_path / "checkpoints" / "best.pt")
    assert curves == {}
    assert "Neither metrics.jsonl nor run.json lies beside the checkpoint" in note


def test_long_curves_are_thinned_and_gaps_left_out() -> None:
    count = 2 * MOST_POINTS + 1
    lines = [{"step": step, "train/loss": 1.0 * step, "train/lr": 1} for step in range(count)]
    lines.append({"step": count, "val/top1": None, "val/top5": 3.0, "val_raw/top1": 5})
    curves = learning_curves(lines)
    assert len(curves["train/loss"]) <= MOST_POINTS
    assert curves["train/loss"][-1] == (count - 1, count - 1)
    assert curves["val_raw/top1"] == [(count, 5.0)]
    assert curves.keys() == {"train/loss", "val_raw/top1"}
