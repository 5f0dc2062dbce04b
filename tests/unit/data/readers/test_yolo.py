"""YOLO folders: where the images and their label files are, and the forms of the two files."""

import logging

import pytest
import yaml
from readers import names, targets, write_picture
from trees import YOLO_YAML, tree, write_texts

# The images of training in the tree, by path: boxes and a polygon; an empty label file; one class
# number alone; no label file.
TRAIN = {"a.jpg": [1, 1, 0], "b.PNG": [0, 0, 0], "d.rf.0f.jpg": [0, 0, 1], "e.jpg": [0, 0, 0]}
VAL = {"f.jpg": [1, 0, 0]}


@pytest.fixture
def build(tmp_path):
    """Read the tree with some keys of data.yaml changed; None takes a key out."""
    reader = tree("yolo", tmp_path)

    def build(changes=(), **arguments):
        content = {**yaml.safe_load(YOLO_YAML), **dict(changes)}
        kept = {key: value for key, value in content.items() if value is not None}
        (reader.root / "data.yaml").write_text(yaml.safe_dump(kept))
        return reader(**arguments)

    build.root = reader.root
    build.fault = reader.fault
    return build


def found(split):
    """The target of each image, in the order of the data set."""
    return dict(zip(names(split), targets(split), strict=True))


def test_files_of_unsupported_formats_are_counted(build, caplog):
    (build.root / "train" / "images" / "c" / "x.HEIC").touch()
    build()
    assert "1 .heic (such as" in caplog.text

    (build.root / "valid" / "images" / "f.jpg").rename(build.root / "valid" / "images" / "f.heic")
    assert "f.heic" in build.fault()


def test_an_export_of_roboflow(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build()
    assert data.train.classes.names == ("dog", "cat", "7")
    assert not data.train.classes.exclusive
    assert list(found(data.train).items()) == list(TRAIN.items())
    assert found(data.val) == VAL
    assert "yolo train: 1 images have no label file" in caplog.messages
    assert "yolo val: 2 of 3 classes have no image: 'cat', '7'" in caplog.messages
    # Paths begin at the root: an image stays in its fold when other images are added.
    files = data.train.dataset.storage.keys.tolist()
    assert files[0] == b"train/images/a.jpg"

    assert found(build(val="test").val) == {"g.jpg": [0, 0, 1], "h.jpg": [1, 1, 0]}


@pytest.mark.parametrize(
    "changes",
    [
        {"names": {0: "dog", 1: "cat", 2: 7}},
        {"train": "train/images", "val": "./valid/images/"},
        {"train": "train", "val": ["valid"]},
        {"train": "..\\train\\images", "val": "valid\\images"},
        {"path": "."},
        {"path": "../data", "train": "train/images", "val": "../valid/images"},
        {"path": "/content/datasets/of-another-machine"},
        {"train": ["train/images/c", "train/more"], "val": "valid/images"},
        {"train": "lists/train.txt"},
        {"train": "{root}/train/images", "val": "valid/images"},
        {"path": "{root}/train", "train": "images", "val": "../valid/images"},
    ],
    ids=lambda changes: ", ".join(map(str, changes.values()))[:60],
)
def test_paths_as_they_occur(build, changes):
    lines = ["../train/images/a.jpg", "./../train/images/b.PNG", f"{build.root}/train/images/e.jpg"]
    lines += ["", "..\\train\\images\\c\\d.rf.0f.jpg"]
    write_texts(build.root, {"lists/train.txt": "\r\n".join(lines)})
    root = str(build.root)
    changes = {
        key: value.replace("{root}", root) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    if changes.get("train") == ["train/images/c", "train/more"]:
        # One folder more, whose labels lie beside the images as no folder is called images.
        for name in ("a.jpg", "b.PNG", "e.jpg"):
            target = build.root / "train" / "more" / name
            target.parent.mkdir(exist_ok=True)
            (build.root / "train" / "images" / name).rename(target)
        for name in ("a.txt", "b.txt"):
            (build.root / "train" / "labels" / name).rename(build.root / "train" / "more" / name)

    data = build(changes)
    assert found(data.train) == TRAIN
    assert found(data.val) == VAL
    assert data.train.classes.names == ("dog", "cat", "7")


def test_images_of_a_list_keep_its_order_and_absent_ones_are_named(build):
    write_texts(build.root, {"train.txt": "train/images/e.jpg\ntrain/images/a.jpg\n"})
    assert names(build({"train": "train.txt"}).train) == ["e.jpg", "a.jpg"]
    write_texts(build.root, {"train.txt": "train/images/z.jpg\ntrain/images/a.jpg\n"})
    fault = build.fault()
    path = build.root / "train" / "images" / "z.jpg"
    assert f"data.yaml: 1 of 2 listed images are absent, the first is {path}; restore" in fault


def test_only_the_last_folder_images_is_one_of_labels(build, tmp_path):
    """And data may lie beside the folder of data.yaml, whose name is a setting."""
    place = tmp_path / "images" / "cells" / "images"
    write_picture(place / "x.jpg")
    write_texts(tmp_path, {"images/cells/labels/x.txt": "2 0 0 1 1"})
    content = yaml.safe_load(YOLO_YAML) | {"path": "../images", "train": "cells/images"}
    (build.root / "own.yml").write_text(yaml.safe_dump(content))
    data = build(file="own.yml")
    assert found(data.train) == {"x.jpg": [0, 0, 1]}
    assert data.train.dataset.name(0) == str(place / "x.jpg")
    assert found(data.val) == VAL


def test_a_corrected_label_file_is_read_again(build):
    build()
    (build.root / "train" / "labels" / "a.txt").write_text("2 0.5 0.5 1 1\n")
    assert found(build().train)["a.jpg"] == [0, 0, 1]
