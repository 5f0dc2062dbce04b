"""Each command once with an untrained model of open_clip."""

import json
import shutil

import numpy as np
import open_clip
import pytest
import torch
from clip_models import clip_folder
from PIL import Image
from sklearn.metrics import average_precision_score

NAMES = ("zebra", "traffic jam", "cat")
CLASSES = ",".join(NAMES)
PHOTOS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("tagger") / "clip")


@pytest.fixture(scope="module")
def photos(folder, tmp_path_factory, sample_data):
    """Real photos in a CSV file and in folders. The model predicts most labels correctly."""
    place = tmp_path_factory.mktemp("photos")
    found = sorted((sample_data / "coco2014_mini").rglob("*.jpg"))[:PHOTOS]
    logits = logits_of_open_clip(folder, found)
    present = logits > np.median(logits)
    present[0] = ~present[0]

    lines = ["path,labels,split"]
    for number, photo in enumerate(found):
        labels = ";".join(
            name for name, is_there in zip(NAMES, present[number], strict=True) if is_there
        )
        lines.append(f"{photo.name},{labels},val")
        shutil.copy(photo, place)
        by_class = place / "folders" / "val" / NAMES[number % 3]
        by_class.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, by_class)
    (place / "data.csv").write_text("\n".join(lines) + "\n")
    return place


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@torch.no_grad()
def logits_of_open_clip(folder, photos):
    """Return the logits of the photos and `NAMES` of open_clip."""
    model, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    images = torch.stack([prepare(Image.open(photo).convert("RGB")) for photo in photos])
    logits, _ = model.eval().get_logits(images, tokenizer([f"a photo of a {n}." for n in NAMES]))
    return np.asarray(logits)


def test_evaluate_and_calibrate_on_several_labels(folder, photos, tmp_path, cli):
    source, data = f"clip:{folder}", ["data=csv", f"data.root={photos}"]
    settings = [*data, f"data.classes=[{CLASSES}]", "train.workers=0"]
    assert cli("evaluate", source, *settings, "--json", "e.json").status == 0
    rows = [line.split(",") for line in (photos / "data.csv").read_text().splitlines()[1:]]
    present = np.array([[name in row[1].split(";") for name in NAMES] for row in rows])
    logits = logits_of_open_clip(folder, [photos / row[0] for row in rows])
    expected = [average_precision_score(present[:, k], logits[:, k]) for k in range(3)]
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["metrics"]["mAP"] == pytest.approx(100 * np.mean(expected), abs=1e-3)

    calibrated = "tagger.pt"
    assert cli("calibrate", source, *settings, "--folds", "2", "--out", calibrated).status == 0

    # The calibrated checkpoint still accepts any classes.
    photo = photos / rows[0][0]
    assert cli("predict", calibrated, photo, "--content", "decisions").status == 0
    assert cli("predict", calibrated, photo, "--classes", "gnu,zebra").status == 0
    again = cli("evaluate", calibrated, *settings, "--json", "c.json")
    assert again.status == 0
    assert json.loads((tmp_path / "c.json").read_text())["metrics"]["mAP"] == pytest.approx(
        found["metrics"]["mAP"]
    )


def test_export_has_the_given_classes(folder, photos, cli):
    words = ["--classes", CLASSES, "--verify", photos / "folders" / "val" / "cat"]
    done = cli("export", f"clip:{folder}", "tagger.onnx", *words)
    assert done.status == 0, done.err
    assert "equal decisions 100.00 %" in done.out
    photo = next(photos.glob("*.jpg"))
    answers = [
        cli("predict", model, photo, *options).out.splitlines()[-1]
        for model, *options in (["tagger.onnx"], [f"clip:{folder}", "--classes", CLASSES])
    ]
    assert answers[0] == answers[1]
