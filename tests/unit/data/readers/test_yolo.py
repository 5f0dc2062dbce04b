"""YOLO folders: locations of images and label files, and formats of both files."""

import pytest
import yaml
from readers import Reader, by_name, names, targets, write_picture
from trees import YOLO_YAML, tree, write_texts

from mldec.data.readers import yolo

# Targets of the images of the tree.
TRAIN = {"a.jpg": [1, 1, 0], "b.PNG": [0, 0, 0], "d.rf.0f.jpg": [0, 0, 1], "e.jpg": [0, 0, 0]}
VAL = {"f.jpg": [1, 0, 0]}


@pytest.fixture
def build(tmp_path):
    """Return a function that reads the tree with changed keys of data.yaml (None deletes one)."""
    reader = tree("yolo", tmp_path)

    def build(changes=(), **arguments):
        content = {**yaml.safe_load(YOLO_YAML), **dict(changes)}
        kept = {key: value for key, value in content.items() if value is not None}
        (reader.root / "data.yaml").write_text(yaml.safe_dump(kept))
        return reader(**arguments)

    build.root = reader.root
    build.fault = reader.fault
    return build


def test_roboflow_export(build):
    data = build()
    assert data.train.classes.names == ("dog", "cat", "7")
    assert not data.train.classes.exclusive
    assert list(by_name(data.train).items()) == list(TRAIN.items())
    assert by_name(data.val) == VAL
    # Paths are relative to the root, so that an image keeps its fold.
    assert data.train.dataset.storage.keys.tolist()[0] == b"train/images/a.jpg"

    assert by_name(build(val="test").val) == {"g.jpg": [0, 0, 1], "h.jpg": [1, 1, 0]}


@pytest.mark.parametrize(
    "changes",
    [
        {"names": {0: "dog", 1: "cat", 2: 7}},
        {"train": "train", "val": ["valid"]},
        {"train": "..\\train\\images", "val": "./valid/images/"},
        {"path": "../data", "train": "train/images", "val": "../valid/images"},
        {"path": "/content/datasets/of-another-machine"},
        {"train": ["train/images/c", "train/more"], "val": "valid/images"},
        {"train": "lists/train.txt"},
        {"path": "{root}/train", "train": "images", "val": "../valid/images"},
    ],
    ids=lambda changes: ", ".join(map(str, changes.values()))[:60],
)
def test_paths_have_several_forms(build, changes):
    lines = ["../train/images/a.jpg", "./../train/images/b.PNG", f"{build.root}/train/images/e.jpg"]
    lines += ["", "..\\train\\images\\c\\d.rf.0f.jpg"]
    write_texts(build.root, {"lists/train.txt": "\r\n".join(lines)})
    if "path" in changes:
        changes = {**changes, "path": changes["path"].replace("{root}", str(build.root))}
    if changes.get("train") == ["train/images/c", "train/more"]:
        # Labels are in the folder of the images if it is not called images.
        (build.root / "train" / "more").mkdir()
        for name in ("images/a.jpg", "images/b.PNG", "images/e.jpg", "labels/a.txt"):
            path = build.root / "train" / name
            path.rename(build.root / "train" / "more" / path.name)

    data = build(changes)
    assert by_name(data.train) == TRAIN
    assert by_name(data.val) == VAL
    assert data.train.classes.names == ("dog", "cat", "7")


@pytest.mark.parametrize("form", ["[yes, 1.10, 007]", "{0: yes, 1: 1.10, 2: 007}"])
def test_names_are_as_written(build, form):
    text = YOLO_YAML.replace("[dog, cat, 7]", form).replace("../test/images", "null")
    (build.root / "own.yaml").write_text(text)
    assert build(file="own.yaml").train.classes.names == ("yes", "1.10", "007")


def test_images_of_list_keep_its_order(build):
    write_texts(build.root, {"train.txt": "train/images/e.jpg\ntrain/images/a.jpg\n"})
    assert names(build({"train": "train.txt"}).train) == ["e.jpg", "a.jpg"]
    write_texts(build.root, {"train.txt": "train/images/z.jpg\ntrain/images/a.jpg\n"})
    assert str(build.root / "train" / "images" / "z.jpg") in build.fault()


