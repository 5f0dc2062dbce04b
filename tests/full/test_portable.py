"""The package on Windows and macOS, whose missing functions are hidden here."""

import json
import subprocess
import sys
from pathlib import Path

import forked
from support import QUICK

TOP = Path(__file__).parents[2]
REPLACED = ("+experiment", "data.", "train.log", "train.epochs", "train.workers")
TINY = [word for word in QUICK if not word.startswith(REPLACED)]
TINY += ["head=ml_decoder", "loss=bce", "data.image_size=32"]


def test_spawned_workers_and_windows_files_in_path_with_spaces(tmp_path):
    photos = tmp_path / "my own photos"
    script = TOP / "scripts" / "make_digits.py"
    words = ["--layout", "csv", "--train", "48", "--val", "24", "--size", "32", str(photos)]
    assert forked.run(forked.script, str(script), *words).status == 0
    for path in photos.rglob("*.csv"):
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))

    images = next(path for path in photos.iterdir() if path.is_dir())
    data = ["data=csv", f"data.root={photos}"]
    run = ["outputs/my run", "--plugin", "patches"]
    # A spawned process imports torch, so only two commands use them.
    alone = "train.workers=0"
    train = ["train", *data, *TINY, "name=my run"]
    commands = [
        ["check_data", *data],
        [*train, "train.workers=1", "train.epochs=1"],
        [*train, alone, "train.epochs=2", "resume=auto"],
        ["evaluate", *run, alone, "--json", "my results.json"],
        ["calibrate", *run, alone, "--folds", "2"],
        ["report", *run, alone, "--out", "my report.html"],
        ["predict", *run, str(images), "--workers", "1", "--jsonl", "answers.jsonl"],
        ["export", *run, "model.onnx"],
        ["summary", "outputs"],
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
    command = [sys.executable, *options, "commands.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "my results.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics["mAP"] > 0
    assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 72
    assert (tmp_path / "my report.html").stat().st_size > 0
    assert (tmp_path / "model.onnx").stat().st_size > 0
