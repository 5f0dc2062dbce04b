"""The routes of the web page: results, limits and origin checks."""

import io
import tempfile
from dataclasses import replace

import networks
import numpy as np
import pytest
import torch
from pictures import picture, png
from PIL import Image
from starlette.testclient import TestClient

from mldec.data.images import read_image
from mldec.evaluation.run import scores
from mldec.tools.demo import app
from mldec.tools.demo.app import Predictor, create_app
from mldec.tools.heat_maps import Explainer
from mldec.tools.predict.engine import ExportedEngine, OnnxFile, TorchEngine

PREDICT = "/api/predict"


def client_of(engine, vectors=None, training=None, **settings):
    predictor = Predictor(engine, vectors)
    predictor.training = training
    application = create_app(predictor, **settings)
    return TestClient(application, base_url="http://127.0.0.1:7860")


@pytest.fixture(scope="module")
def engine():
    """An engine with thresholds for 7 classes."""
    return TorchEngine(networks.loaded("full", calibration=networks.CALIBRATION))


@pytest.fixture
def client(engine):
    return client_of(engine)


def post(client, *photos, **settings):
    """Send photos with numbers as names."""
    files = [("photos", (f"{number}.png", photo)) for number, photo in enumerate(photos)]
    return client.post(PREDICT, files=files, data=settings)


def results_of(client, *photos, **settings):
    response = post(client, *photos, **settings)
    assert response.status_code == 200, response.text
    return response.json()


def by_name(names, values):
    return pytest.approx(dict(zip(names, values.tolist(), strict=True)), abs=1e-5)


def invalid_files(good):
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    large = io.BytesIO()
    Image.new("1", (7100, 7100)).save(large, "PNG")
    document = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    too_long = bytes(20 * 2**20 + 1)
    return [b"", document, good[:-500], bomb.getvalue(), large.getvalue(), too_long]


def test_scores_equal_the_model_and_invalid_files_have_an_error(client, engine):
    results = results_of(client, png(1), *invalid_files(png(1)), png(2), top=7)
    assert [result["image"] for result in results] == [f"{number}.png" for number in range(8)]
    for result in results[1:-1]:
        assert result.keys() == {"image", "error"}
        assert "\n" not in result["error"]

    for result, seed in ((results[0], 1), (results[-1], 2)):
        image = engine.transform(read_image("", png(seed)))[None]
        known = scores(engine.loaded, image)[0]
        predictions = result["predictions"]
        found = {item["name"]: item["score"] for item in predictions}
        assert found == by_name(engine.classes.names, known)
        assert [*found.values()] == sorted(found.values(), reverse=True)
        lowest = {item["name"]: item["threshold"] for item in predictions}
        assert lowest == by_name(engine.classes.names, torch.tensor(engine.thresholds))
        for item in predictions:
            assert item["present"] == (item["score"] >= item["threshold"])


def test_heat_maps_equal_the_explainer():
    loaded = networks.loaded("full", crop=0.8)
    content = png(3, 60, 30)
    client = client_of(TorchEngine(loaded))
    [result] = results_of(client, content, heat_maps=True, pictures=True, threshold=0)
    assert result["seen"] == pytest.approx(loaded.transform.visible_part((60, 30)))
    assert result["picture"].startswith("data:image/jpeg;base64,")

    explained = [item for item in result["predictions"] if "heat" in item]
    assert explained == result["predictions"][: app.HEAT_MAPS]
    indices = [loaded.classes.names.index(item["name"]) for item in explained]
    explainer = Explainer(loaded.model, 32)
    [expected] = explainer.maps(loaded.transform(picture(60, 30, 3))[None], [indices])
    np.testing.assert_allclose([item["heat"] for item in explained], expected.numpy(), atol=1e-4)
    assert result["heat_method"] == explainer.method
    assert all(item["heat_picture"].startswith("data:image/jpeg") for item in explained)

    # The best class is explained if it is listed and no class is present.
    [result] = results_of(client, content, heat_maps=True, threshold=1, top=7)
    assert ["heat" in item for item in result["predictions"]] == [True] + [False] * 6
    assert "picture" not in result
    [result] = results_of(client, content, heat_maps=True, threshold=1)
    assert result["predictions"] == []


