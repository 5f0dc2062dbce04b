"""The launch scripts train, and resume after a preemption."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from support import QUICK, wait_until

LAUNCH = Path(__file__).parents[3] / "scripts" / "launch"
SHELL = sorted(path for path in LAUNCH.iterdir() if path.suffix != ".yaml")


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_launcher_is_valid_shell(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


def test_one_node_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("PROCESSES", "1")
    command = [str(LAUNCH / "one_node.sh"), *QUICK, "train.epochs=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "digits" / "checkpoints" / "best.pt").exists()


def tree(process: int) -> list[int]:
    """Return a process and its descendants. The ranks of torchrun are in other groups."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(one for child in children for one in tree(int(child)))]


def test_a_skypilot_task_resumes_after_a_preemption(tmp_path):
    """The variables are set as by SkyPilot, which is not run itself."""
    commands = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["run"]
    folder = tmp_path / "run"
    assert "hydra.run.dir=/outputs train.save_every_steps=500" in commands
    commands = commands.replace("/outputs train.save_every_steps=500", str(folder))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        commands = commands.replace("29400", str(free.getsockname()[1]))
    environment = {
        **os.environ,
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_TASK_ID": "sky-managed-1",
        "PROCESSES": "1",
        "SETTINGS": " ".join([*QUICK, "train.save_every_steps=1"]),
    }

    def start(**variables):
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=LAUNCH.parents[1],
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    taken = start(PATCHES_SIGNAL="SIGSTOP:3")
    wait_until(lambda: taken.poll() is not None or (folder / "checkpoints" / "last.1.pt").exists())
    for process in tree(taken.pid):
        os.kill(process, signal.SIGKILL)
    out, _ = taken.communicate(timeout=60)
    assert taken.returncode == -signal.SIGKILL, out

    again = start()
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0, out
    assert "resumed from " in out
