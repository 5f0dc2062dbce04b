"""Runs with the real packages of the trackers, offline."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import QUICK

from mldec.training.trackers import ID_FILE

SECRET = "8d1f0000feed0000feed0000feed0000feed1c2b"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_real_package_keeps_a_resumed_run_in_one_record(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")

    folders = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    keys = {"WANDB_MODE": "offline", "WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET}
    for words in (["train.stop_epoch=1"], ["resume=auto"]):
        command = [sys.executable, "-m", "mldec.train", *QUICK, f"log.{name}=true", *words]
        environment = {**os.environ, **folders, **keys}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "nothing more is sent" not in done.stdout

    run = tmp_path / "outputs" / "digits"
    run_id = (run / ID_FILE).read_text().strip()
    if name == "wandb":
        records = list(run.glob("wandb/offline-run-*"))
        assert [path.name.endswith(f"-{run_id}") for path in records] == [True, True]
    assert len([path for path in tmp_path.rglob("*.png") if "media" in str(path)]) >= 2
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