def test_zero_shot_model_scores_typed_classes(tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("zebra 1 0 0 0 0\numbrella 0 1 0 1 0\n")
    zero_shot = TorchEngine(networks.loaded("words"))
    client = client_of(zero_shot, str(vectors))
    assert client.get("/api/model").json()["typed_classes"]
    assert len(results_of(client, png(1))[0]["predictions"]) == networks.CLASSES

    [result] = results_of(client, png(1), classes=" umbrella, zebra,", heat_maps=True)
    word_vectors = torch.tensor([[0.0, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    image = zero_shot.transform(picture(40, 30, 1))[None]
    expected = zero_shot.loaded.model(image, word_vectors).sigmoid()[0].detach()
    found = {item["name"]: item["score"] for item in result["predictions"]}
    assert found == by_name(["umbrella", "zebra"], expected)
    assert any("heat" in item for item in result["predictions"])

    for classes in ("zebra, unicorn", ", ".join(map(str, range(1001)))):
        assert post(client, png(1), classes=classes).status_code == 400


def test_exported_file_has_scores_but_no_heat_maps(tmp_path):
    client = client_of(ExportedEngine(OnnxFile(networks.save_onnx(tmp_path / "x.onnx", "groups"))))
    [result] = results_of(client, png(1), top=7)
    assert len(result["predictions"]) == networks.CLASSES
    response = post(client, png(1), heat_maps=True)
    assert response.status_code == 400
    assert "heat_maps" in response.json()["detail"]


def test_title_is_the_name_of_the_run():
    loaded = networks.loaded("gap")
    of_run = replace(loaded, of_run=True, config=replace(loaded.config, name="mine"))
    for shown, name in ((loaded, loaded.path.name), (of_run, "mine")):
        client = client_of(TorchEngine(shown))
        assert client.get("/api/model").json()["name"] == name
        assert f"<h1>{name}</h1>" in client.get("/").text


@pytest.mark.parametrize("exclusive", [False, True])
def test_models_without_thresholds_list_the_ten_highest_scores(exclusive, monkeypatch):
    monkeypatch.setattr(networks, "CLASSES", 12)
    engine = TorchEngine(networks.loaded("gap", exclusive=exclusive))
    client = client_of(engine)
    [ten] = results_of(client, png(1))
    [every] = results_of(client, png(1), top=20)
    assert ten["predictions"] == every["predictions"][:10]
    assert len(every["predictions"]) == 12
    scores = [item["score"] for item in every["predictions"]]
    best = [True] + [False] * 11
    expected = best if exclusive else [score >= 0.5 for score in scores]
    assert [item["present"] for item in every["predictions"]] == expected


def test_model_is_described(client, engine):
    model = client.get("/api/model").json()
    assert model["classes"] == list(engine.classes.names)
    assert model["thresholds"] == pytest.approx(engine.thresholds)
    assert (model["heat_maps"], model["calibrated"], model["typed_classes"]) == (True, True, False)

    # The documentation pages of FastAPI load scripts from another host.
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
    assert set(client.get("/openapi.json").json()["paths"]) == {"/api/model", PREDICT}


@pytest.mark.parametrize(
    ("photos", "settings", "status", "name"),
    [
        (1, {"threshold": 2}, 422, "threshold"),
        (1, {"classes": "zebra"}, 400, "classes"),
        (0, {"top": 3}, 422, "photos"),
        (17, {}, 413, "17"),
    ],
)
def test_invalid_parameters_have_one_detail(client, photos, settings, status, name):
    response = post(client, *[png()] * photos, **settings)
    assert response.status_code == status
    assert name in response.json()["detail"]
    assert client.post(PREDICT, json={"photos": ["/etc/passwd"]}).status_code == 422


def test_requests_are_limited_and_stay_in_memory(client, monkeypatch):
    def to_disk(*_):
        raise AssertionError("an upload is written to the disk")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", to_disk)
    padded = png(1) + bytes(19 * 2**20)
    [result] = results_of(client, padded, top=1)
    assert result["predictions"]
    assert post(client, *[bytes(20 * 2**20)] * 6).status_code == 413


def test_file_names_are_text(engine, tmp_path):
    names = [str(tmp_path), "../../etc/passwd", "C:\\photos\\a\x1b[2J<b>.jpg", ""]
    results = Predictor(engine).predict(
        [(name, b"text") for name in names], app.PredictRequest(photos=[])
    )
    images = [tmp_path.name, "passwd", "a?[2J<b>.jpg", "photo"]
    assert [result.image for result in results] == images
    assert all(result.error for result in results)


def test_only_own_host_names_are_accepted(engine):
    client = client_of(engine, host="Photos.lan")
    for host in ("127.0.0.1:7860", "localhost", "[::1]:7860", "192.168.1.5", "photos.lan:80"):
        assert client.get("/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:7860", "", "["):
        assert client.get("/", headers={"host": host}).status_code == 403


def test_pages_of_other_sites_are_rejected(client):
    for origin, status in (("same-origin", 200), ("cross-site", 403), ("same-site", 403)):
        files = [("photos", ("a.png", png()))]
        response = client.post(PREDICT, files=files, headers={"sec-fetch-site": origin})
        assert response.status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:7860", 200),
        ("http://evil.example", 403),
        ("http://127.0.0.1:80", 403),
        ("null", 403),
    ],
)
def test_origin_of_a_page_must_be_the_host_without_sec_fetch_site(client, origin, status):
    """Browsers send no Sec-Fetch-Site over HTTP to other machines."""
    files = [("photos", ("a.png", png()))]
    assert client.post(PREDICT, files=files, headers={"origin": origin}).status_code == status


def test_page_loads_no_other_host_and_escapes_names(engine):
    loaded = networks.loaded("full")
    names = ("<script>alert(1)</script>", *loaded.classes.names[1:])
    strange = TorchEngine(loaded)
    strange.classes = type(loaded.classes)(names)
    response = client_of(strange).get("/")
    assert "<script>alert(1)" not in response.text
    assert "https://" not in response.text
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
