"""Errors of all readers: the message names the file and the fault."""

import json
import pickle
from pathlib import Path

import pytest
import yaml
from hostile import Runs
from trees import (
    CVAT,
    STATEMENTS,
    TASKS,
    TREES,
    YOLO_YAML,
    choices,
    coco_content,
    nuswide_csv,
    tree,
    voc_xml,
    write_annotations,
)

from mldec.config.compose import config_dir
from mldec.data import readers
from mldec.errors import ConfigError

TWINS = [{"id": 7, "name": "person"}, {"id": 1, "name": "person"}]
COCO_IDS = {8: [7, 90], 6: [1]}
CSV = "path,labels,split\n"
NUSWIDE = "path,label,split\n"
MIIL = "image_id,class_list,class_list_neg,split\n"
XML_ENTITY = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><annotation>&b;</annotation>'


def cars(label, name="00002.jpg"):
    return lambda path: write_annotations(path, [("00001.jpg", 1), (name, label)])


def yolo(**changes):
    return yaml.safe_dump({**yaml.safe_load(YOLO_YAML), **changes})


def coco(**changes):
    """Return a COCO file in which some entries are changed, by list and number from 1."""
    content = coco_content("val2014", COCO_IDS)
    for place, change in changes.items():
        key, _, number = place.rpartition("_")
        entry = content[key][int(number) - 1]
        content[key][int(number) - 1] = {**entry, **change} if change else {"id": 5}
    return content


def task(image="a.jpg", *annotations):
    return [*TASKS[:1], {"data": {"image": image}, "annotations": [*annotations, choices("dog")]}]


def with_values(kind, values):
    annotation = choices("dog", kind=kind)
    annotation["result"][0]["value"][kind] = values
    return annotation


