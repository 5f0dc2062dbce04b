"""The table and the plot of runs, from a real run, and from unfinished or damaged copies of it."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from support import one_line

from mldec import checkpoint
from mldec.errors import CheckpointError
from mldec.runtime.torch_files import read_torch
from mldec.summary import COLUMNS, Run, draw, gather, table
from mldec.training.log import Evaluation, Progress, read_progress

HEADS = {".png": b"\x89PNG", ".SVG": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def outputs(digits_run, tmp_path):
    """A folder of runs with one finished run, "a"."""
    shutil.copytree(digits_run, tmp_path / "outputs" / "a")
    return tmp_path / "outputs"


def copy(outputs, name, **changed):
    """Copy the run, and change parts of its run.json."""
    folder = Path(shutil.copytree(outputs / "a", outputs / name))
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return folder


def test_a_finished_run(outputs):
    (run,) = gather(outputs)
    state = read_torch(outputs / "a" / "checkpoints" / "best.pt")
    best = state["best"]
    assert (run.run, run.name, run.state, run.epochs) == ("a", "digits", "finished", "2/2")
    assert (run.metric, run.value, run.weights) == ("mAP", best["value"], best["weights"])
    lines = [
        json.loads(line) for line in (outputs / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert run.value == max(
        line.get(f"{key}/mAP", 0.0) for line in lines for key in ("val", "val_raw")
    )
    model = checkpoint.load_model(outputs / "a", plugins=["patches"]).model
    assert run.params_m == pytest.approx(sum(p.numel() for p in model.parameters()) / 1e6)
    # By hand: more than the head's embedding of the tokens.
    tokens, width = model.backbone(torch.zeros(1, 3, 64, 64)).shape[1:]
    assert run.gmacs > tokens * width * 32 / 1e9
    assert run.commit[:10] == str(state["git"])[:10] if state["git"] else run.commit == "-"


def test_unfinished_and_resumed_runs(outputs):
    half = copy(outputs, "b", ended=None, best={})
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if '"val/' in line)
    (half / "metrics.jsonl").write_text("".join(lines[: first + 1]))

    started = copy(outputs, "0", ended=None, best={})
    (started / "checkpoints" / "best.pt").unlink()
    (started / "metrics.jsonl").unlink()

    # A run that goes on from another folder keeps the best value before.
    best = {"metric": "mAP", "value": 99.5, "weights": "ema", "epoch": 1}
    copy(outputs, "c", best=best, start_epoch=1)
    (copy(outputs, "d", best={**best, "metric": "top1"}) / "metrics.jsonl").unlink()

    runs = gather(outputs)
    assert [run.run for run in runs][:1] + [run.run for run in runs][-2:] == ["c", "d", "0"]
    states = {run.run: (run.epochs, run.state, run.metric) for run in runs}
    assert states["a"] == ("2/2", "finished", "mAP")
    assert states["b"] == ("1/2", "unfinished", "mAP")
    assert states["0"] == ("0/2", "unfinished", None)
    assert (runs[0].value, runs[0].weights, runs[-1].time) == (99.5, "ema", "0:00:00")


def test_settings_are_shown_where_runs_differ_and_folds_stand_behind(outputs):
    reader, root = "mldec.data.readers.csv_table.csv_table", "/data/mine"
    for name, value, fold in (("full", 50.0, None), ("cv1", 99.0, "1/5")):
        folder = copy(outputs, name, best={})
        line = {"step": 1, "epoch": 2, "time": 1.0, "val/mAP": value}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        data = {"_target_": reader, "root": root, "fold": fold}
        config = {"data": data, "head": {"_target_": "a.GAP"}, "loss": {}, "optim": {"lr": 0.1}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    shutil.rmtree(outputs / "a")

    lines = [line.split() for line in table(gather(outputs)).splitlines()]
    assert lines[0] == ["run", "metric", "value", "fold", "epochs", "state", "time"]
    assert [line[:4] for line in lines[1:]] == [
        ["full", "mAP", "50.00", "-"],
        ["cv1", "mAP", "99.00", "1/5"],
    ]
    (outputs / "cv1" / "config.yaml").unlink()
    assert "csv_table mine  GAP" in table(gather(outputs))


def test_what_cannot_be_read_is_named_in_a_line_and_the_rest_is_shown(cli, outputs, tmp_path):
    (copy(outputs, "broken") / "run.json").unlink()
    (copy(outputs, "odd") / "run.json").write_text("[1]")
    shutil.rmtree(copy(outputs, "empty") / "checkpoints")
    (outputs / "empty" / "checkpoints").mkdir()
    (copy(outputs, "cut") / "metrics.jsonl").write_text("[")
    status, out, _ = cli("summary", outputs, "--csv", tmp_path / "t.csv")
    assert status == 0
    warned, shown = out.splitlines()[:-2], out.splitlines()[-2:]
    assert len(warned) == 4
    assert all(line.startswith("left out: ") for line in warned), out
    assert shown[0].split() == ["run", "metric", "value", "epochs", "state", "time"]
    assert shown[1].split()[0] == "a"
    with (tmp_path / "t.csv").open(newline="") as file:
        heading, row = csv.reader(file)
    assert heading == COLUMNS
    assert COLUMNS[:4] + COLUMNS[-2:] == ["run", "name", "metric", "value", "time", "commit"]
    assert (row[0], row[2], len(row)) == ("a", "mAP", 17)


def test_an_evaluation_has_the_better_value_and_the_time_of_every_process(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_progress(path) == Progress()
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
    for line in ("[]", '{"time": "x", "epoch": 1}', "[" * 100_000):
        path.write_text(line + "\n")
        with pytest.raises(CheckpointError, match="is not what a run writes"):
            read_progress(path)


# ----------------------------------------------------------------------------------------- the plot


def made(
    name,
    values,
    *,
    metric="mAP",
    hours=2.0,
    gmacs=5.0,
):
    evaluations = [
        Evaluation(epoch, 9.0, "mAP", value, "raw") for epoch, value in enumerate(values, start=1)
    ]
    best = max((value for value in values if math.isfinite(value)), default=None)
    progress = Progress(3600 * hours, evaluations)
    settings = ("-", "-", "-", "-", None)
    state = ("1/1", "finished", "0:00:01", "-")
    return Run(name, name, metric, best, "raw", 1.0, gmacs, 64, *settings, *state, progress)


def lines(axes):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def test_the_panels_show_curves_and_costs():
    runs = [made("b", [10.0, math.nan, 30.0]), made("a", [20.0, 15.0], hours=0.5)]
    figure, messages = draw(runs, cost="hours")
    curves, costs = figure.axes
    assert messages == []
    assert lines(curves) == [([1, 3], [10.0, 30.0]), ([1, 2], [20.0, 15.0])]
    assert lines(costs) == [([2.0], [30.0]), ([0.5], [20.0])]
    for line, point in zip(curves.get_lines(), costs.get_lines(), strict=True):
        assert (line.get_color(), line.get_marker()) == (point.get_color(), point.get_marker())
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["b 30.00", "a 20.00"]
    assert "hours" in costs.get_xlabel()
    assert lines(draw(runs, cost="gmacs")[0].axes[1]) == [([5.0], [30.0]), ([5.0], [20.0])]

    # Each metric has panels of its own, and what is not in one is said.
    runs += [made("c", [3.0], metric="top1", gmacs=None), made("d", [math.nan]), made("e", [])]
    figure, messages = draw(runs, cost="gmacs")
    assert [axes.get_ylabel() for axes in figure.axes] == [
        *("mAP (percent)", "best mAP (percent)", "top1 (percent)", "best top1 (percent)")
    ]
    assert [len(axes.get_lines()) for axes in figure.axes] == [2, 2, 1, 0]
    assert [message.split(",")[0].split(" has")[0] for message in messages] == [
        "left out of the second panel: c",
        "left out of the plot: d",
        "left out of the plot: e",
    ]


@pytest.mark.parametrize("suffix", HEADS)
def test_the_suffix_says_the_format_of_the_plot(cli, outputs, suffix):
    plot = outputs / f"plot{suffix}"
    status, out, err = cli("summary", outputs, "--plot", plot)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 2, "the table, and nothing is left out"
    assert plot.read_bytes().startswith(HEADS[suffix])


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["absent"], "absent holds no run"),
        (["outputs", "--plot", "p.txt"], "p.txt cannot be used (ValueError: Format 'txt' is not"),
        (["outputs", "--plot", "full.png"], "cannot write full.png: No space left on device"),
        (["started", "--plot", "p.png"], "--plot: no run has an evaluation"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli, outputs, monkeypatch, words, fault):
    monkeypatch.chdir(outputs.parent)
    Path("full.png").symlink_to("/dev/full")
    started = copy(outputs, "started", ended=None, best={})
    (started / "metrics.jsonl").unlink()
    started.rename("started")
    one_line(cli.fault("summary", *words), fault)
