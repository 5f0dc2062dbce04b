"""The table and the plot of runs, from a real run, and from unfinished or damaged copies of it."""

import csv
import json
import math
import shutil
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from scipy.stats import ttest_1samp, ttest_rel
from support import one_line

from mldec.checkpoint import loading
from mldec.errors import CheckpointError
from mldec.files.torch_files import read_torch
from mldec.tools.summary import COLUMNS, Run, draw, gather, paired, shared_name, table
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
    model = loading.load_model(outputs / "a", plugins=["patches"]).model
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
        with pytest.raises(CheckpointError, match="cannot be used"):
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


# ----------------------------------------------------------------------------- tables over seeds

SEEDS = {"as_l": [71.0, 72.0, 73.5], "gr": [74.0, 74.5, 76.9], "hill": [71.2, 71.9, 73.4]}


def seeded(outputs, values=SEEDS, first=0):
    """Make finished runs of these best values; groups differ in their loss."""
    for name, results in values.items():
        for seed, value in enumerate(results, start=first):
            folder = copy(outputs, f"{name}_seed{seed}", best={})
            lines = []
            for epoch, part in enumerate((value / 2, value, value - 1), start=1):
                # CF1@3 is the highest in the last epoch, which is not the best one.
                metrics = {"mAP": part, "CF1": part - 10, "CF1@3": value - 22 + epoch}
                line = {"step": epoch, "epoch": epoch, "time": float(epoch)}
                line |= {f"val/{key}": number - 5 for key, number in metrics.items()}
                lines.append(line | {f"val_raw/{key}": number for key, number in metrics.items()})
            (folder / "metrics.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
            config = {"seed": seed, "name": folder.name, "loss": {"_target_": f"x.{name}", "a": 1}}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            per_class = {"dog_1": {"AP": value + 1, "f1": 0.0}, "cat": {"AP": None}}
            (folder / "evaluation.json").write_text(json.dumps({"per_class": per_class}))


def without_a(outputs):
    shutil.rmtree(outputs / "a")
    return outputs


def markdown(cli, outputs, *words):
    status, out, err = cli("summary", outputs, "--table", "-", *words)
    assert (status, err) == (0, "")
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}, rows[0]


def test_runs_that_differ_in_their_seed_are_a_row(cli, outputs):
    seeded(outputs)
    without_a(outputs)
    table, heading = markdown(cli, outputs)
    assert heading == ["seeds", "mAP", "CF1", "CF1@3"]
    mean, deviation = statistics.fmean(SEEDS["hill"]), statistics.stdev(SEEDS["hill"])
    assert table["hill"] == [
        "3",
        *(f"{mean - lower:.2f} ± {deviation:.2f}" for lower in (0, 10, 20)),
    ]
    assert table["gr"][1:] == [f"**{number} ± 1.55**" for number in ("75.13", "65.13", "55.13")]
    assert r"as\_l" in table

    table, heading = markdown(cli, outputs, "--metrics", "AP(dog_1)", "--at", "last")
    assert heading == ["seeds", "mAP", r"AP(dog\_1)"]
    assert table["gr"] == ["3", "**74.13 ± 1.55**", "**76.13 ± 1.55**"]


def test_groups_are_compared_by_paired_tests(cli, outputs, tmp_path):
    seeded(outputs)
    without_a(outputs)
    path = tmp_path / "t.csv"
    assert cli("summary", outputs, "--table", path, "--against", "as_l").status == 0
    with path.open(newline="") as file:
        rows = {row["group"]: row for row in csv.DictReader(file)}
    for name, verdict in (("gr", "better"), ("hill", "as good")):
        test = ttest_rel(SEEDS[name], SEEDS["as_l"])
        interval = test.confidence_interval(0.95)
        row = rows[name]
        assert float(row["mAP deviation"]) == pytest.approx(statistics.stdev(SEEDS[name]))
        expected = [test.pvalue, *interval]
        assert [float(row[key]) for key in ("p", "low", "high")] == pytest.approx(expected)
        assert row["verdict"] == verdict
    assert rows["as_l"]["difference"] == ""

    # Only the seeds that both have count.
    (outputs / "gr_seed0").rename(tmp_path / "gone")
    table, heading = markdown(cli, outputs, "--against", "as_l")
    assert heading[-4:] == ["difference in mAP", "95 % interval", "p", "verdict"]
    low, high = ttest_rel(SEEDS["gr"][1:], SEEDS["as_l"][1:]).confidence_interval(0.95)
    assert table["gr"][-4:-2] == ["+2.95", f"{low:+.2f} to {high:+.2f}"]
    assert table[r"as\_l"][-4:] == ["-"] * 4


