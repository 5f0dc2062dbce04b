"""What `--cfg job` prints. Runs themselves are tested in tests/e2e."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import QUICK

from mldec.train import settings_to_show


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--cfg", "job", "+experiment=digits"], ["+experiment=digits"]),
        (["+experiment=digits", "--cfg", "job", "seed=3"], ["+experiment=digits", "seed=3"]),
        (["+experiment=digits"], None),
        (["--cfg", "hydra"], None),
        (["--cfg"], None),
        (["--cfg", "job", "--package", "train"], None),
    ],
)
def test_hydra_answers_everything_else(words: list[str], settings: list[str] | None) -> None:
    assert settings_to_show(words) == settings


def test_the_config_that_is_shown_is_the_one_that_a_run_records(digits_run: Path) -> None:
    command = [sys.executable, "-m", "mldec.train", *QUICK, "--cfg", "job"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(shown) == yaml.safe_load((digits_run / "config.yaml").read_text())
    assert yaml.safe_load(shown)["head"]["num_layers"] == 1  # a default of the signature
