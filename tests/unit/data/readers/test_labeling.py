"""Exports of labeling tools: paths, labels of several annotators, splits."""

import json

import pytest
from readers import names, targets
from trees import CVAT, choices, tree


def by_name(*splits):
    return {
        name: target
        for split in splits
        for name, target in zip(names(split), targets(split), strict=True)
    }


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
