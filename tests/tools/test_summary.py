"""The table of runs and the table over seeds, from copies of a real run."""

import csv
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from scipy.stats import ttest_rel

from mldec.checkpoint import loading
from mldec.config.compose import option
from mldec.errors import ConfigError, DataError
from mldec.files.torch_files import read_torch
from mldec.tools.summary import find_runs

SEEDS = {"as_l": [71.0, 72.0, 73.5], "gr": [74.0, 74.5, 76.9], "hill": [71.2, 71.9, 73.4]}


@pytest.fixture
def outputs(digits_run, tmp_path):
    """A folder of runs with one finished run, "a"."""
    shutil.copytree(digits_run, tmp_path / "outputs" / "a")
    return tmp_path / "outputs"


def copy(outputs, name, *, settings=None, evaluations=None, **changed):
    """Copy the run; replace its settings and evaluations, and parts of its run.json."""
    folder = Path(shutil.copytree(outputs / "a", outputs / name))
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if evaluations is not None:
        with (folder / "metrics.jsonl").open("w") as file:
            for epoch, metrics in enumerate(evaluations, start=1):
                line = {"step": epoch, "epoch": epoch, "time": float(epoch)} | metrics
                file.write(json.dumps(line) + "\n")
    return folder


def rows_of(path, key):
    with path.open(newline="") as file:
        return {row[key]: row for row in csv.DictReader(file)}


def test_finished_run(outputs):
    (run,) = find_runs(outputs)
    state = read_torch(outputs / "a" / "checkpoints" / "best.pt")
    row = run.row
    facts = {"run": "a", "name": "digits", "state": "finished", "epochs": "2/2"}
    facts |= {key: state["best"][key] for key in ("metric", "value", "weights")}
    assert row.items() >= facts.items()
    lines = map(json.loads, (outputs / "a" / "metrics.jsonl").read_text().splitlines())
    values = [line.get(key, 0.0) for line in lines for key in ("val/mAP", "val_raw/mAP")]
    assert row["value"] == max(values)

    model = loading.load_model(outputs / "a", plugins=["patches"]).model
    assert row["params_m"] == pytest.approx(sum(p.numel() for p in model.parameters()) / 1e6)
    # A lower bound: the head's embedding of the tokens.
    tokens, width = model.backbone(torch.zeros(1, 3, 64, 64)).shape[1:]
    assert row["gmacs"] > tokens * width * 32 / 1e9
    assert row["commit"][:10] == (state["git"] or "-")[:10]


def test_unfinished_and_resumed_runs(outputs):
    half = copy(outputs, "b", ended=None, best={})
    lines = (half / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if '"val/' in line)
    (half / "metrics.jsonl").write_text("".join(lines[: first + 1]))

    started = copy(outputs, "0", ended=None, best={})
    (started / "checkpoints" / "best.pt").unlink()
    (started / "metrics.jsonl").unlink()

    # A run that resumes from another folder keeps the best value of that folder.
    best = {"metric": "mAP", "value": 99.5, "weights": "ema", "epoch": 1}
    copy(outputs, "c", best=best, start_epoch=1)
    (copy(outputs, "d", best={**best, "metric": "top1"}) / "metrics.jsonl").unlink()

    rows = [run.row for run in find_runs(outputs)]
    names = [row["run"] for row in rows]
    assert (names[0], names[-2:]) == ("c", ["d", "0"])
    states = {row["run"]: (row["epochs"], row["state"], row["metric"]) for row in rows}
    assert states["a"] == ("2/2", "finished", "mAP")
    assert states["b"] == ("1/2", "unfinished", "mAP")
    assert states["0"] == ("0/2", "unfinished", None)
    assert (rows[0]["value"], rows[0]["weights"], rows[-1]["time"]) == (99.5, "ema", "0:00:00")


