"""What `--cfg job` prints, and the line about start weights. Runs are tested in tests/e2e."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support import QUICK

from mldec import build
from mldec.config.compose import compose
from mldec.train import start_weights


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
    ("words", "expected"),
    [
        (["+experiment=coco_tresnet_l"], "the published tresnet_v2_l.miil_in21k; the head is ran"),
        (["+experiment=coco_tresnet_l", "init=zoo:tresnet_l_pretrain"], "init=zoo:tresnet_l_pret"),
        (["+experiment=coco_tresnet_l", "backbone.pretrained=l.pth"], "backbone.pretrained=l.pth;"),
        (["+experiment=coco_tresnet_xl_640"], "random"),
    ],
)
def test_the_log_names_the_weights_that_a_run_starts_from(words: list[str], expected: str) -> None:
    config = compose(words)
    config = build.recorded(config, build.check(config))
    assert start_weights(config).startswith(f"start weights: {expected}")
    resumed = start_weights(config, Path("last.pt"))
    assert resumed.startswith(f"start weights: last.pt, of a run that began with: {expected}")


def test_of_a_backbone_without_pretrained_the_log_names_the_class() -> None:
    config = replace(compose(["+experiment=digits"]), backbone={"_target_": "patches.Patches"})
    expected = "start weights: those that patches.Patches is built with; the head is random"
    assert start_weights(config) == expected
