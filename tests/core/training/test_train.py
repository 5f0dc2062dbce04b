"""What `--cfg job` prints, and how a run goes on. Whole runs are tested in tests/full."""

import gc
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from support import QUICK

from mldec import train
from mldec.checkpoint import Checkpoint
from mldec.config.compose import override, parse
from mldec.runtime.devices import Precision
from mldec.training.trainer import Trainer


def test_the_config_that_is_shown_is_the_one_that_a_run_records(
    digits_run: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "mldec.train", *QUICK, "--cfg", "job"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(shown) == yaml.safe_load((digits_run / "config.yaml").read_text())
    assert yaml.safe_load(shown)["head"]["num_layers"] == 1  # a default of the signature
    assert list(tmp_path.iterdir()) == []


def test_another_section_is_hydras_own() -> None:
    command = [sys.executable, "-m", "mldec.train", "+experiment=digits", "--cfg", "hydra"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "hydra" in yaml.safe_load(shown)


@pytest.mark.parametrize(
    ("wanted", "saved", "on_cpu", "on_gpu"),
    [
        ("auto", None, "fp32", "bf16"),
        ("fp16", None, "fp32", "fp16"),
        ("fp32", None, "fp32", "fp32"),
        ("bf16", None, "bf16", "bf16"),
        ("auto", "bf16", "bf16", "bf16"),
        ("auto", "fp32", "fp32", "fp32"),
        ("auto", "fp16", "fp32", "fp16"),
        ("fp16", "fp32", "fp32", "fp32"),
        ("fp32", "bf16", "fp32", "fp32"),  # refused later, as another setting than before
    ],
)
def test_a_run_goes_on_in_the_precision_of_its_beginning(
    wanted: str, saved: str | None, on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    checkpoint = None
    if saved is not None:
        checkpoint = SimpleNamespace(config={"train": {"precision": saved}})
    for name, expected in (("cpu", on_cpu), ("cuda:0", on_gpu)):
        used = train.used_precision(Precision(wanted), checkpoint, torch.device(name))
        assert used.value == expected


def test_a_resumed_run_frees_its_checkpoint(
    digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "digits"
    shutil.copytree(digits_run, directory)
    alive = []

    def fit(trainer: Trainer, log: object) -> None:
        gc.collect()
        alive.append([value for value in gc.get_objects() if type(value) is Checkpoint])

    monkeypatch.setattr(Trainer, "fit", fit)
    config = parse(yaml.safe_load((directory / "config.yaml").read_text()))
    train.run(override(config, ["train.epochs=3", "resume=auto"]), directory)
    assert alive == [[]]