# For each reader and file: contents (None deletes the file) with a name that the message contains.
FAULTS = {
    ("cars", "devkit/cars_train_annos.mat"): [(cars(4), "annotation 2"), (cars(1, "../x"), "../x")],
    ("cars", "devkit/cars_meta.mat"): [("<html>not found</html>", "cars_meta.mat")],
    ("cifar100", "cifar-100-python/test"): [(pickle.dumps({"data": [1]}), "python/test")],
    ("cifar100", "cifar-100-python/meta"): [(pickle.dumps({}), "python/meta")],
    ("coco", "annotations/instances_train2014.json"): [
        (None, "instances_train2014.json"),
        (coco_content("train2014", {4: [1, 2]}), "instances_train2014.json"),
        (coco_content("", {}, TWINS), "person"),
    ],
    ("coco", "annotations/instances_val2014.json"): [
        ([], "val2014.json cannot be used (it is []"),
        ({"images": [], "categories": []}, "annotations is missing"),
        (coco(images_1={"id": 6}), "the id 6 is listed twice, with COCO_val2014_000000000008.jpg"),
        (coco(categories_2={"id": 7}), "the id 7 is listed twice, with train and person"),
        (
            coco(images_1={"file_name": "COCO_val2014_000000000006.jpg"}),
            "is listed twice, with the id 6 and the id 8",
        ),
        (coco(images_2={"file_name": None}), "images, entry 2"),
        (coco(annotations_2=None), "annotation 2 cannot be used (image_id is missing)"),
        (coco(annotations_3={"image_id": 99}), "annotation 3 cannot be used (image_id is 99"),
        (coco(annotations_1={"category_id": "2"}), "annotation 1 cannot be used (category_id is 2"),
        (coco(annotations_1={"category_id": True}), "annotation 1"),
        ('{"images": [], "images": []}', "'images' is listed twice"),
    ],
    ("csv_table", "data.csv"): [
        (CSV + "../1.png,dog,train\n", "../1.png"),
        (CSV + "a/1.png,dog,train\nb/4.png,Dog,val\n", "Dog"),
        ("path,labels,negatives\na/1.png,dog,cat;dog\n", "'dog'"),
    ],
    ("cub", "attributes.txt"): [(None, "attributes.txt"), ("1 small\n2 small\n", "'small'")],
    ("cub", "CUB_200_2011/images.txt"): [
        ("1 ../1.jpg\n2 b.jpg\n3 c.jpg\n4 d.jpg\n", "../1.jpg"),
        ("1 a.jpg\n", "image_attribute_labels.txt"),
    ],
    ("cub", "CUB_200_2011/train_test_split.txt"): [
        ("1 1\n2 0\n3 1\n", "train_test_split.txt cannot be used ('4' is missing)"),
        ("1 1\n2\n", "train_test_split.txt"),
        ("1 1\n2 0\n2 1\n", "the key '2' is listed twice"),
    ],
    ("cub", "CUB_200_2011/attributes/image_attribute_labels.txt"): [
        ("1 1 1 3 27.7\n", "1 lines, but 12 pairs"),
        ("1 1\n", "image_attribute_labels.txt"),
        ("1 4 1 3 2.5\n" * 12, "image 1: the class 3"),
    ],
    ("cvat", "annotations.xml"): [
        (None, "annotations.xml"),
        (XML_ENTITY, "annotations.xml"),
        ("<annotations><track/></annotations>", "CVAT for images"),
        (CVAT.replace('label="dog"', 'label="Dog"'), "image 0"),
        (CVAT.replace('"a.jpg"', '"../a.jpg"'), "../a.jpg"),
        (CVAT.replace("Val", "Validation"), "data.val=validation"),
        (CVAT.replace("Val", "Test"), "data.val=test"),
        (CVAT.replace(' name="more/b.jpg"', ""), "image 1"),
        (
            CVAT.replace('"c.jpg"', '"a.jpg"'),
            "image 2: images/a.jpg is listed twice, first in image 0",
        ),
    ],
    ("fiftyone", "train/labels.json"): [
        ([], "labels.json"),
        ({"classes": ["dog"], "labels": {"a": 3}}, "labels.json"),
        ({"classes": ["dog"], "labels": {"a": "eel"}}, "label a"),
        ({"classes": ["dog", "cat"], "labels": {"more/b": [0, -1]}}, "label more/b cannot"),
        ({"classes": ["dog", "cat"], "labels": {"a": True}}, "label a"),
        ({"classes": "dog", "labels": {"a": 0}}, "classes is 'dog'"),
        ({"classes": ["dog", "dog"], "labels": {"a": 0}}, "'dog'"),
        ('{"classes": ["dog"], "labels": {"a": "dog", "a": null}}', "'a' is listed twice"),
        ({"classes": ["dog"], "labels": {"x" * 300: "dog"}}, "xxx: the path"),
    ],
    ("label_studio", "export.json"): [
        ({"tasks": []}, "list of tasks"),
        ([{"image": "a.jpg", "choice": "dog"}], "task 1"),
        (TASKS[:1] + [{"data": {"img": "a.jpg"}, "annotations": []}], "data.image_key"),
        (TASKS[3:4], "is labeled"),
        (TASKS[:1] * 2, "task 2"),
        ([{"data": {"image": "a.jpg"}, "annotations": [choices(" ")]}], "task 1"),
        (task("d.jpg", with_values("choices", "abc")), "task 2 cannot be used (choices is 'abc'"),
        (task("d.jpg", with_values("taxonomy", ["abc"])), "task 2"),
        (task("data:image/png;base64," + "A" * 5000), "task 2: the image is embedded"),
        (task("A" * 5000), "task 2: the path"),
        (task("b/" * 3000), "task 2: the path"),
        (task("\ud800.jpg"), "task 2: the path"),
        (task("/data/local-files/?d=%ED%A0%80.jpg"), "are absent"),
    ],
    ("folders", "train/Dog/1.png"): [(b"", "dog")],
    ("folders", "train/fox/inner/1.png"): [(b"", "fox")],
    ("folders", "val/fox/1.png"): [(b"", "fox")],
    ("imagenet", "val/n99999999/1.JPEG"): [(b"", "n99999999")],
    ("nuswide_zsl", "data.csv"): [
        (NUSWIDE + "a.jpg,[sky, dog],train\n", "row 2"),
    ],
    ("nuswide_zsl", "benchmark_81_v0.json"): [({"test class": ["cat", "whale"]}, "whale")],
    ("nuswide81", "nus_wid_data.csv"): [(nuswide_csv([("a.jpg", "[sky]", "train")]), "val")],
    ("nuswide_official", "ImageList/TestImagelist.txt"): [("..\\a.jpg\nb.jpg\n", "line 1")],
    ("nuswide_official", "NUS_WID_Tags/Test_Tags1k.dat"): [("1 0\n1 0 1\n", "Test_Tags1k.dat")],
    ("openimages", "annotations/test-annotations-human-imagelabels.csv"): [
        (STATEMENTS + "a,x,/m/0a,1\nb,x,/m/0a,0.7\n", "row 3"),
        ("ImageID,LabelName,Confidence\n", "Source"),
    ],
    ("openimages_miil", "data.csv"): [
        (MIIL + "b,\"['x' 'y']\",[],val\n", "row 2"),
        (MIIL + "a,[],[],val\na,[],[],val\n", "image a "),
    ],
    ("vg500", "vg_category_500_labels_index.json"): [({"4.jpg": [500]}, "500"), ({}, "4.jpg")],
    ("voc", "Annotations/000005.xml"): [
        (None, "000005.xml"),
        (voc_xml([("Dog", 0)]), "Dog"),
        (XML_ENTITY, "000005.xml"),
    ],
    ("voc", "ImageSets/Main/trainval.txt"): [("000007\n../5\n", "line 2"), ("", "trainval.txt")],
    ("yolo", "data.yaml"): [
        ("!!python/object/apply:os.getcwd []", "data.yaml"),
        (yolo(names={1: "dog"}), "names"),
        (yolo(names=["dog"] * 2), "dog"),
        (yolo(val=None, valid="x"), "data.val=valid"),
        (yolo(path="/no", val="x"), "/no/x"),
        (yolo(val=None), "data.val=test"),
        ("- train\n", "data.yaml cannot be used (it is ['train']"),
        ("names: {0: a, 1: b, 0: c}\n", "the key '0' is listed twice"),
    ],
    ("yolo", "valid/labels/f.txt"): [(None, "f.txt")],
    ("yolo", "train/labels/e.jpg.txt"): [("0 1 1", "e.jpg.txt: no image has this label file")],
    ("yolo", "train/images/a.png"): [(b"", "images/a.png have the same label file")],
    ("yolo", "train/images/a.webp"): [(b"", "images/a.jpg and ")],
    ("yolo", "train/labels/a.txt"): [("0 1 1\n3 0 0 1 1", "line 2"), ("0.5 0.5 1 1 2", "0.5")],
}
CASES = [(*place, *case) for place, cases in FAULTS.items() for case in cases]


