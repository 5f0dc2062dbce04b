"""The package as on systems that cannot be had here: what they lack is hidden."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import QUICK

from mldec.__main__ import module_of

TOP = Path(__file__).parents[2]
TINY = [word for word in QUICK if not word.startswith(("+experiment", "data.", "train.log"))]
TINY += ["head=ml_decoder", "loss=bce", "train.epochs=1", "data.image_size=32", "train.workers=2"]


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_life_of_a_model_where_unix_is_missing():
    run("-m", "pytest", "-n", "0", "-p", "elsewhere", "tests/test_smoke.py", cwd=TOP)


@pytest.fixture
def photos(tmp_path):
    """A folder with blanks in its name, and text files with the line ends of Windows."""
    folder = tmp_path / "my own photos"
    make = TOP / "scripts" / "make_digits.py"
    run(make, "--layout", "csv", "--train", "48", "--val", "24", "--size", "32", folder, cwd=TOP)
    for path in folder.rglob("*.csv"):
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    return folder


def test_loader_processes_start_anew_in_a_path_with_blanks_and_files_of_windows(photos):
    here = photos.parent

    def command(name, *words):
        code = f"import elsewhere; from {module_of(name)} import main; main()"
        # An encoding that is not named would be that of Windows.
        named = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning:mldec"]
        return run(*named, "-c", code, *words, cwd=here)

    data = ["data=csv", f"data.root={photos}"]
    command("check_data", *data)
    command("train", *data, *TINY, "name=my run")
    command("evaluate", "outputs/my run", "--plugin", "patches", "--json", "my results.json")
    metrics = json.loads((here / "my results.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics["mAP"] > 0
    images = next(path for path in photos.iterdir() if path.is_dir())
    words = ["outputs/my run", images, "--plugin", "patches", "--workers", "2"]
    command("predict", *words, "--jsonl", "answers.jsonl")
    assert len((here / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == 72