def test_unreadable_runs_are_skipped(cli, outputs, tmp_path):
    (copy(outputs, "broken") / "run.json").unlink()
    (copy(outputs, "odd") / "run.json").write_text("[1]")
    (copy(outputs, "unset") / "config.yaml").unlink()
    (copy(outputs, "cut") / "metrics.jsonl").write_text("[")
    shutil.rmtree(copy(outputs, "empty") / "checkpoints")
    (outputs / "empty" / "checkpoints").mkdir()

    out = cli.out("summary", outputs, "--csv", tmp_path / "t.csv")
    skipped = [line for line in out.splitlines() if line.startswith("skipped: ")]
    for name in ("broken", "odd", "unset", "cut", "empty"):
        assert any(str(outputs / name) in line for line in skipped), name
    assert out.splitlines()[-1].split()[0] == "a"
    [row] = rows_of(tmp_path / "t.csv", "run").values()
    assert (row["run"], row["metric"], len(row)) == ("a", "mAP", 18)


def seeded(outputs, values=SEEDS, first_seed=0):
    """Make finished runs of these best values. Groups differ in their loss."""
    for name, results in values.items():
        for seed, value in enumerate(results, start=first_seed):
            evaluations = []
            for epoch, part in enumerate((value / 2, value, value - 1), start=1):
                # CF1@3 is the highest in the last epoch, which is not the best one.
                metrics = {"mAP": part, "CF1": part - 10, "CF1@3": value - 22 + epoch}
                line = {f"val/{key}": number - 5 for key, number in metrics.items()}
                line |= {f"val_raw/{key}": number for key, number in metrics.items()}
                evaluations.append(line)
            settings = {"seed": seed, "loss": {"_target_": f"x.{name}", "a": 1}}
            settings["data"] = {"cache_dir": f"/cache/{seed}"}
            folder = f"{name}_seed{seed}"
            copy(outputs, folder, settings=settings, evaluations=evaluations, best={})


def markdown(cli, outputs, *words):
    lines = cli.out("summary", outputs, "--table", "-", *words).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}, rows[0]


def test_mean_and_deviation_over_seeds(cli, outputs):
    seeded(outputs)
    shutil.rmtree(outputs / "a")
    table, heading = markdown(cli, outputs, "--metrics", "CF1", "CF1@3")
    assert heading == ["group", "seeds", "mAP", "CF1", "CF1@3"]
    mean = statistics.fmean(SEEDS["hill"])
    deviation = statistics.stdev(SEEDS["hill"])
    expected = [f"{mean - lower:.2f} ± {deviation:.2f}" for lower in (0, 10, 20)]
    assert table["hill"] == ["3"] + expected
    assert table["gr"] == ["3", "75.13 ± 1.55", "65.13 ± 1.55", "55.13 ± 1.55"]
    assert r"as\_l" in table


def test_groups_are_compared_by_paired_tests(cli, outputs, tmp_path):
    seeded(outputs)
    shutil.rmtree(outputs / "a")
    path = tmp_path / "t.csv"
    cli.out("summary", outputs, "--table", path, "--against", "as_l")
    rows = rows_of(path, "group")
    for name in ("gr", "hill"):
        test = ttest_rel(SEEDS[name], SEEDS["as_l"])
        interval = test.confidence_interval(0.95)
        row = rows[name]
        assert float(row["mAP deviation"]) == pytest.approx(statistics.stdev(SEEDS[name]))
        expected = [statistics.fmean(SEEDS[name]) - statistics.fmean(SEEDS["as_l"])]
        expected += [interval.low, interval.high, test.pvalue]
        found = [float(row[key]) for key in ("difference", "low", "high", "p")]
        assert found == pytest.approx(expected)
    assert [rows["as_l"][key] for key in ("difference", "low", "p")] == ["0.0", "", ""]

    # Only the seeds of both groups count.
    (outputs / "gr_seed0").rename(tmp_path / "gone")
    table, heading = markdown(cli, outputs, "--against", "as_l")
    assert heading[-3:] == ["difference in mAP", "95 % interval", "p"]
    test = ttest_rel(SEEDS["gr"][1:], SEEDS["as_l"][1:])
    low, high = test.confidence_interval(0.95)
    assert table["gr"][-3:] == ["+2.95", f"{low:+.2f} to {high:+.2f}", f"{test.pvalue:.3f}"]


