"""The command `mldec benchmark`: its options, what it prints and writes, and the job `predict`."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import hostile
import pytest
import torch
from pictures import picture
from support import one_line

from mldec.errors import DataError
from mldec.runtime import environment as facts
from mldec.tools import benchmark
from mldec.tools.benchmark import predict


def test_figures_are_printed_and_written(cli, tmp_path, monkeypatch):
    from mldec.tools.benchmark import cost

    monkeypatch.setattr(cost, "cost", lambda args: {"seconds": 1234.5678, "name": "x"})
    monkeypatch.delattr(cost, "table")
    file = tmp_path / "m.json"
    status, out, err = cli("benchmark", "cost", "--json", file)
    assert (status, err) == (0, "")
    assert dict(line.split() for line in out.splitlines()) == {"seconds": "1,235", "name": "x"}
    content = json.loads(file.read_text())
    assert (content["benchmark"], content["figures"]["seconds"]) == ("cost", 1234.5678)
    measured = content["environment"]
    assert measured == benchmark.environment()
    assert (measured["torch"], measured["commit"]) == (torch.__version__, facts.git_commit())


def test_what_was_measured_before_a_fault_is_written(cli, tmp_path, monkeypatch):
    from mldec.tools.benchmark import cost

    def measure(args):
        yield {"first": 1}
        raise DataError("the rest cannot be measured")

    monkeypatch.setattr(cost, "cost", measure)
    one_line(cli.fault("benchmark", "cost", "--json", tmp_path / "m.json"), "the rest")
    assert json.loads((tmp_path / "m.json").read_text())["figures"] == {"first": 1}


def test_wrong_words_are_refused_before_anything_is_measured(cli, tmp_path, monkeypatch):
    from mldec.tools.benchmark import cost, profile

    monkeypatch.setattr(cost, "cost", lambda args: pytest.fail("it was measured"))
    monkeypatch.setattr(profile, "profile", lambda args: pytest.fail("it was measured"))
    status, out, err = cli("benchmark", "cost", "--json", tmp_path)
    assert (status, out) == (1, "")
    one_line(err, f"cannot write {tmp_path}")
    trace = tmp_path / "absent" / "trace.json"
    one_line(cli("benchmark", "profile", "--trace", trace).err, "there is no folder")
    one_line(cli("benchmark", "cost", "head=gap").err, "cost takes no settings")
    assert cli("benchmark", "throughput", "--repeats", "0").status == 2


@pytest.fixture
def checkpoint(tmp_path):
    torch.save(hostile.good(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_predict_is_compared_with_its_bound(cli, checkpoint, tmp_path):
    for number in range(20):
        picture(seed=number).save(tmp_path / f"{number}.png")
    words = ["--count", "15", "--rounds", "1", "--device", "cpu", "--json", tmp_path / "r.json"]
    status, _, err = cli("benchmark", "predict", checkpoint, tmp_path, *words)
    assert (status, err) == (0, "")
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert figures["images"] == 15
    bound = 1 / (1 / figures["decode"] + 1 / figures["model"])
    assert figures["bound"] == pytest.approx(bound)
    assert figures["share"] == pytest.approx(figures["predict"] / bound)


def test_a_gpu_scores_pinned_batches_and_is_awaited_once(tmp_path, monkeypatch):
    for number in range(3):
        picture(seed=number).save(tmp_path / f"{number}.png")
    pinned = Mock(side_effect=lambda: torch.zeros(2, 3, 8, 8))
    scores = Mock()
    engine = SimpleNamespace(
        device=torch.device("cuda:0"),
        transform=lambda image: torch.zeros(3, 8, 8),
        decoder="pillow",
        answer=lambda images: SimpleNamespace(scores=scores),
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned())
    monkeypatch.setattr(predict, "opened", lambda checkpoint, options: (engine, None))
    monkeypatch.setattr(predict, "BATCH_SIZE_GPU", 2)
    monkeypatch.setattr(predict, "processors", lambda: 0)
    monkeypatch.setattr(predict, "decoded", lambda *args, **options: [])
    predictor = SimpleNamespace(rows=lambda items, stop: [])
    monkeypatch.setattr(predict, "Predictor", lambda engine, rule, **options: predictor)

    args = SimpleNamespace(
        checkpoint="x.pt", images=str(tmp_path), device="cuda", count=3, rounds=1
    )
    list(predict.predict(args))
    assert pinned.call_count == 1
    # In the warm-up and in the round.
    assert scores.cpu.call_count == 2


def test_images_that_cannot_be_read_are_one_line(cli, checkpoint, tmp_path):
    (tmp_path / "x.png").write_text("no image")
    err = cli.fault("benchmark", "predict", checkpoint, tmp_path, "--device", "cpu")
    one_line(err, "the first images cannot be read")
