"""The launch scripts start torchrun, and resume after a preemption."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from support import QUICK, train_here
from torch.distributed.run import parse_args

from mldec.files.torch_files import read_torch

LAUNCH = Path(__file__).parents[3] / "scripts" / "launch"
SHELL = sorted(path for path in LAUNCH.iterdir() if path.suffix != ".yaml")


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_launcher_is_valid_shell(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


def test_one_node_passes_its_settings_to_torchrun(tmp_path):
    """The arguments are those of the installed version of torchrun, which is not started."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    torchrun.chmod(0o755)
    settings = [*QUICK, "name=it's mine"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PROCESSES": "2"}
    command = [str(LAUNCH / "one_node.sh"), *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    args = parse_args(done.stdout.split("\0")[:-1])
    assert (args.nproc_per_node, args.standalone, args.max_restarts) == ("2", True, 2)
    assert (args.module, args.training_script) == (True, "mldec.train")
    assert args.training_script_args == settings


def test_a_skypilot_task_resumes_after_a_preemption(tmp_path):
    """The variables are set as by SkyPilot, which is not run itself."""
    commands = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["run"]
    folder = tmp_path / "run"
    assert "hydra.run.dir=/outputs train.save_every_steps=500" in commands
    commands = commands.replace("/outputs train.save_every_steps=500", str(folder))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        commands = commands.replace("29400", str(free.getsockname()[1]))

    # The first machine stops after some steps. tests/full/test_stops.py kills runs.
    train_here(tmp_path, *QUICK, f"hydra.run.dir={folder}", "train.stop_epoch=1")
    environment = {
        **os.environ,
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_TASK_ID": "sky-managed-1",
        "PROCESSES": "1",
        "SETTINGS": " ".join(QUICK),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=LAUNCH.parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert "resumed from " in done.stdout
    assert read_torch(folder / "checkpoints" / "last.pt")["epoch"] == 2