def sweep(outputs, jobs):
    """Make the finished runs of a sweep: a folder NAME_JOB each, with these settings."""
    for job, (settings, metrics) in enumerate(jobs):
        folder = copy(outputs, f"digits_{job}", best={})
        line = {"step": 1, "epoch": 2, "time": 1.0}
        line |= {f"val/{key}": value for key, value in metrics.items()}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        config = {"name": "digits", "optim": {"lr": 0.1}, "loss": {"_target_": "x.BCE"}} | settings
        (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_groups_of_sweep_are_named_by_the_settings_that_differ(cli, outputs):
    # Job numbers are not seeds: jobs 0 and 1 are of two groups, and 2 and 3 have seeds 0 and 1.
    asl = {"_target_": "x.ASL", "clip": 0.05}
    jobs = [
        ({"seed": 0, "optim": {"lr": 0.001}}, {"mAP": 50.0}),
        ({"seed": 0, "optim": {"lr": 0.002}}, {"mAP": 60.0}),
        ({"seed": 1, "optim": {"lr": 0.001}, "data": {"cache_dir": "/x"}}, {"mAP": 52.0}),
        ({"seed": 1, "optim": {"lr": 0.002}}, {"mAP": 62.0}),
        ({"seed": 0, "optim": {"lr": 0.001}, "loss": asl}, {"mAP": 1.0}),
        ({"seed": 0, "optim": {"lr": 0.001}, "loss": {**asl, "clip": 0}}, {"mAP": 2.0}),
    ]
    sweep(outputs, jobs)
    without_a(outputs)
    table, _ = markdown(cli, outputs)
    assert {name.replace("\\", ""): cells for name, cells in table.items()} == {
        "loss=BCE, optim.lr=0.002": ["2", "**61.00 ± 1.41**"],
        "loss=BCE, optim.lr=0.001": ["2", "51.00 ± 1.41"],
        "loss=ASL, loss.clip=0, optim.lr=0.001": ["1", "2.00"],
        "loss=ASL, loss.clip=0.05, optim.lr=0.001": ["1", "1.00"],
    }

    # Other runs keep their names, and the job of a sweep over seeds only has that of the run.
    shutil.copytree(outputs / "digits_0", outputs / "a")
    seeded(outputs, {"gr": SEEDS["gr"]})
    without_a(outputs)
    table, _ = markdown(cli, outputs)
    assert "gr" in table
    assert "digits, loss=BCE, optim.lr=0.002" in table
    for job in (1, 3, 4, 5):
        shutil.rmtree(outputs / f"digits_{job}")
    table, _ = markdown(cli, outputs)
    assert {name: cells[0] for name, cells in table.items()} == {"gr": "3", "digits": "2"}


def test_metric_of_some_runs_and_lowest_error_are_marked(cli, outputs, tmp_path):
    results = {
        0.1: ({"top1": 90.0, "ECE": 3.0}, {"top1": 91.0, "ECE": 5.0}, {"top1": 92.0}),
        0.2: ({"top1": 80.0, "ECE": 8.0}, {"top1": 81.0, "ECE": 8.0}, {"top1": 82.0, "ECE": 8.0}),
    }
    sweep(
        outputs,
        [
            ({"seed": seed, "optim": {"lr": rate}}, metrics)
            for rate, of_seeds in results.items()
            for seed, metrics in enumerate(of_seeds)
        ],
    )
    without_a(outputs)
    table, _ = markdown(cli, outputs, "--metrics", "ECE")
    assert table["optim.lr=0.1"] == ["3", "**91.00 ± 1.00**", "**4.00 ± 1.41 (n=2)**"]
    assert table["optim.lr=0.2"] == ["3", "81.00 ± 1.00", "8.00 ± 0.00"]
    path = tmp_path / "t.csv"
    cli.out("summary", outputs, "--table", path, "--metrics", "ECE")
    with path.open(newline="") as file:
        rows = {row["group"]: row["ECE seeds"] for row in csv.DictReader(file)}
    assert rows == {"optim.lr=0.1": "2", "optim.lr=0.2": "3"}


def test_names_that_end_in_seeds(outputs):
    for name, stem in (("digits_{}", "digits"), ("lr1_s{}", "lr1"), ("gap-seed={}", "gap")):
        runs = {}
        for seed in (0, 1):
            runs[seed] = replace(made(name.format(seed), [1.0]), settings={"name": "x"})
        assert shared_name(runs) == stem


@pytest.mark.parametrize(
    ("differences", "margin", "verdict"),
    [
        ([0.1, -0.1, 0.0, 0.05], 0.5, "as good"),
        ([0.1, -0.1, 0.0, 0.05], 0.05, "open"),
        # Above -margin, but maybe also above margin.
        ([0.6, -0.1, 0.4, 0.2], 0.3, "open"),
        ([-1.0, -1.1, -0.9], 0.5, "worse"),
        ([3.0, -2.0, 1.0], 0.5, "open"),
        ([1.0], 0.5, "open"),
        ([0.0, 0.0], 0.5, "open"),
    ],
)
def test_as_good_means_within_the_margin(differences, margin, verdict):
    found = paired(differences, [0.0] * len(differences), margin=margin)
    assert found.verdict == verdict
    assert found.mean == pytest.approx(statistics.fmean(differences))
    # The test within a margin is that of an interval of 90 %.
    if verdict == "as good":
        interval = ttest_1samp(differences, 0).confidence_interval(0.90)
        assert -margin < interval.low < interval.high < margin


def test_the_table_is_a_tabular_that_latex_compiles(cli, outputs, tmp_path):
    seeded(outputs, {"50%_of a&b": SEEDS["gr"], "as_l": SEEDS["as_l"]})
    without_a(outputs)
    path = tmp_path / "t.tex"
    words = ["--against", "as_l", "--metrics", "CF1,AP(dog_1)"]
    assert cli("summary", outputs, "--table", path, *words).status == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith(
        "\\begin{tabular}{lrrrrrrrr}\n\\toprule\n & seeds & mAP & CF1 & AP(dog\\_1)"
    )
    assert r"50\%\_of a\&b & 3 & \textbf{75.13 $\pm$ 1.55} &" in text
    assert text.isascii()
    if not (compiler := shutil.which("pdflatex")):
        pytest.skip("needs pdflatex with booktabs")
    page = (
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{t}\\end{document}"
    )
    (tmp_path / "page.tex").write_text(page)
    command = [compiler, "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_settings_that_differ(cli, outputs):
    seeded(outputs)
    out = cli("summary", "--diff", outputs / "gr_seed0", outputs / "hill_seed1").out
    assert out.splitlines() == ["loss._target_: x.gr -> x.hill", "seed: 0 -> 1"]
    out = cli("summary", "--diff", outputs / "gr_seed0", outputs / "gr_seed0").out
    assert out == "no setting differs\n"
    one_line(cli.fault("summary", "--diff", outputs, outputs), "config.yaml cannot be read")


def test_a_table_that_cannot_be_made_is_one_line(cli, outputs):
    seeded(outputs, {"b": SEEDS["gr"]}, first=5)
    seeded(outputs, {"c": SEEDS["gr"]})
    without_a(outputs)
    words = ["summary", outputs, "--table", "-"]
    fault = "--against b: c has no seed in common with it (0, 1, 2 and 5, 6, 7); train both"
    one_line(cli.fault(*words, "--against", "b"), fault)
    one_line(cli.fault(*words, "--against", "z"), "--against z: there is no such group; choose")
    one_line(cli.fault(*words, "--metrics", "mAPP"), "--metrics mAPP: no run has it")
    one_line(cli.fault(*words, "--metrics", "AP(cow)"), "evaluation.json cannot be used (KeyError")
    one_line(
        cli.fault("summary", outputs, "--table", "t.doc"), "name a file that ends in .md, .tex"
    )
    shutil.copytree(outputs / "c_seed0", outputs / "d")
    one_line(cli.fault(*words), "d and c_seed0 have the same settings and seed")
