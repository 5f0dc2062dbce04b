"""The command `mldec.benchmark`: its jobs, what it prints and what it writes."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldec import benchmark
from mldec.benchmark import JOBS, environment, parser
from mldec.runtime import facts

Cli = Callable[..., Any]


@pytest.mark.parametrize("job", JOBS)
def test_every_job_is_a_function_of_its_module(job: str) -> None:
    module = importlib.import_module(f"mldec.benchmark.{job}")
    assert callable(getattr(module, job))
    files = ["best.pt", "photos/"] if job == "predict" else []
    assert parser().parse_args([job, *files]).job == job


def test_the_environment_is_that_of_this_machine() -> None:
    import torch

    measured = environment()
    assert measured["torch"] == torch.__version__
    assert measured["commit"] == facts.git_commit()
    assert measured["threads"] == torch.get_num_threads()
    assert measured["cores"] >= 1
    json.dumps(measured)


def test_figures_are_printed_and_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mldec.benchmark import cost

    monkeypatch.setattr(cost, "cost", lambda args: {"seconds": 1234.5678, "name": "x"})
    monkeypatch.delattr(cost, "table")
    file = tmp_path / "m.json"
    status, out, err = cli("benchmark", "cost", "--json", file)
    assert (status, err) == (0, "")
    lines = dict(line.split() for line in out.splitlines())
    assert lines == {"seconds": "1,235", "name": "x"}
    content = json.loads(file.read_text())
    assert (content["benchmark"], content["figures"]["seconds"]) == ("cost", 1234.5678)
    assert content["environment"] == benchmark.environment()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mldec.benchmark import cost

    monkeypatch.setattr(cost, "cost", lambda args: pytest.fail("it was measured"))
    status, out, err = cli("benchmark", "cost", "--json", tmp_path)
    assert (status, out) == (1, "")
    assert err.startswith(f"mldec: cannot write {tmp_path}")


def test_the_command_takes_no_settings(cli: Cli) -> None:
    done = cli("benchmark", "cost", "head=gap")
    assert done.status == 1
    assert "cost takes no settings" in done.err


def test_the_options_of_a_trial() -> None:
    args = parser().parse_args(["throughput"])
    assert (args.experiment, args.classes, args.repeats) == ("coco_tresnet_l", 80, 20)
    assert parser().parse_args(["profile", "--trace", "x.json"]).trace == "x.json"


def test_only_settings_choose_the_device_of_a_trial() -> None:
    assert parser().parse_args(["predict", "x.pt", "photos", "--device", "cpu"]).device == "cpu"
    assert not hasattr(parser().parse_args(["profile"]), "device")


@pytest.mark.parametrize("option", ["--classes", "--repeats"])
def test_numbers_from_one_on(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["throughput", option, "0"])
    assert "whole number from 1 on" in capsys.readouterr().err
