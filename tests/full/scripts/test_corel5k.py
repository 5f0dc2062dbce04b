"""The conversion of Corel5k, on small data."""

import csv
import importlib.util
import io
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, SCRIPTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_conversion_writes_the_photos_of_the_commit(tmp_path, monkeypatch):
    source = tmp_path / "clone" / "Corel5k"
    labels = {"train": np.array([[1, 0, 1], [0, 0, 0]]), "test": np.array([[0, 1, 0]])}
    names = {"train": ["1000/1", "1000/2"], "test": ["2000/3"]}
    for split, photos in names.items():
        for name in photos:
            file = source / f"{name}.jpeg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 8), "red").save(file)
        (source / f"corel5k_{split}_list.txt").write_text("\n".join(photos))
        savemat(source / f"corel5k_{split}_annot.mat", {split: labels[split]})
    (source / "corel5k_words.txt").write_text("city\nsun\nsky\n")
    git(source.parent, "init", "-q")
    git(source.parent, "add", ".")
    git(source.parent, "commit", "-qm", "photos")

    module = script("make_corel5k.py")
    monkeypatch.setattr(module, "COMMIT", git(source.parent, "rev-parse", "HEAD"))
    monkeypatch.setattr(module, "SPLITS", {"train": 2, "test": 1})
    module.write(str(source.parent), tmp_path / "out")
    rows = list(csv.reader(io.StringIO((tmp_path / "out" / "data.csv").read_text())))
    assert rows == [
        ["path", "labels", "split"],
        ["images/1.jpg", "city;sky", "train"],
        ["images/2.jpg", "", "train"],
        ["images/3.jpg", "sun", "test"],
    ]
    copied = tmp_path / "out" / "images" / "3.jpg"
    assert copied.read_bytes() == (source / "2000" / "3.jpeg").read_bytes()