def test_last_images_folder_is_replaced_by_labels(build, tmp_path):
    place = tmp_path / "images" / "cells" / "images"
    write_picture(place / "x.jpg")
    write_texts(tmp_path, {"images/cells/labels/x.txt": "2 0 0 1 1"})
    content = yaml.safe_load(YOLO_YAML) | {"path": "../images", "train": "cells/images"}
    (build.root / "own.yml").write_text(yaml.safe_dump(content))
    data = build(file="own.yml")
    assert by_name(data.train) == {"x.jpg": [0, 0, 1]}
    assert data.train.dataset.name(0) == str(place / "x.jpg")
    assert by_name(data.val) == VAL


def test_only_yaml_file_is_read(build):
    expected = by_name(build().train)
    (build.root / "data.yaml").rename(build.root / "dataset.yaml")
    assert by_name(Reader(yolo, build.root)().train) == expected
    (build.root / "other.yaml").write_text("train: images\n")
    assert "dataset.yaml, other.yaml" in Reader(yolo, build.root).fault()


def test_yaml_file_of_another_case_is_read(build):
    expected = by_name(build().train)
    (build.root / "data.yaml").rename(build.root / "ds.YAML")
    (build.root / "._ds.yaml").write_bytes(b"junk")
    assert by_name(Reader(yolo, build.root)().train) == expected
    (build.root / "ds.YAML").unlink()
    assert "classes.txt" in Reader(yolo, build.root).fault()


def test_names_of_label_files_may_differ_in_case_and_unicode_form(build, caplog):
    folder = build.root / "train" / "labels"
    (folder / "a.txt").rename(folder / "A.TXT")
    image = build.root / "train" / "images" / "e.jpg"
    image.rename(image.with_name("\u00fc.jpg"))
    write_texts(folder, {"u\u0308.txt": "2 0 0 1 1\n", "z.txt": "1 0 0 1 1\n"})
    write_texts(folder, {"classes.txt": "dog\n"})
    labels = by_name(build().train)
    assert labels["a.jpg"] == TRAIN["a.jpg"]
    assert labels["\u00fc.jpg"] == [0, 0, 1]
    assert "1 label files have no image, such as" in caplog.text
    assert "labels/z.txt" in caplog.text
    # The label file of another image is not used.
    write_picture(image.with_name("b.png"))
    write_texts(folder, {"b.txt": "0 0 0 1 1\n"})
    write_picture(image.with_name("B.jpg"))
    image.with_name("b.PNG").unlink()
    labels = by_name(build().train)
    assert (labels["b.png"], labels["B.jpg"]) == ([1, 0, 0], [0, 0, 0])


@pytest.mark.parametrize("layout", ["", "images/"])
def test_names_in_a_text_file(tmp_path, layout):
    for number in range(4):
        write_picture(tmp_path / layout / f"{number}.jpg")
        name = f"{layout.replace('images', 'labels')}{number}.txt"
        write_texts(tmp_path, {name: f"{number % 2} 0 0 1 1\n", "classes.txt": "dog\ncat\n"})
    data = Reader(yolo, tmp_path)(val_fraction=0.5)
    assert data.train.classes.names == ("dog", "cat")
    rows = by_name(data.train) | by_name(data.val)
    assert rows == {f"{number}.jpg": [1 - number % 2, number % 2] for number in range(4)}


def test_empty_line_between_names_is_an_error(tmp_path):
    """Without the line, the next names would have the indices of other classes."""
    write_picture(tmp_path / "1.jpg")
    write_texts(tmp_path, {"1.txt": "1 0 0 1 1\n", "own.names": "dog\n\ncat\n\n"})
    assert "own.names" in Reader(yolo, tmp_path).fault(file="own.names")
    (tmp_path / "own.names").write_text("dog\ncat\n\n")
    assert by_name(Reader(yolo, tmp_path)(file="own.names", val_fraction=0).train) == {
        "1.jpg": [0, 1]
    }


def test_single_split_is_divided(build):
    data = build({"val": None, "valid": None, "test": None}, val_fraction=0.25)
    assert by_name(data.train) | by_name(data.val) == TRAIN
    assert len(data.val.dataset) == 1


