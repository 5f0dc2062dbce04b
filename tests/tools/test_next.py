"""The command `mldec next`: uncertainties, the choice of images, the table and its errors."""

import csv

import numpy as np
import pytest
from pictures import picture
from scipy.special import expit, logit
from support import QUICK, one_line, train_here

from mldec.tools.next import choose, uncertainties

PATCHES = ["--plugin", "patches", "--device", "cpu"]


def test_uncertainty_is_largest_at_threshold():
    scores = np.array([[0.2, 0.5], [0.9, 0.99], [0.0, 1.0]], np.float32)
    thresholds = [0.2, 0.7]
    moved = expit(logit(np.clip(scores.astype(float), 1e-7, 1 - 1e-7)) - logit(thresholds))
    expected = 1 - np.abs(2 * moved - 1)
    np.testing.assert_allclose(uncertainties(scores, thresholds), expected, atol=1e-5)
    assert uncertainties(scores, thresholds)[0, 0] == pytest.approx(1)
    # A threshold above all scores, as mldec calibrate stores it, gives no infinite values.
    assert np.isfinite(uncertainties(scores, [0.0, 1.0])).all()


def test_uncertainty_of_one_label_is_ratio_to_best():
    found = uncertainties(np.array([[0.6, 0.3, 0.1]]), None)
    np.testing.assert_allclose(found, [[0.5, 0.5, 1 / 6]])


def slow_choice(uncertainty, features, labeled, count):
    """The same choice with all distances of each step."""
    everything = np.concatenate([features, labeled]).astype(float)
    everything = (everything - everything.mean(0)) / everything.std(0)
    everything /= np.linalg.norm(everything, axis=1, keepdims=True)
    centers = list(range(len(features), len(everything)))
    chosen = []
    for _ in range(count):
        gains = []
        for index in range(len(features)):
            distances = [((everything[index] - everything[c]) ** 2).sum() for c in centers]
            gain = uncertainty[index] * min(distances, default=4)
            gains.append(-1 if index in chosen else gain)
        chosen.append(int(np.argmax(gains)))
        centers.append(chosen[-1])
    return chosen


@pytest.mark.parametrize("labeled", [0, 7])
def test_choice_weighs_distance_by_uncertainty(labeled):
    rng = np.random.default_rng(labeled)
    features = rng.normal(size=(40, 5)).astype(np.float32)
    known = rng.normal(size=(labeled, 5)).astype(np.float32)
    uncertainty = rng.random(40)
    assert choose(uncertainty, features, known, 12) == slow_choice(uncertainty, features, known, 12)
    # All images can be chosen, also copies, whose distance is 0.
    copies = np.repeat(features[:3], 2, axis=0)
    assert sorted(choose(np.ones(6), copies, known, 6)) == list(range(6))


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        picture(64, 64, seed=number).save(folder / f"{number}.png")
    (folder / "3.png").write_bytes(b"no image")
    return folder


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_is_input_of_predict(cli, best, photos, tmp_path):
    out = tmp_path / "next.csv"
    outcome = cli("next", best, photos, *PATCHES, "--count", "3", "--out", out)
    assert outcome.status == 1
    assert "3.png" in outcome.err
    rows = rows_of(out)
    assert list(rows[0]) == ["image", "score", "classes", "scores"]
    assert len({row["image"] for row in rows}) == 3
    for row in rows:
        assert len(row["classes"].split(";")) == len(row["scores"].split(";"))

    cli.out("predict", best, "--list", out, *PATCHES, "--csv", tmp_path / "labels.csv")
    assert [row["image"] for row in rows_of(tmp_path / "labels.csv")] == [r["image"] for r in rows]


def test_labeled_images_are_left_out(cli, here, photos):
    picture(64, 64, seed=3).save(photos / "3.png")
    (photos / "data.csv").write_text("path,labels\n0.png,cat\n1.png,cat\n2.png,dog\n3.png,dog\n")
    data = ["data=csv", f"data.root={photos}", "data.val_fraction=0.5", "data.image_size=64"]
    settings = [word for word in QUICK if not word.startswith("data.")]
    train_here(here, *settings, *data, "train.batch_size=2", "train.epochs=1", "name=run")
    run = here / "outputs" / "run"
    cli.out("next", run, photos, *PATCHES, "--skip-labeled", "--out", here / "n.csv")
    assert {row["image"] for row in rows_of(here / "n.csv")} == {
        f"{photos}/4.png",
        f"{photos}/5.png",
    }

    only = [photos / "0.png", *PATCHES, "--skip-labeled"]
    assert "labeled" in cli.fault("next", run, *only)
    assert "data.root" in cli.fault("next", run, *only, "--data", "data.root=/nowhere")


def test_invalid_options_are_named(cli, best, photos, tmp_path):
    assert "--data" in cli.fault("next", best, photos, *PATCHES, "--data", "data.root=/x")
    assert "a.onnx" in cli.fault("next", tmp_path / "a.onnx", photos)
    outcome = cli("next", best, photos, "--count", "0")
    assert outcome.status == 2
    one_line(outcome.err, "--count")
