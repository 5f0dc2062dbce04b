"""The routes of the web page: scores, limits, and who is answered."""

import io
import tempfile

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
from mldec.tools.demo.app import Answerer, application
from mldec.tools.predict.engine import ExportedEngine, OnnxFile, TorchEngine
from mldec.tools.predict.heat_maps import Explainer

PREDICT = "/api/predict"


def client_of(engine, vectors=None, **settings):
    return TestClient(
        application(Answerer(engine, vectors), **settings), base_url="http://127.0.0.1:7860"
    )


@pytest.fixture(scope="module")
def engine():
    """An engine with thresholds of its own for 7 classes."""
    return TorchEngine(networks.loaded("full", calibration=networks.CALIBRATION))


@pytest.fixture
def client(engine):
    return client_of(engine)


def ask(client, *photos, **settings):
    """Send photos, named by their numbers."""
    files = [("photos", (f"{number}.png", photo)) for number, photo in enumerate(photos)]
    return client.post(PREDICT, files=files, data=settings)


def rows_of(client, *photos, **settings):
    response = ask(client, *photos, **settings)
    assert response.status_code == 200, response.text
    return response.json()


def by_name(names, values):
    return pytest.approx(dict(zip(names, values.tolist(), strict=True)), abs=1e-5)


def bad_files(good):
    """Return files that are no photos, and what is said of each."""
    bomb, too_large = io.BytesIO(), io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    Image.new("1", (7100, 7100)).save(too_large, "PNG")
    return {
        "an empty file (0 bytes)": b"",
        "not an image, or none of JPEG": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "image file is truncated": good[:-500],
        "too large an image": bomb.getvalue(),
        "7,100 x 7,100 pixels, above 50 million": too_large.getvalue(),
        "more than 20 MiB": bytes(20 * 2**20 + 1),
    }


# Answers


def test_scores_are_those_of_the_model_whatever_is_between_the_photos(client, engine):
    bad = bad_files(png(1))
    rows = rows_of(client, png(1), *bad.values(), png(2))
    assert [row["image"] for row in rows] == [f"{number}.png" for number in range(len(rows))]
    for row, reason in zip(rows[1:-1], bad, strict=True):
        assert row.keys() == {"image", "error"}
        assert reason in row["error"]
        assert "\n" not in row["error"]

    for row, seed in ((rows[0], 1), (rows[-1], 2)):
        image = engine.transform(read_image("", png(seed)))[None]
        known = scores(engine.loaded, image)[0]
        predictions = row["predictions"]
        found = {item["name"]: item["score"] for item in predictions}
        assert found == by_name(engine.classes.names, known)
        assert [*found.values()] == sorted(found.values(), reverse=True)
        lowest = {item["name"]: item["threshold"] for item in predictions}
        assert lowest == by_name(engine.classes.names, torch.tensor(engine.thresholds))
        for item in predictions:
            assert item["present"] == (item["score"] >= item["threshold"])


def test_heat_maps_are_those_of_the_explainer_over_what_the_model_saw():
    loaded = networks.loaded("full", crop=0.8)
    content = png(3, 60, 30)
    client = client_of(TorchEngine(loaded))
    [row] = rows_of(client, content, heat_maps=True, pictures=True, threshold=0)
    assert row["seen"] == pytest.approx(loaded.transform.visible_part((60, 30)))
    assert row["picture"].startswith("data:image/jpeg;base64,")

    explained = [item for item in row["predictions"] if "heat" in item]
    assert explained == row["predictions"][: app.HEAT_MAPS]
    indices = [loaded.classes.names.index(item["name"]) for item in explained]
    explainer = Explainer(loaded.model, 32)
    [expected] = explainer.maps(loaded.transform(picture(60, 30, 3))[None], [indices])
    np.testing.assert_allclose([item["heat"] for item in explained], expected.numpy(), atol=1e-4)
    assert row["heat_method"] == explainer.method
    assert all(item["heat_picture"].startswith("data:image/jpeg") for item in explained)

    # If no class is present, the best one is explained.
    [row] = rows_of(client, content, heat_maps=True, threshold=1)
    assert ["heat" in item for item in row["predictions"]] == [True] + [False] * 6
    assert "picture" not in row