@pytest.mark.parametrize("prefix", ["", "data/"])
def test_darknet_layout(tmp_path, prefix):
    for number in range(4):
        write_picture(tmp_path / "obj_train_data" / f"{number}.jpg")
        write_texts(tmp_path, {f"obj_train_data/{number}.txt": f"{number % 2} 0 0 1 1\n"})
    lines = [f"{prefix}obj_train_data/{number}.jpg" for number in range(4)]
    write_texts(tmp_path, {"obj.names": "dog\ncat\n", "train.txt": "\n".join(lines[:3])})
    write_texts(tmp_path, {"valid.txt": lines[3]})
    data = Reader(yolo, tmp_path)()
    assert data.train.classes.names == ("dog", "cat")
    assert by_name(data.train) == {"0.jpg": [1, 0], "1.jpg": [0, 1], "2.jpg": [1, 0]}
    assert by_name(data.val) == {"3.jpg": [0, 1]}


@pytest.mark.parametrize(
    ("images", "labels"),
    [("Images", "Labels"), ("IMAGES", "labels"), ("VOC2007/JPEGImages", "VOC2007/labels")],
)
def test_names_of_folders_may_differ_in_case(tmp_path, images, labels):
    # An outer folder without a folder of labels does not count.
    root = tmp_path / "images" / "own"
    for number in range(2):
        write_picture(root / images / "a" / f"{number}.jpg")
        write_texts(root, {f"{labels}/a/{number}.txt": f"{number} 0 0 1 1\n"})
    write_texts(root, {"data.yaml": f"names: [dog, cat]\ntrain: {images}\nval: {images}\n"})
    assert by_name(Reader(yolo, root)().train) == {"0.jpg": [1, 0], "1.jpg": [0, 1]}


@pytest.mark.parametrize(
    "prefix", ["/content/own/", "C:\\own\\", "../../own/", "\\\\server\\own\\", "data/"]
)
@pytest.mark.parametrize("layout", ["list", "lists/list", "folder"])
def test_paths_of_another_computer(tmp_path, prefix, layout):
    lines = {"train": "", "val": ""}
    for number, split in enumerate(lines):
        for name in ("a", "b"):
            write_picture(tmp_path / "images" / split / name / "1.jpg", number)
            index = "ab".index(name)
            write_texts(tmp_path, {f"labels/{split}/{name}/1.txt": f"{index} 0 0 1 1\n"})
            lines[split] += f"{prefix}images/{split}/{name}/1.jpg\n"
    entries = {split: f"{prefix}images/{split}" for split in lines}
    if layout != "folder":
        entries = {split: f"{layout}_{split}.txt" for split in lines}
        write_texts(tmp_path, {entries[split]: lines[split] for split in lines})
    elif prefix in ("../../own/", "data/"):
        return
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"names": ["dog", "cat"], **entries}))
    data = Reader(yolo, tmp_path)()
    for split, part in (("train", data.train), ("val", data.val)):
        files = [part.dataset.name(index) for index in range(2)]
        assert files == [str(tmp_path / "images" / split / name / "1.jpg") for name in "ab"]
        assert targets(part) == [[1, 0], [0, 1]]


def test_absolute_folders_are_not_merged(tmp_path):
    """If valid/images is missing, images/ must not become both splits."""
    write_picture(tmp_path / "images" / "1.jpg")
    write_texts(tmp_path, {"labels/1.txt": "0 0 0 1 1\n"})
    paths = {"train": "/content/own/train/images", "val": "/content/own/valid/images"}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"names": ["dog"], **paths}))
    assert "/content/own/train/images does not exist" in Reader(yolo, tmp_path).fault()


def test_list_without_any_photo_is_named(tmp_path):
    write_texts(tmp_path, {"data.yaml": "names: [dog]\ntrain: train.txt\n"})
    write_texts(tmp_path, {"train.txt": "/content/own/1.jpg\n"})
    for name in "ab":
        write_picture(tmp_path / name / "1.jpg")
    assert "train: none of 1 listed images" in Reader(yolo, tmp_path).fault()
