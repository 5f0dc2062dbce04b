"""Parquet files, exported files and the web page list exactly the present classes."""

import json

import many_classes
import pytest
import torch
from starlette.testclient import TestClient

from mldec.checkpoint import load_model
from mldec.data.images import read_image
from mldec.tools.demo.app import Predictor, create_app
from mldec.tools.exported import OnnxFile
from mldec.tools.predict.engine import ExportedEngine, TorchEngine

parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("onnxruntime")


def names_on_page(engine, photos, **settings):
    client = TestClient(create_app(Predictor(engine)), base_url="http://127.0.0.1:7860")
    files = [("photos", (photo.name, photo.read_bytes())) for photo in photos]
    response = client.post("/api/predict", files=files, data=settings)
    assert response.status_code == 200, response.text
    rows = []
    for result in response.json():
        assert all(item["present"] for item in result["predictions"]) or "top" in settings
        rows.append([item["name"] for item in result["predictions"] if item["present"]])
    return rows


def test_outputs_list_exactly_the_present_classes(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = many_classes.write(tmp_path)
    expected = model.present(model.thresholds)
    assert [len(row) > 10 for row in expected] == [True, True, False]
    out = cli.out("export", model.checkpoint, "x.onnx", "--weights", "raw")
    assert out.splitlines()[-1].endswith("equal decisions 100.00 %")

    found = {}
    for name, path in (("checkpoint", model.checkpoint), ("ONNX file", "x.onnx")):
        cli.out(
            "predict", path, *model.photos, f"--parquet={name}.parquet", f"--jsonl={name}.jsonl"
        )
        table = parquet.read_table(f"{name}.parquet").to_pylist()
        found[f"{name}, Parquet"] = [row["classes"] for row in table]
        rows = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
        found[f"{name}, JSON"] = [[item["name"] for item in row["predictions"]] for row in rows]

    exported = OnnxFile(tmp_path / "x.onnx")
    transform = exported.metadata.transform
    images = [transform(read_image("", photo.read_bytes())) for photo in model.photos]
    scores, decisions = exported(torch.stack(images))
    found["decisions of the ONNX file"] = []
    for values, mask in zip(scores, decisions, strict=True):
        order = values.argsort(descending=True).tolist()
        names = [many_classes.NAMES[index] for index in order if mask[index]]
        found["decisions of the ONNX file"].append(names)

    engine = TorchEngine(load_model(model.checkpoint))
    for name, of in (("checkpoint", engine), ("ONNX file", ExportedEngine(exported))):
        found[f"{name}, page"] = names_on_page(of, model.photos)
        found[f"{name}, page with all classes"] = names_on_page(of, model.photos, top=10**6)
    assert found == dict.fromkeys(found, expected)
    assert names_on_page(engine, model.photos, threshold=0.4) == model.present(0.4)
