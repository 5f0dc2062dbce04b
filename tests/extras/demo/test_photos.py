"""Photos on the page that are not from a request: examples and training photos."""

import os
from dataclasses import replace
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from pictures import picture, png
from starlette.testclient import TestClient

from mldec.data.images import read_image
from mldec.data.labels import from_dense
from mldec.data.table import Table, encode_paths
from mldec.data.types import in_folder
from mldec.errors import ConfigError, DataError
from mldec.evaluation import left_out
from mldec.heads import RidgeHead
from mldec.model import Classifier
from mldec.tools.demo.app import Predictor, create_app
from mldec.tools.demo.photos import TrainingPhotos, read_examples
from mldec.tools.predict.engine import ExportedEngine, OnnxFile, TorchEngine

NAMES = ("a/0.png", "a/1.png", "../secret.png", "link.png", "linked/5.png", "gone.png")


def client_of(predictor, examples=()):
    application = create_app(predictor, examples=examples)
    return TestClient(application, base_url="http://127.0.0.1:7860")


def stored(folder, labels):
    files = encode_paths([f"a/{number}.png" for number in range(len(labels))])
    classes = tuple(f"class {number}" for number in range(labels.shape[1]))
    return in_folder(Table(files, from_dense(labels), classes), folder)


@pytest.fixture
def ridge(tmp_path):
    """Return an engine whose head is fitted to 24 photos, some of which are below tmp_path/own."""
    loaded = networks.loaded("gap")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    names = [*NAMES, *(f"{number}.png" for number in range(6, 24))]

    own = tmp_path / "own"
    (own / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for path in ("own/a/0.png", "own/a/1.png", "secret.png", "other/5.png"):
        picture(40, 30, 0).save(tmp_path / path)
    (own / "link.png").symlink_to(tmp_path / "secret.png")
    (own / "linked").symlink_to(tmp_path / "other")

    photos = torch.stack([loaded.transform(picture(40, 30, number)) for number in range(24)])
    with torch.no_grad():
        tokens = loaded.model.backbone(photos).mean(1)
    labels = (np.random.default_rng(0).random((24, networks.CLASSES)) < 0.5).astype(np.int8)
    head = RidgeHead(tokens.shape[1], networks.CLASSES).fit(tokens, labels)
    encoded = np.array([os.fsencode(name) for name in names])
    left_out.write(folder, head, stored(own, labels), encoded, head.left_out, np.arange(24))
    model = Classifier(loaded.model.backbone, head).eval()
    return TorchEngine(replace(loaded, model=model, path=folder / "best.pt"))


def predictions_of(client, **settings):
    data = {"training_photos": True, "threshold": 0, "top": 7, **settings}
    response = client.post("/api/predict", files=[("photos", ("x.png", png(1)))], data=data)
    assert response.status_code == 200, response.text
    return response.json()[0]["predictions"]


def test_training_photos_are_those_with_the_largest_contributions(ridge, tmp_path):
    predictor = Predictor(ridge)
    predictor.training = TrainingPhotos(ridge, str(tmp_path / "own"))
    client = client_of(predictor)
    assert client.get("/api/model").json()["training_photos"]

    images = left_out.read_training_images(ridge.loaded)
    tokens = ridge.loaded.model.backbone(ridge.transform(read_image("", png(1)))[None]).detach()
    shares = ridge.loaded.model.head.contributions(tokens, images.examples, images.coefficients)[0]
    predictions = predictions_of(client)
    assert len([item for item in predictions if "training_photos" in item]) == 6
    for item in predictions[:6]:
        column = shares[:, ridge.classes.names.index(item["name"])]
        values = [photo["contribution"] for photo in item["training_photos"]]
        assert values == sorted(values, reverse=True)
        for photo in item["training_photos"]:
            row = images.names.index(photo["image"])
            assert photo["contribution"] == pytest.approx(column[row].item(), rel=1e-3)
            assert photo["contribution"] > 0

    assert all(
        "training_photos" not in item for item in predictions_of(client, training_photos=False)
    )


def test_only_training_photos_below_the_folder_are_opened(ridge, tmp_path, monkeypatch):
    opened = []
    training = TrainingPhotos(ridge, str(tmp_path / "own"))
    monkeypatch.setattr(
        "mldec.tools.demo.photos.read_image",
        lambda path, **options: opened.append(path) or picture(40, 30, 0),
    )
    pictures = {name: training.show(name, 1.0).picture for name in (*NAMES, "/etc/passwd", "..")}
    assert [name for name, shown in pictures.items() if shown] == ["a/0.png", "a/1.png"]
    assert opened == [tmp_path / "own/a/0.png", tmp_path / "own/a/1.png"]


def test_deleted_training_photo_has_no_picture(ridge, tmp_path):
    training = TrainingPhotos(ridge, str(tmp_path / "own"))
    (tmp_path / "own" / "a" / "0.png").unlink()
    (tmp_path / "own" / "a" / "1.png").write_text("text")
    for name in NAMES[:2]:
        assert training.show(name, 1.0).model_dump() == {
            "image": name,
            "contribution": 1.0,
            "picture": None,
        }


def test_reasons_without_training_photos_are_named(ridge, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"--training-photos {tmp_path / 'empty'}"):
        TrainingPhotos(ridge, str(tmp_path / "empty"))
    # A fit to many photos stores no features.
    head = ridge.loaded.model.head
    head.examples = None
    names = np.array([b"a/0.png"])
    images = stored(tmp_path / "own", np.zeros((1, 2), np.int8))
    left_out.write(tmp_path / "run", head, images, names, head.left_out[:1], np.arange(1))
    exported = ExportedEngine(OnnxFile(networks.save_onnx(tmp_path / "x.onnx", "gap")))
    for engine in (TorchEngine(networks.loaded("gap")), exported, ridge):
        with pytest.raises(ConfigError, match="--training-photos"):
            TrainingPhotos(engine, str(tmp_path / "own"))
        client = client_of(Predictor(engine))
        assert not client.get("/api/model").json()["training_photos"]
        files = [("photos", ("x.png", png(1)))]
        response = client.post("/api/predict", files=files, data={"training_photos": True})
        assert response.status_code == 400
        assert "training_photos" in response.json()["detail"]


def test_examples_are_served_by_number_from_memory(tmp_path):
    folder = tmp_path / "try"
    (folder / "b").mkdir(parents=True)
    (folder / "notes.txt").write_text("text")
    for number in range(14):
        (folder / "b" / f"{number:02}.png").write_bytes(png(number))
    examples = read_examples(str(folder))
    assert [example.name for example in examples] == [
        "00.png",
        "03.png",
        "06.png",
        "09.png",
        "12.png",
    ]

    client = client_of(Predictor(TorchEngine(networks.loaded("gap"))), examples)
    for path in folder.rglob("*.png"):
        path.unlink()
    assert client.get("/api/examples/1").content == png(3)
    page = client.get("/").text
    assert page.count('src="data:image/jpeg') == 5
    assert 'title="03.png"' in page
    for number in ("5", "-1"):
        assert client.get(f"/api/examples/{number}").status_code == 404
    for name in ("notes.txt", "..%2Fnotes.txt", "%2Fetc%2Fpasswd"):
        assert client.get(f"/api/examples/{name}").status_code in (404, 422)


def test_folder_of_examples_has_readable_photos(tmp_path):
    with pytest.raises(ConfigError, match=f"--examples {tmp_path}"):
        read_examples(str(tmp_path))
    Path(tmp_path, "x.jpg").write_text("text")
    with pytest.raises(DataError, match=r"x\.jpg"):
        read_examples(str(tmp_path))
