"""Pre-labels for Label Studio and CVAT, read back by our readers."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pictures import picture

SHARED = ["--plugin", "patches", "--device", "cpu", "--threshold", "0.1"]


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ('a & "b".png', "c.png", "d.png"):
        picture(64, 64, seed=len(name)).save(folder / name)
    (folder / "c.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def written(cli, best, photos, tmp_path):
    """The rows of predict and both files of pre-labels."""
    files = [tmp_path / "rows.json", tmp_path / "tasks.json", tmp_path / "tags.xml"]
    words = [
        word
        for pair in zip(("--json", "--label-studio", "--cvat"), files, strict=True)
        for word in pair
    ]
    outcome = cli(
        "predict", best, photos, *SHARED, *words, "--image-prefix", "/data/local-files/?d="
    )
    assert outcome.status == 1
    rows = [row for row in json.loads(files[0].read_text()) if "error" not in row]
    assert len(rows) == 2
    return rows, json.loads(files[1].read_text()), ElementTree.parse(files[2]).getroot()


def test_label_studio_has_predictions_with_scores(written):
    rows, tasks, _ = written
    assert len(tasks) == len(rows)
    for row, task in zip(rows, tasks, strict=True):
        assert task["data"]["image"] == "/data/local-files/?d=" + row["image"]
        [prediction] = task["predictions"]
        chosen = [item["name"] for item in row["predictions"]]
        found = [result["value"]["choices"] for result in prediction["result"]]
        assert found == ([chosen] if chosen else [])
        if chosen:
            assert prediction["score"] == min(item["score"] for item in row["predictions"])


def test_cvat_has_tags_and_all_labels(written):
    rows, _, root = written
    images = root.findall("image")
    assert [image.get("name") for image in images] == [row["image"] for row in rows]
    labels = {name.text for name in root.iterfind("meta//label/name")}
    for row, image in zip(rows, images, strict=True):
        tags = [tag.get("label") for tag in image.iterfind("tag")]
        assert tags == [item["name"] for item in row["predictions"]]
        assert set(tags) <= labels


def test_cvat_leaves_out_names_that_xml_cannot_represent(cli, best, tmp_path):
    names = ["a\tb\n.png", "bell\a.png", "last\uffff.png", "\U0001f436.png"]
    for name in names:
        picture(64, 64, seed=0).save(tmp_path / name)
    file = tmp_path / "tags.xml"
    outcome = cli("predict", best, *[tmp_path / name for name in names], *SHARED, "--cvat", file)
    assert outcome.status == 0
    first, second = outcome.err.splitlines()
    assert "bell?.png" in first
    assert "last?.png" in second
    images = ElementTree.parse(file).getroot().findall("image")
    assert [Path(image.get("name")).name for image in images] == [names[0], names[3]]


@pytest.mark.parametrize("option", ["--label-studio", "--cvat"])
def test_prelabels_need_predicted_classes(cli, best, photos, option):
    words = ["predict", best, photos, "--plugin", "patches", option, "-"]
    assert option in cli.fault(*words)
    assert option in cli.fault(*words, "--threshold", "0.5", "--content", "scores")
