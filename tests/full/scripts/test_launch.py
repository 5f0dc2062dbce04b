import socket
import subprocess
from pathlib import Path

import pytest
from support import QUICK

LAUNCH = Path(__file__).parents[3] / "scripts" / "launch"


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_a_launcher_is_valid_shell(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


def test_one_node_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("PROCESSES", "2")
    command = [str(LAUNCH / "one_node.sh"), *QUICK, "train.epochs=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "digits" / "checkpoints" / "best.pt").exists()


def test_several_nodes_train(tmp_path):
    """Two launchers stand for two machines, each with its own working folder, as nodes have."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = f"NODES=2 PROCESSES=1 MAIN=localhost:{port} RUN=test"
    launch = f"{environment} {LAUNCH / 'several_nodes.sh'} {' '.join(QUICK)} train.epochs=1"
    jobs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        job = subprocess.Popen(
            launch, shell=True, cwd=tmp_path / name, stderr=subprocess.PIPE, text=True
        )
        jobs.append(job)
    for job in jobs:
        _, err = job.communicate(timeout=300)
        assert job.returncode == 0, err
    written = [
        name
        for name in ("first", "second")
        if (tmp_path / name / "outputs/digits/checkpoints/best.pt").exists()
    ]
    assert len(written) == 1, "one process writes the run"