def test_a_zero_shot_model_scores_the_classes_that_are_typed(tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("zebra 1 0 0 0 0\numbrella 0 1 0 1 0\n")
    zero_shot = TorchEngine(networks.loaded("words"))
    client = client_of(zero_shot, str(vectors))
    assert client.get("/api/model").json()["typed_classes"]
    assert len(rows_of(client, png(1))[0]["predictions"]) == networks.CLASSES

    [row] = rows_of(client, png(1), classes=" umbrella, zebra,", heat_maps=True)
    word_vectors = torch.tensor([[0.0, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    image = zero_shot.transform(picture(40, 30, 1))[None]
    expected = zero_shot.loaded.model(image, word_vectors).sigmoid()[0].detach()
    found = {item["name"]: item["score"] for item in row["predictions"]}
    assert found == by_name(["umbrella", "zebra"], expected)
    assert any("heat" in item for item in row["predictions"])

    for classes, reason in (
        ("zebra, unicorn", "unicorn"),
        (", ".join(map(str, range(1001))), "1,001 classes: name at most 1,000"),
    ):
        response = ask(client, png(1), classes=classes)
        assert response.status_code == 400
        assert reason in response.json()["detail"]


def test_an_exported_file_has_scores_but_no_heat_maps(tmp_path):
    client = client_of(ExportedEngine(OnnxFile(networks.save_onnx(tmp_path / "x.onnx", "groups"))))
    [row] = rows_of(client, png(1))
    loaded = networks.loaded("groups")
    expected = scores(loaded, loaded.transform(picture(40, 30, 1))[None])[0]
    found = {item["name"]: item["score"] for item in row["predictions"]}
    assert found == by_name(loaded.classes.names, expected)

    response = ask(client, png(1), heat_maps=True)
    assert response.status_code == 400
    assert "an exported file has no heat maps" in response.json()["detail"]
    assert "An exported file has no heat maps" in client.get("/").text


def test_the_model_is_described(client, engine):
    model = client.get("/api/model").json()
    assert model["classes"] == [*engine.classes.names]
    assert model["thresholds"] == pytest.approx(engine.thresholds)
    assert (model["heat_maps"], model["calibrated"], model["typed_classes"]) == (True, True, False)

    # FastAPI's own pages would load scripts from another host.
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404
    assert set(client.get("/openapi.json").json()["paths"]) == {"/api/model", PREDICT}


# Limits


def test_wrong_parameters_are_told_in_one_sentence(client):
    for settings, status, reason in (
        ({"threshold": 2}, 422, "threshold: Input should be less than or equal to 1"),
        ({"classes": "zebra"}, 400, "the classes of its model only: it is no zero-shot model"),
    ):
        response = ask(client, png(1), **settings)
        assert response.status_code == status
        assert reason in response.json()["detail"]

    response = client.post(PREDICT, data={"top": 3})
    assert (response.status_code, response.json()) == (422, {"detail": "photos: Field required"})
    response = ask(client, *[png()] * 17)
    assert response.status_code == 413
    assert response.json()["detail"] == "17 photos: pass at most 16 in a request"
    assert client.post(PREDICT, json={"photos": ["/etc/passwd"]}).status_code == 422


def test_a_request_has_a_limit_of_bytes_and_a_large_one_stays_in_memory(client, monkeypatch):
    def to_disk(*_):
        raise AssertionError("an upload is written to the disk")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", to_disk)
    padded = png(1) + bytes(19 * 2**20)
    [row] = rows_of(client, padded)
    assert row["predictions"]
    assert ask(client, *[bytes(20 * 2**20)] * 6).status_code == 413


# Who is answered, and what a stranger can name


def test_a_name_is_a_text_and_no_path(engine, tmp_path):
    names = [str(tmp_path), "../../etc/passwd", "C:\\photos\\a\x1b[2J<b>.jpg", ""]
    rows = Answerer(engine).answer([(name, b"text") for name in names], app.Settings())
    assert [row.image for row in rows] == [tmp_path.name, "passwd", "a?[2J<b>.jpg", "photo"]
    assert all(str(row.error).startswith("not an image, or none of JPEG") for row in rows)


def test_only_own_names_are_answered(engine):
    client = client_of(engine, names=["Photos.lan"])
    for host in ("127.0.0.1:7860", "localhost", "[::1]:7860", "192.168.1.5", "photos.lan:80"):
        assert client.get("/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:7860", "", "["):
        assert client.get("/", headers={"host": host}).status_code == 403


def test_pages_of_other_sites_cannot_ask(client):
    for origin, status in (("same-origin", 200), ("cross-site", 403), ("same-site", 403)):
        files = [("photos", ("a.png", png()))]
        response = client.post(PREDICT, files=files, headers={"sec-fetch-site": origin})
        assert response.status_code == status


def test_a_token_is_asked_for(engine):
    client = client_of(engine, token="a:secret")
    for path in ("/", "/api/model", "/openapi.json"):
        refused = client.get(path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert client.get(path, auth=("anyone", "a:secret")).status_code == 200
    for given, status in (("Bearer a:secret", 200), ("Bearer a:secre", 401), ("Basic \xe9", 401)):
        headers = {"authorization": given.encode("latin-1")}
        assert client.get("/api/model", headers=headers).status_code == status


def test_the_page_names_no_other_host_and_escapes_the_model(engine):
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
