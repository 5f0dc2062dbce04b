"""The package on Windows and macOS, whose missing functions are hidden here."""

import json
import subprocess
import sys
from pathlib import Path

import forked
from support import QUICK

TOP = Path(__file__).parents[2]
TINY = [word for word in QUICK if not word.startswith(("+experiment", "data.", "train.log"))]
TINY += ["head=ml_decoder", "loss=bce", "train.epochs=1", "data.image_size=32", "train.workers=1"]


def run(*words, cwd):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_smoke_test_passes_without_unix():
    run("-m", "pytest", "-n", "0", "-p", "without_unix", "tests/test_smoke.py", cwd=TOP)


def test_spawned_workers_and_windows_files_in_path_with_spaces(tmp_path):
    photos = tmp_path / "my own photos"
    script = TOP / "scripts" / "make_digits.py"
    words = ["--layout", "csv", "--train", "48", "--val", "24", "--size", "32", str(photos)]
    assert forked.run(forked.script, str(script), *words).status == 0
    for path in photos.rglob("*.csv"):
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))

    images = next(path for path in photos.iterdir() if path.is_dir())
    data = ["data=csv", f"data.root={photos}"]
    trained = ["outputs/my run", "--plugin", "patches"]
    commands = [
        ["check_data", *data],
        ["train", *data, *TINY, "name=my run"],
        ["evaluate", *trained, "--json", "my results.json"],
        ["predict", *trained, str(images), "--workers", "1", "--jsonl", "answers.jsonl"],
    ]
    (tmp_path / "commands.py").write_text(f"""
import sys
import without_unix
from mldec.__main__ import main

# The spawned processes import this file.
if __name__ == "__main__":
    for words in {commands!r}:
        sys.argv = ["mldec", *words]
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, words
""")
    # Files must be opened with an explicit encoding: the default on Windows is not UTF-8.
    options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning:mldec"]
    run(*options, "commands.py", cwd=tmp_path)
    metrics = json.loads((tmp_path / "my results.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics["mAP"] > 0
    assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 72
