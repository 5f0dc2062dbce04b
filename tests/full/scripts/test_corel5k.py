"""The scripts of the Corel5k benchmark, on small data."""

import csv
import importlib.util
import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
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


def test_regression_leaves_each_photo_out():
    rng = np.random.default_rng(0)
    photos = rng.normal(size=(30, 4))
    labels = rng.random((30, 3)) < [0.5, 0.3, 0.1]
    model = script("studies/corel5k.py").Regression(photos, labels, gamma=2.0, alpha=0.3)

    # Fit again without each photo, with the same scale and frequencies.
    counts = labels.sum(0)
    squares = ((photos[:, None] - photos) ** 2).sum(2)
    kernel = np.exp(-2.0 * squares / np.median(squares))
    frequencies = (counts + 1) / 32
    predicted = np.zeros(labels.shape)
    for index in range(30):
        others = np.arange(30) != index
        regularized = kernel[np.ix_(others, others)] + 0.3 * np.eye(29)
        coefficients = np.linalg.solve(regularized, labels[others] - frequencies)
        predicted[index] = kernel[index, others] @ coefficients + frequencies

    predicted = np.maximum(predicted, 1e-5)
    shown = np.array([predicted[labels[:, c], c].mean() for c in range(3)])
    expected = (counts * shown + np.median(shown)) / (counts + 1)
    assert model.when_shown == pytest.approx(expected)