@pytest.mark.parametrize(("reader", "file", "content", "name"), CASES)
def test_reader_names_faulty_file(tmp_path, reader, file, content, name):
    build = tree(reader, tmp_path)
    path = build.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.unlink()
    elif callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    # The labels of VG-500 are written for the images of its validation list.
    message = build.fault(**{"train": "test_list_500.txt"} if reader == "vg500" else {})
    assert name in message
    assert len(message) < 1000
    assert str(build.root) in message


@pytest.mark.parametrize("reader", TREES)
def test_reader_needs_folder_and_images(tmp_path, reader):
    build = tree(reader, tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        assert f"data.root: {tmp_path / name}" in build.fault(root=str(tmp_path / name))

    # CIFAR-100 has no image files, and other readers list the existing files.
    if reader not in ("cifar100", "nuswide_official", "folders", "imagenet", "yolo"):
        for path in [*build.root.rglob("*.jpg"), *build.root.rglob("*.png")]:
            path.rename(path.with_suffix(".gone"))
        assert "are absent" in build.fault()


# Settings whose error names another file or key than the setting.
DATA_ERRORS = [
    ("csv_table", {"val": "x"}, "data.val=val"),
    ("csv_table", {"classes": ["Cat", "dog", "eel"]}, "'cat'"),
    ("folders", {"val": "test"}, "data.val=val"),
    ("folders", {"train": "bare", "classes": ["cat", "dog", "eel"]}, "bare"),
    ("cars", {"val": "val"}, "'val'"),
    ("coco", {"vectors": "nowhere.txt"}, "nowhere.txt"),
    ("openimages_miil", {"class_list": "nowhere.txt"}, "nowhere.txt"),
]
CONFIG_ERRORS = [
    ("coco", {"drop_labels": 1.0}),
    ("coco", {"keep_per_class": 0}),
    ("coco", {"drop_labels": 0.5, "keep_per_class": 5}),
    ("coco", {"single_positive": 0, "observed": 1}),
    ("csv_table", {"split": "random"}),
    ("csv_table", {"path_column": "photo"}),
    ("csv_table", {"encoding": "latin-99"}),
    ("folders", {"val_fraction": 1.0}),
    ("nuswide_zsl", {"val_images": "some"}),
    ("openimages", {"val": "val"}),
    ("openimages_miil", {"names": "both"}),
    ("vg500", {"num_classes": 2, "classes": "names.txt"}),
    ("voc", {"difficult_val": "maybe"}),
]
CONFIG_ERRORS.append(("yolo", {"threshold": 1.5}))


@pytest.mark.parametrize(("reader", "arguments", "name"), DATA_ERRORS)
def test_setting_without_its_data_is_named(tmp_path, reader, arguments, name):
    build = tree(reader, tmp_path)
    (build.root / "bare").mkdir()
    assert name in build.fault(**arguments)


@pytest.mark.parametrize(("reader", "arguments"), CONFIG_ERRORS)
def test_reader_names_faulty_setting(tmp_path, reader, arguments):
    build = tree(reader, tmp_path)
    (build.root / "names.txt").write_text("a\nb\nc\n")
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        build(**arguments)


SPLITS = [
    ("coco", "annotations/instances_val2014.json", "annotations/instances_test.json"),
    ("fiftyone", "val", "test"),
    ("fiftyone", "val", "validation"),
    ("folders", "val", "test"),
]


@pytest.mark.parametrize(("reader", "old", "new"), SPLITS)
def test_other_name_of_validation_split_is_suggested(tmp_path, reader, old, new):
    build = tree(reader, tmp_path)
    (build.root / old).rename(build.root / new)
    name = Path(new).stem.removeprefix("instances_")
    assert f"data.val={name}" in build.fault()


@pytest.mark.parametrize(("reader", "folder"), [("folders", "train/cat"), ("yolo", "train/images")])
def test_unsupported_files_are_counted(tmp_path, caplog, reader, folder):
    build = tree(reader, tmp_path)
    for name in ("a.NEF", "b.nef", "._b.nef"):
        (build.root / folder / name).write_bytes(b"photo")
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        build()
        assert "2 .nef (such as" in caplog.text


def test_pickle_runs_no_code(tmp_path):
    build = tree("cifar100", tmp_path)
    hostile = pickle.dumps({"data": Runs(f"touch {tmp_path / 'done'}"), "fine_labels": [1]})
    for name in ("builtins eval", "numpy load", "numpy.core.multiarray fromfile", None):
        content = f"c{name.replace(' ', chr(10))}\n.".encode() if name else hostile
        (build.root / "cifar-100-python" / "test").write_bytes(content)
        assert "is not part of an array" in build.fault()
    assert not (tmp_path / "done").exists()


def test_option_files_name_readers_in_their_package():
    files = Path(config_dir(), "data").glob("*.yaml")
    used = {yaml.safe_load(file.read_text())["_target_"] for file in files}
    targets = {target for target in used if "readers" in target}
    assert targets == {f"mldec.data.readers.{name}" for name in readers.__all__}
    for name in readers.__all__:
        assert getattr(readers, name).__name__ == name
