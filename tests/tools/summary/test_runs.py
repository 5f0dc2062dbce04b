"""Runs are read from a real run, and on unfinished, resumed or damaged copies of it."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import one_line

from mldec import checkpoint
from mldec.errors import DataError
from mldec.files.torch_files import read_torch
from mldec.summary import gather

PLUGINS = ["patches"]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outputs(digits_run: Path, tmp_path: Path) -> Path:
    """A folder of runs with one finished run, "a"."""
    shutil.copytree(digits_run, tmp_path / "outputs" / "a")
    return tmp_path / "outputs"


def copy(outputs: Path, name: str) -> Path:
    return Path(shutil.copytree(outputs / "a", outputs / name))


def rewrite(folder: Path, **changed: object) -> None:
    """Change parts of run.json."""
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_a_finished_run(outputs: Path) -> None:
    (run,) = gather(outputs)
    state = read_torch(outputs / "a" / "checkpoints" / "best.pt")
    assert (run.run, run.name, run.state, run.epochs, run.image_size) == (
        "a",
        "digits",
        "finished",
        "2/2",
        64,
    )
    assert (run.metric, run.value, run.weights) == (
        "mAP",
        state["best"]["value"],
        state["best"]["weights"],
    )
    lines = [
        json.loads(line) for line in (outputs / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert run.value == max(
        line.get(f"{key}/mAP", 0.0) for line in lines for key in ("val", "val_raw")
    )
    model = checkpoint.load_model(outputs / "a" / "checkpoints" / "best.pt", plugins=PLUGINS).model
    assert run.params_m == pytest.approx(sum(p.numel() for p in model.parameters()) / 1e6)
    # By hand: 8 x 8 patches of a 64-pixel image to 16 numbers, or the plugin's; more than the
    # head's embedding.
    tokens, width = model.backbone(torch.zeros(1, 3, 64, 64)).shape[1:]
    assert run.gmacs > tokens * width * 32 / 1e9
    assert run.commit[:10] == str(state["git"])[:10] if state["git"] else run.commit == "-"


def test_an_unfinished_run_is_marked(outputs: Path) -> None:
    folder = copy(outputs, "b")
    rewrite(folder, ended=None, best={})
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if '"val/' in line)
    (folder / "metrics.jsonl").write_text("".join(lines[: first + 1]))
    states = {run.run: (run.epochs, run.state) for run in gather(outputs)}
    assert states == {"a": ("2/2", "finished"), "b": ("1/2", "unfinished")}


def test_a_run_before_its_first_evaluation_comes_last(outputs: Path) -> None:
    folder = copy(outputs, "0")
    (folder / "checkpoints" / "best.pt").unlink()
    (folder / "metrics.jsonl").unlink()
    rewrite(folder, ended=None, best={})
    one, other = gather(outputs)
    assert (one.run, other.run) == ("a", "0")
    assert (other.metric, other.value, other.epochs, other.state) == (
        None,
        None,
        "0/2",
        "unfinished",
    )
    assert other.time == "0:00:00"


def test_runs_are_sorted_by_metric_and_the_best_comes_first(outputs: Path) -> None:
    for name, metric, value in (("b", "mAP", 99.0), ("c", "mAP", 1.0), ("d", "top1", 50.0)):
        best = {"metric": metric, "value": value, "weights": "raw", "epoch": 2}
        folder = copy(outputs, name)
        (folder / "metrics.jsonl").unlink()
        rewrite(folder, best=best)
    assert [run.run for run in gather(outputs)] == ["b", "a", "c", "d"]


def test_what_cannot_be_read_is_named_in_a_line_and_the_rest_is_shown(
    cli: Cli, outputs: Path, tmp_path: Path
) -> None:
    broken = copy(outputs, "broken")
    (broken / "run.json").unlink()
    (copy(outputs, "odd") / "run.json").write_text("[1]")
    shutil.rmtree(copy(outputs, "empty") / "checkpoints")
    (outputs / "empty" / "checkpoints").mkdir()
    (copy(outputs, "cut") / "metrics.jsonl").write_text("[")
    status, out, _ = cli("summary", outputs, "--csv", tmp_path / "t.csv")
    assert status == 0
    warned, shown = out.splitlines()[:-2], out.splitlines()[-2:]
    assert len(warned) == 4
    assert all(line.startswith("left out: ") for line in warned), out
    assert shown[0].split()[:4] == ["run", "name", "metric", "value"]
    assert shown[1].split()[0] == "a"
    with (tmp_path / "t.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["metric"], row["state"]) == ("a", "mAP", "finished")


def test_a_run_that_goes_on_from_another_folder_keeps_the_best_value_before(outputs: Path) -> None:
    facts = json.loads((outputs / "a" / "run.json").read_text())
    before = {"metric": "mAP", "value": 99.5, "weights": "ema", "epoch": 1}
    (outputs / "a" / "run.json").write_text(json.dumps({**facts, "best": before, "start_epoch": 1}))
    (run,) = gather(outputs)
    assert (run.value, run.weights) == (99.5, "ema")


def test_nothing_there(cli: Cli, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        gather(tmp_path)
    status, _, err = cli("summary", tmp_path / "nowhere")
    assert status == 1
    one_line(err, "holds no run")
