"""What `--cfg job` prints. Runs are tested in tests/e2e."""

import subprocess
import sys
from pathlib import Path

import yaml
from support import QUICK


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
