"""Odd names of files on an ASCII terminal, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from support import one_line

SHARED = ["--plugin", "patches", "--device", "cpu", "--top", "1", "--threshold", "0"]


def test_odd_names_are_printable(cli: Callable[..., Any], digits_run: Path, tmp_path: Path) -> None:
    names = ["\udcff\udcfe.png", "\u65e5\u672c.png", "two\nlines.png", "x\x1b]0;pwn\x07.png"]
    folder = tmp_path / "names"
    folder.mkdir()
    for name in names:
        Image.new("RGB", (64, 64)).save(folder / name)
    bad = "bad\x1b[31m.png"
    (folder / bad).write_bytes(b"no image")

    # Pillow's limit is below the pixels of these images: twice the limit is not reached, and its
    # warning is not shown.
    code = (
        "from PIL import Image; Image.MAX_IMAGE_PIXELS = 3000; "
        "from mldec import predict; predict.main()"
    )
    words = [digits_run, folder, *SHARED]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1, done.stderr
    one_line(done.stderr.decode("ascii"), "bad?[31m.png: not an image")
    lines = done.stdout.decode("ascii").splitlines()
    shown = {line.partition(": ")[0].rpartition("/")[2] for line in lines}
    assert shown == {"??.png", "\\u65e5\\u672c.png", "two?lines.png", "x?]0;pwn?.png"}

    cli("predict", *words, "--jsonl", tmp_path / "p.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    paths = {
        os.fsdecode(bytes.fromhex(row["image_bytes"])) if "image_bytes" in row else row["image"]
        for row in rows
    }
    assert paths == {str(folder / name) for name in [*names, bad]}
    (odd,) = (row for row in rows if "image_bytes" in row)
    assert odd["image"].endswith("names/\\xff\\xfe.png")
    assert ["names/bad?[31m.png: not" in row["error"] for row in rows if "error" in row] == [True]
