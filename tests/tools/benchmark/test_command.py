"""The command `mldec benchmark`: options, JSON files, and the job `predict`."""

import json

import hostile
import pytest
import torch
from pictures import picture

from mldec.errors import DataError
from mldec.runtime import environment as facts
from mldec.tools import benchmark
from mldec.tools.benchmark import throughput


def test_figures_are_printed_and_written(cli, tmp_path, monkeypatch):
    figures = [{"seconds": 1234.5678}, {"name": "x"}]
    monkeypatch.setattr(throughput, "throughput", lambda args: figures)
    file = tmp_path / "m.json"
    out = cli.out("benchmark", "throughput", "--json", file)
    assert dict(line.split() for line in out.splitlines()) == {"seconds": "1,235", "name": "x"}
    content = json.loads(file.read_text())
    assert (content["benchmark"], content["figures"]["seconds"]) == ("throughput", 1234.5678)
    measured = content["environment"]
    assert measured == benchmark.environment()
    assert (measured["torch"], measured["commit"]) == (torch.__version__, facts.git_commit())


def test_figures_before_an_error_are_written(cli, tmp_path, monkeypatch):
    def measure(args):
        yield {"first": 1}
        raise DataError("second figure")

    monkeypatch.setattr(throughput, "throughput", measure)
    assert cli("benchmark", "throughput", "--json", tmp_path / "m.json").status == 1
    assert json.loads((tmp_path / "m.json").read_text())["figures"] == {"first": 1}


@pytest.mark.parametrize(
    ("words", "status", "name"),
    [
        (["data", "folder", "head=gap"], 2, "head=gap"),
        (["predict", "x.pt", "folder", "--device", "cpu"], 1, "folder"),
    ],
)
def test_errors(cli, here, monkeypatch, words, status, name):
    monkeypatch.setattr(throughput, "throughput", lambda args: pytest.fail("measured too early"))
    (here / "folder").mkdir()
    if words[0] == "predict":
        torch.save(hostile.good(), "x.pt")
        (here / "folder" / "x.png").write_text("no image")
    done = cli("benchmark", *words)
    assert done.status == status
    assert name in done.err


def test_predict_is_compared_with_its_bound(cli, tmp_path):
    torch.save(hostile.good(), tmp_path / "x.pt")
    for number in range(20):
        picture(seed=number).save(tmp_path / f"{number}.png")
    words = ["--count", "15", "--rounds", "1", "--device", "cpu", "--json", tmp_path / "r.json"]
    cli.out("benchmark", "predict", tmp_path / "x.pt", tmp_path, *words)
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["images"] == 15
    bound = 1 / (1 / figures["decode"] + 1 / figures["model"])
    assert figures["bound"] == pytest.approx(bound)
    assert figures["share"] == pytest.approx(figures["predict"] / bound)
