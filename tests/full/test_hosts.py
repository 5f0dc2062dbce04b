"""Commands connect only to hosts that the user named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pictures import picture
from support import QUICK

# Run commands, which are JSON. Raise an error for remote hosts, and print those that each command
# tries to reach.
GUARD = """
import json, sys
LOCAL = (None, "", "localhost", "127.0.0.1", "::1")
hosts = []

def guard(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    if host not in LOCAL:
        hosts.append(host)
        raise OSError(f"{host} is a remote host")

sys.addaudithook(guard)
from mldec.__main__ import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["mldec", *words]
    hosts.clear()
    status = 0
    try:
        main()
    except SystemExit as stop:
        status = stop.code
    print("FOUND", json.dumps([status, hosts]))
"""


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
    commands = [
        ["train"] + QUICK + ["backbone=tiny", "train.epochs=1"],
        ["evaluate", run],
        ["predict", run, "photos", "--json", "answers.json"],
        ["calibrate", run],
        ["export", run, "x.onnx"],
        ["predict", "x.onnx", "photos"],
        ["report", run, "--out", "report.html"],
        ["check_data", "data=digits", "data.train_images=64", "data.val_images=40"],
        ["summary", "outputs"],
        ["predict", "hf:owner/name", "photos"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", GUARD, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    results = [json.loads(line.removeprefix("FOUND ")) for line in found]
    assert len(results) == len(commands), done.stderr
    for words, result in zip(commands[:-1], results, strict=False):
        assert result == [0, []], (words, done.stderr)

    # The guard works.
    [status, hosts] = results[-1]
    assert status == 1
    assert set(hosts) == {"huggingface.co"}
