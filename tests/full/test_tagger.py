"""Commands with an untrained model of open_clip."""

import json

import pytest
from clip_models import clip_folder
from photos import CLASSES, write_photos

NAMES = ",".join(CLASSES)


def test_evaluate_calibrate_predict_and_export_accept_open_clip(cli, here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    source = f"clip:{clip_folder(here / 'clip')}"
    photos = write_photos(here / "own")
    settings = ["data=csv", f"data.root={photos}", f"data.classes=[{NAMES}]", "train.workers=0"]
    reports = []
    cli.out("calibrate", source, *settings, "--folds", "2", "--out", "tagger.pt")
    for path in (source, "tagger.pt"):
        cli.out("evaluate", path, *settings, "--json", "e.json")
        reports.append(json.loads((here / "e.json").read_text())["metrics"]["mAP"])
    assert reports[0] == pytest.approx(reports[1])

    # The calibrated checkpoint still accepts any classes.
    photo = photos / "20.png"
    cli.out("predict", "tagger.pt", photo, "--classes", "gnu,zebra")

    cli.out("export", source, "tagger.onnx", "--classes", NAMES)
    answers = []
    for model, *options in (["tagger.onnx"], [source, "--classes", NAMES]):
        answers.append(cli.out("predict", model, photo, *options).splitlines()[-1])
    assert answers[0] == answers[1]
