"""The package on Windows and macOS, whose missing functions are hidden here."""

import json
import subprocess
import sys
from pathlib import Path

from support import QUICK

from mldec.__main__ import module_of

TOP = Path(__file__).parents[2]
TINY = [word for word in QUICK if not word.startswith(("+experiment", "data.", "train.log"))]
TINY += ["head=ml_decoder", "loss=bce", "train.epochs=1", "data.image_size=32", "train.workers=2"]


def run(*words, cwd):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_smoke_test_passes_without_unix():
    run("-m", "pytest", "-n", "0", "-p", "without_unix", "tests/test_smoke.py", cwd=TOP)


def test_spawned_workers_and_windows_files_in_path_with_spaces(tmp_path):
    photos = tmp_path / "my own photos"
    script = TOP / "scripts" / "make_digits.py"
    run(script, "--layout", "csv", "--train", "48", "--val", "24", "--size", "32", photos, cwd=TOP)
    for path in photos.rglob("*.csv"):
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))

    def command(name, *words):
        code = f"import without_unix; from {module_of(name)} import main; main()"
        # Files must be opened with an explicit encoding: the default on Windows is not UTF-8.
        options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning:mldec"]
        run(*options, "-c", code, *words, cwd=tmp_path)

    data = ["data=csv", f"data.root={photos}"]
    command("check_data", *data)
    command("train", *data, *TINY, "name=my run")
    command("evaluate", "outputs/my run", "--plugin", "patches", "--json", "my results.json")
    metrics = json.loads((tmp_path / "my results.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics["mAP"] > 0

    images = next(path for path in photos.iterdir() if path.is_dir())
    words = ["outputs/my run", images, "--plugin", "patches", "--workers", "2"]
    command("predict", *words, "--jsonl", "answers.jsonl")
    assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 72
