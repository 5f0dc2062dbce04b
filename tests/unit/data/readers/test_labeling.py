"""Exports of labeling tools: paths, labels of several annotators, splits."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest
from readers import by_name, targets, write_picture
from trees import CVAT, choices, tree

from mldec.data.readers.labeling import studio_address, studio_paths
from mldec.data.types import Classes
from mldec.tools.predict import formats
from mldec.tools.predict.answers import Prediction, Row, Rule


@pytest.fixture
def studio(tmp_path):
    """Return a function that reads tasks: image -> annotations."""
    reader = tree("label_studio", tmp_path)

    def read(tasks, **arguments):
        content = [{"data": {"image": image}, "annotations": done} for image, done in tasks.items()]
        (reader.root / "export.json").write_text(json.dumps(content))
        data = reader(val_fraction=0.5, **arguments)
        return data.val.classes.names, by_name(data.train, data.val)

    read.tree = reader
    return read


def test_label_studio_finds_images_of_all_addresses(studio):
    data = studio.tree(val_fraction=0.5)
    assert data.train.classes.names == ("cat", "dog")
    # The cancelled annotation of e.jpg is left out.
    expected = {"a.jpg": [1, 1], "b c.jpg": [0, 0], "d.jpg": [1, 0], "f.jpg": [0, 1]}
    assert by_name(data.train, data.val) == expected


def test_upload_loses_only_its_first_prefix(studio):
    own = "0a0b0c0d-IMG-20240101-WA0001.jpg"
    for name in (own, "IMG-WA0001.jpg", "IMG-20240101-WA0001.jpg", "x.jpg"):
        write_picture(studio.tree.root / name)
    tasks = {f"/data/upload/1/1a2b3c4d-{own}": [choices("cat")], "d.jpg": [choices("dog")]}
    assert studio(tasks)[1] == {own: [1, 0], "d.jpg": [0, 1]}
    tasks = {"/data/upload/0a0b0c0d-IMG-20240101-WA0001.jpg": [choices("cat")]}
    (studio.tree.root / own).unlink()
    assert "IMG-20240101-WA0001.jpg" in studio({**tasks, "d.jpg": [choices("dog")]})[1]

    # Without an upload, the digits are a part of the name, and another photo has no such labels.
    tasks = {"/data/local-files/?d=20240101-x.jpg": [choices("cat")], "d.jpg": [choices("dog")]}
    (studio.tree.root / "export.json").write_text(
        json.dumps([{"data": {"image": name}, "annotations": done} for name, done in tasks.items()])
    )
    assert "20240101-x.jpg" in studio.tree.fault(val_fraction=0.5)


ODD_NAMES = ["a+b.jpg", "R&D.jpg", "no#1.jpg", "100%.jpg", "a%2Bb.jpg", "what?.jpg", "ä b;c.jpg"]


@pytest.mark.parametrize("prefix", ["/data/local-files/?d=", "https://host/photos/", ""])
def test_odd_names_survive_label_studio(studio, prefix):
    rule = Rule(classes=Classes(("cat", "dog")), image_prefix=prefix)
    lines = []
    for number, name in enumerate(ODD_NAMES):
        write_picture(studio.tree.root / name)
        label = ("cat", "dog")[number % 2]
        prediction = Prediction(number % 2, label, 0.9)
        lines.append(formats.line_of(rule, Row(name, [prediction])))
    tasks = json.loads("".join(formats.label_studio(rule, lines)))
    paths = [studio_paths(task["data"]["image"])[0] for task in tasks]
    assert [path.rpartition("/")[2] for path in paths] == ODD_NAMES

    accepted = {task["data"]["image"]: [choices("cat")] for task in tasks[::2]}
    accepted |= {task["data"]["image"]: [choices("dog")] for task in tasks[1::2]}
    _, labels = studio(accepted)
    expected = {
        name: [1, 0] if number % 2 == 0 else [0, 1] for number, name in enumerate(ODD_NAMES)
    }
    assert labels == expected


def test_local_file_is_quoted_as_label_studio_decodes_it():
    # urllib's own rule for queries is that of Django, which serves local files.
    address = studio_address("/data/local-files/?d=", "a+b/R&D #1 100%.jpg")
    assert parse_qs(urlsplit(address).query) == {"d": ["a+b/R&D #1 100%.jpg"]}
    assert studio_paths(f"http://localhost:8080{address}")[0] == "a+b/R&D #1 100%.jpg"
    # Addresses that were written without quotes are found, too.
    assert "a+b.jpg" in studio_paths("/data/local-files/?d=a+b.jpg")
    assert studio_address("s3://bucket/", "100%.jpg") == "s3://bucket/100%.jpg"


def test_annotators_of_label_studio_vote(studio):
    votes = [choices("cat", "dog"), choices("cat"), choices("cat", "eel"), choices("cat")]
    tasks = {"a.jpg": votes, "d.jpg": [choices("dog"), choices("eel", ground_truth=True)]}
    tasks["f.jpg"] = [choices("cat"), choices("dog")]
    _, labels = studio(tasks, classes=["cat", "dog", "eel"])
    assert labels == {"a.jpg": [1, 0, 0], "d.jpg": [0, 0, 1], "f.jpg": [1, 1, 0]}
    _, labels = studio(tasks, classes=["cat", "dog", "eel"], disagreement="unknown")
    assert labels == {"a.jpg": [1, -1, -1], "d.jpg": [0, 0, 1], "f.jpg": [-1, -1, 0]}


@pytest.mark.parametrize(
    ("levels", "classes"),
    [
        ("leaves", ("dog", "oak")),
        ("paths", ("animal/dog", "tree/oak")),
        ("all", ("animal", "dog", "oak", "tree")),
    ],
)
def test_levels_of_taxonomy(studio, levels, classes):
    both = choices(["animal", "dog"], ["tree", "oak"], kind="taxonomy")
    tasks = {"a.jpg": [both], "d.jpg": [both]}
    assert studio(tasks, levels=levels)[0] == classes


def test_control_selects_results_and_regions_are_ignored(studio, caplog):
    annotation = choices("dog")
    annotation["result"] += choices("blurred")["result"] + choices("paw")["result"]
    annotation["result"][1]["from_name"] = "quality"
    annotation["result"][2]["value"]["x"] = 3
    tasks = {"a.jpg": [annotation], "d.jpg": [annotation]}
    assert studio(tasks)[0] == ("blurred", "dog")
    assert studio(tasks, control="choice")[0] == ("dog",)
    assert "1 choices" in caplog.text or "2 choices" in caplog.text


def test_cvat_has_splits_and_classes_of_file(tmp_path, caplog):
    reader = tree("cvat", tmp_path)
    (reader.root / "images" / "val" / "d.jpg").rename(reader.root / "images" / "val" / "D.jpg")
    (reader.root / "annotations.xml").write_text(CVAT.replace("d.jpg", "D.jpg"))
    data = reader()
    assert data.train.classes.names == ("dog", "cat")
    assert by_name(data.train) == {"a.jpg": [1, 1], "c.jpg": [1, 0]}
    assert by_name(data.val) == {"D.jpg": [0, 1]}
    assert "1 box" in caplog.text
    assert by_name(reader(untagged="negative").train)["b.jpg"] == [0, 0]


def test_fiftyone_reads_both_forms(tmp_path):
    reader = tree("fiftyone", tmp_path)
    data = reader()
    assert data.train.classes.names == ("dog", "cat")
    assert by_name(data.train) == {"a.jpg": [1, 1], "b.jpg": [0, 1]}
    assert by_name(data.val) == {"d.jpg": [1, 0]}
    assert by_name(reader(untagged="negative").train)["c.jpg"] == [0, 0]

    # One export without splits, with indices of classes.
    train = reader.root / "train"
    content = {"classes": ["dog", "cat"], "labels": {"a": 1, "c": [0, 1], "more/b": 0}}
    (train / "labels.json").write_text(json.dumps(content))
    flat = reader(root=str(train), val_fraction=0.5)
    expected = {"a.jpg": [0, 1], "b.jpg": [1, 0], "c.jpg": [1, 1]}
    assert by_name(flat.train, flat.val) == expected


def test_cvat_images_of_subsets_may_have_the_same_name(tmp_path):
    reader = tree("cvat", tmp_path)
    export = """<annotations><meta><project><tasks>
    <task><id>4</id><name>day one</name></task><task><id>5</id><name>day two</name></task>
    </tasks></project></meta>
    <image id="0" name="frame_0" subset="Train" task_id="4"><tag label="dog"/></image>
    <image id="1" name="frame_0" subset="Val" task_id="5"><tag label="cat"/></image>
    {}</annotations>"""
    for name in ("images/Train/frame_0.png", "images/Val/frame_0.png", "images/frame_0.png"):
        write_picture(reader.root / name)
    (reader.root / "annotations.xml").write_text(export.format(""))
    data = reader(classes=["dog", "cat"])
    for split, folder in ((data.train, "Train"), (data.val, "Val")):
        assert split.dataset.name(0) == f"{reader.root}/images/{folder}/frame_0.png"
    assert (targets(data.train), targets(data.val)) == ([[1, 0]], [[0, 1]])

    # Tasks of the same subset are divided by folders with their names.
    same = '<image id="2" name="frame_0" subset="Train" task_id="6"><tag label="cat"/></image>'
    export = export.replace("</tasks>", "<task><id>6</id><name>day three</name></task></tasks>")
    (reader.root / "annotations.xml").write_text(export.format(same))
    message = reader.fault(classes=["dog", "cat"])
    assert "image 2 of task day three" in message
    assert "image 0 of task day one" in message
    write_picture(reader.root / "images" / "day three" / "frame_0.png")
    assert targets(reader(classes=["dog", "cat"]).train) == [[1, 0], [0, 1]]


def test_stem_finds_its_only_photo(tmp_path):
    reader = tree("fiftyone", tmp_path)
    data = reader.root / "train" / "data"
    (data / "a.jpg").rename(data / "a.PNG")
    (data / ".a.jpg").touch()
    (data / "a.txt").touch()
    assert by_name(reader().train) == {"a.PNG": [1, 1], "b.jpg": [0, 1]}
    write_picture(data / "a.webp")
    message = reader.fault()
    for part in ("label a", "a.PNG", "a.webp"):
        assert part in message