def test_names_of_groups_and_missing_metrics(cli, outputs):
    runs = [
        ("digits_0", 0, 0.1, {"val/top1": 90.0, "val/ECE": 3.0}),
        ("digits_1", 0, 0.2, {"val/top1": 80.0, "val/ECE": 8.0}),
        ("digits_2", 1, 0.1, {"val/top1": 91.0, "val/ECE": 5.0}),
        ("digits_3", 2, 0.1, {"val/top1": 92.0, "val/ECE": None}),
        ("x_seed0", 0, 0.3, {"val/top1": 70.0}),
        ("x_seed1", 1, 0.4, {"val/top1": 60.0}),
    ]
    for name, seed, rate, metrics in runs:
        settings = {"seed": seed, "name": name, "optim": {"lr": rate}}
        copy(outputs, name, settings=settings, evaluations=[metrics] * 2, best={})
    shutil.rmtree(outputs / "a")
    table, _ = markdown(cli, outputs, "--metrics", "ECE")
    assert table == {
        "optim.lr=0.1": ["3", "91.00 ± 1.00", "4.00 ± 1.41 (n=2)"],
        "optim.lr=0.2": ["1", "80.00 ± -", "8.00 ± -"],
        "x": ["1", "70.00 ± -", "- ± - (n=0)"],
        r"x\_seed1": ["1", "60.00 ± -", "- ± - (n=0)"],
    }


def test_settings_of_a_sweep_are_columns_and_names_of_groups(cli, outputs, tmp_path):
    jobs = [("asl", 2.0, 0), ("asl", 4.0, 0), ("asl", 4.0, 1), ("bce", None, 0)]
    for number, (loss, gamma_neg, seed) in enumerate(jobs):
        node = option("loss", loss)
        if gamma_neg is not None:
            node["gamma_neg"] = gamma_neg
        settings = {"seed": seed, "loss": node, "head": {"num_groups": 10 * number}}
        if number < 3:
            settings["head"] = {"num_groups": 5}
        evaluations = [{"val/mAP": 90.0 + number}]
        copy(outputs, f"digits_{number}", settings=settings, evaluations=evaluations, best={})
    shutil.rmtree(outputs / "a")

    out = cli.out("summary", outputs, "--csv", tmp_path / "t.csv")
    heading = next(line for line in out.splitlines() if line.startswith("run "))
    assert {"seed", "loss.gamma_neg", "head.num_groups"} <= set(heading.split())
    rows = rows_of(tmp_path / "t.csv", "run")
    assert [rows[f"digits_{n}"]["loss.gamma_neg"] for n in range(4)] == ["2.0", "4.0", "4.0", ""]
    assert [rows[f"digits_{n}"]["seed"] for n in range(4)] == ["0", "0", "1", "0"]

    asl = "head.num_groups=5 loss=asl loss.gamma_neg=4.0"
    table, _ = markdown(cli, outputs, "--against", asl)
    names = {name.replace("\\", "") for name in table}
    assert names == {asl, asl.replace("4.0", "2.0"), "head.num_groups=30 loss=bce"}


def test_latex_table_escapes_names(cli, outputs, tmp_path):
    seeded(outputs, {"50%_of a&b": SEEDS["gr"], "as_l": SEEDS["as_l"]})
    shutil.rmtree(outputs / "a")
    path = tmp_path / "t.tex"
    cli.out("summary", outputs, "--table", path, "--metrics", "CF1", "--against", "50%_of a&b")
    text = path.read_text()
    start = "\\begin{tabular}{lrrrrrr}\n\\toprule\ngroup & seeds & mAP & CF1 & difference in mAP"
    assert text.startswith(start)
    assert r"50\%\_of a\&b & 3 & 75.13 $\pm$ 1.55 &" in text
    assert "& $-$2.97 & $-$" in text


@pytest.mark.parametrize(
    ("words", "error", "name"),
    [
        (["runs", "--table", "t.doc"], ConfigError, "t.doc"),
        (["runs", "--table", "-", "--against", "z"], DataError, "--against z"),
        (["twice", "--table", "-"], DataError, "b_seed0"),
    ],
)
def test_errors(cli, outputs, monkeypatch, words, error, name):
    monkeypatch.chdir(outputs.parent)
    folder = Path(words[0])
    if words[0] != "absent":
        outputs.rename(folder)
    if words[0] == "twice":
        seeded(folder, {"b": SEEDS["gr"]})
        shutil.copytree(folder / "b_seed0", folder / "c")
    monkeypatch.setenv("MLDEC_TRACEBACK", "1")
    with pytest.raises(error, match=name):
        cli("summary", *words)
