"""Commands connect only to hosts that the user named."""

import subprocess
import sys
from pathlib import Path

import pytest
from pictures import picture
from support import QUICK

# Run a module. Write the names of remote hosts to a file, and raise an error for them.
GUARD = """
import runpy, sys
from pathlib import Path
LOCAL = (None, "", "localhost", "127.0.0.1", "::1")

def guard(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    if host not in LOCAL:
        with Path("hosts").open("a") as file:
            print(host, file=file)
        raise OSError(f"{host} is a remote host")

sys.addaudithook(guard)
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def remote_hosts(folder: Path, *words: str, status: int = 0) -> set[str]:
    """Run a command, and return the names of the remote hosts that it tried to reach."""
    command = [sys.executable, "-c", GUARD, "mldec", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    hosts = folder / "hosts"
    return set(hosts.read_text().split()) if hosts.exists() else set()


def test_commands_do_not_reach_remote_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "ORT_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "photos").mkdir()
    picture(64, 64).save(tmp_path / "photos" / "a.png")

    run = "outputs/digits"
    for words in (
        ["train"] + QUICK + ["backbone=tiny", "train.epochs=1"],
        ["evaluate", run],
        ["predict", run, "photos", "--json", "answers.json"],
        ["calibrate", run],
        ["export", run, "x.onnx"],
        ["predict", "x.onnx", "photos"],
        ["report", run, "--out", "report.html"],
        ["check_data", "data=digits", "data.train_images=64", "data.val_images=40"],
        ["summary", "outputs"],
    ):
        assert remote_hosts(tmp_path, *words) == set(), words

    hub = remote_hosts(tmp_path, "predict", "hf:owner/name", "photos", status=1)
    assert hub == {"huggingface.co"}, "the guard does not work"
