"""The command line of calibrate, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mldec import calibrate


def test_a_calibrated_copy_is_made_and_used(digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    (folder / "checkpoints").mkdir(parents=True)
    best = digits_run / "checkpoints" / "best.pt"
    (folder / "checkpoints" / "best.pt").write_bytes(best.read_bytes())

    words = ["digits", "--plugin", "patches", "data.val_images=80", "--json", "c.json"]
    command = [sys.executable, "-m", "mldec.calibrate", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == (
        "digits/checkpoints/best.calibrated.pt: a calibrated copy of digits"
    )
    content = json.loads((tmp_path / "c.json").read_text())
    assert (content["images"], content["objective"], content["folds"]) == (80, "f1", 5)


def test_the_command_line_has_defaults() -> None:
    args = calibrate.parser().parse_intermixed_args(["x.pt", "data.root=/data"])
    assert (args.folds, args.min_positives) == (5, None)
    assert (args.objective, args.scope, args.platt, args.out) == (None, None, False, None)
    for words in (["--folds", "0"], ["--min-positives", "-1"], []):
        with pytest.raises(SystemExit):
            calibrate.parser().parse_intermixed_args(words + (["x.pt"] if words else []))
