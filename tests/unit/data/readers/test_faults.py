"""Annotation files that cannot be used: every reader names the file and the fault in one line."""

import json
import pickle
from pathlib import Path

import pytest
import yaml
from support import made
from trees import (
    STATEMENTS,
    TREES,
    YOLO_YAML,
    coco_content,
    nuswide_csv,
    tree,
    voc_xml,
    write_annotations,
)

from mldec.config.compose import config_dir
from mldec.data import readers
from mldec.errors import ConfigError

COCO = "annotations/instances_train2014.json"
VALID = coco_content("train2014", {4: [1, 90]})
TWINS = [{"id": 7, "name": "person"}, {"id": 1, "name": "person"}]
OPENIMAGES = "annotations/test-annotations-human-imagelabels.csv"
MIIL = "image_id,class_list,class_list_neg,split\n"
VOC_IMAGE, VOC_LIST = "Annotations/000005.xml", "ImageSets/Main/trainval.txt"
CIFAR = "cifar-100-python/test"
CSV = "path,labels,split\n"
NUSWIDE = "path,label,split\n"
VG, VG_LIST = "vg_category_500_labels_index.json", "test_list_500.txt"
OUTSIDE = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><annotation>&b;</annotation>'


def yolo_yaml(**changes):
    return yaml.safe_dump({**yaml.safe_load(YOLO_YAML), **changes})


def cars(label, name="00002.jpg"):
    return lambda path: write_annotations(path, [("00001.jpg", 1), (name, label)])


# Reader, file, what is written there (None: nothing), and a part of the message.
READER_FAULTS = [
    ("cars", "devkit/cars_train_annos.mat", cars(4), "annotation 2: the class 3 is not an index"),
    ("cars", "devkit/cars_train_annos.mat", cars(1, "../x"), "'../x' is not a path inside"),
    ("cars", "devkit/cars_meta.mat", "<html>not found</html>", "cars_meta.mat cannot be used ("),
    ("cifar100", CIFAR, pickle.dumps({"data": [1], "fine_labels": [1]}), "test cannot be used ("),
    ("cifar100", "cifar-100-python/meta", pickle.dumps({}), "meta cannot be used (KeyError"),
    ("coco", COCO, None, "cannot be read (No such file"),
    ("coco", COCO, '{"images": [', "is not valid JSON"),
    ("coco", COCO, {**VALID, "annotations": None}, "it is no COCO instances file"),
    ("coco", COCO, coco_content("train2014", {4: [1, 2]}), "it is no COCO instances file"),
    ("coco", COCO, coco_content("train2014", {4: []}), "no image with an object"),
    ("coco", COCO, {**VALID, "images": [{"id": 4, "file_name": "/a"}]}, "image 4: '/a' is not a p"),
    ("coco", COCO, coco_content("", {}, TWINS), "are both called 'person': merge or rename them"),
    ("csv_table", "data.csv", CSV + "a/1.png,dog,cat,train\n", "row 2 has 4 fields, the header 3"),
    ("csv_table", "data.csv", CSV + 'a/1.png,"dog,train\n', "row 2 is not CSV"),
    ("csv_table", "data.csv", CSV + "../1.png,dog,train\n", "row 2: '../1.png' is not a path in"),
    ("csv_table", "data.csv", CSV + "a/1.png,a,val\n./a//1.png,b,val\n", "a/1.png is listed twice"),
    ("csv_table", "data.csv", CSV + "a/1.png,dog,train\nb/4.png,Dog,val\n", "differ in case only"),
    ("csv_table", "data.csv", CSV + "a/1.png,,train\n", "no image has a label"),
    ("csv_table", "data.csv", CSV + "a/1.png,dog,train\n", "val has no image"),
    ("folders", "train/Dog/1.png", b"", "differ in case only"),
    ("folders", "train/a\x1bb/1.png", b"", "has the control character U+001B"),
    ("folders", "train/fox/inner/1.png", b"", "fox holds folders and no image"),
    ("folders", "val/fox/1.png", b"", "val: the class 'fox' is not in the list of 3 classes"),
    ("imagenet", "val/n99999999/1.JPEG", b"", "'n99999999' is not in the list of 1000 classes"),
    ("nuswide_zsl", "data.csv", NUSWIDE + "a.jpg,[sky, dog],train\n", "row 2: it is not path,"),
    ("nuswide_zsl", "data.csv", b"PK\x03\x04", "swap the two files back"),
    ("nuswide_zsl", "benchmark_81_v0.json", {"test class": ["cat", "whale"]}, "in the data: whale"),
    ("nuswide81", "nus_wid_data.csv", nuswide_csv([("a.jpg", "[sky]", "train")]), "has no image"),
    ("nuswide_official", "ImageList/TestImagelist.txt", "..\\a.jpg\nb.jpg\n", "line 1: '..\\\\a."),
    ("nuswide_official", "NUS_WID_Tags/Test_Tags1k.dat", "1 0\n1 0 1\n", "it is not of 0 and 1"),
    ("nuswide_official", "NUS_WID_Tags/TagList1k.txt", "sky\nsky\ndog\n", "'sky' is there twice"),
    ("openimages", OPENIMAGES, STATEMENTS + "a,x,/m/0a,1\nb,x,/m/0a,0.7\n", "row 3 has Confidence"),
    ("openimages", OPENIMAGES, STATEMENTS + "a,x,/m/0a\n", "row 2 has 3 columns, not 4"),
    ("openimages", OPENIMAGES, "ImageID,LabelName,Confidence\n", "the header is 'ImageID,L"),
    ("openimages_miil", "data.csv", MIIL + "a,['/m/0a'],[]\n", "row 2 has 3 columns, not 4"),
    ("openimages_miil", "data.csv", MIIL + "b,[/m/0a],[],val\n", "row 2 has '[/m/0a]', not a list"),
    ("openimages_miil", "data.csv", MIIL + "b,\"['x' 'y']\",[],val\n", "not a list of quoted"),
    ("vg500", VG, {"4.jpg": [500]}, "the class 500 is not an index below 500"),
    ("vg500", VG, {}, "cannot be used (KeyError: '4.jpg')"),
    ("openimages_miil", "data.csv", MIIL + "a,[],[],val\na,[],[],val\n", "image a is listed twice"),
    ("voc", VOC_IMAGE, None, "000005.xml cannot be read (No such file or directory); no labels of"),
    ("voc", VOC_IMAGE, "<annotation><object>", "cannot be used (ParseError"),
    ("voc", VOC_IMAGE, voc_xml([("Dog", 0)]), "the class 'Dog' is not in the list of 20 cl"),
    ("voc", VOC_IMAGE, OUTSIDE, "cannot be used (ParseError: undefined entity"),
    ("voc", VOC_LIST, "000007\n../../000005\n", "line 2: '../../000005' is not a path inside"),
    ("voc", VOC_LIST, "", "trainval.txt is empty"),
    ("yolo", "data.yaml", None, "data.yaml cannot be read (No such file"),
    ("yolo", "data.yaml", "names: [dog, cat", "cannot be used (ParserError"),
    ("yolo", "data.yaml", "!!python/object/apply:os.getcwd []", "cannot be used (ConstructorError"),
    ("yolo", "data.yaml", "a: 1\n---\na: 1\n", "cannot be used (ComposerError"),
    ("yolo", "data.yaml", "- dog\n", "it is no YAML of keys such as train"),
    ("yolo", "data.yaml", "train: train/images\nval: valid/images\n", "names is None, not a list"),
    ("yolo", "data.yaml", yolo_yaml(names="dog"), "names is 'dog', not a list of class names or a"),
    (
        "yolo",
        "data.yaml",
        yolo_yaml(names={1: "dog"}),
        "names is {1: 'dog'}, not a list of class names",
    ),
    (
        "yolo",
        "data.yaml",
        yolo_yaml(names=["dog"] * 2),
        "data.yaml: the class 'dog' is there twice",
    ),
    ("yolo", "data.yaml", yolo_yaml(names=[True]), "the class name True is of type bool, not text"),
    ("yolo", "data.yaml", yolo_yaml(val=None, valid="x"), "no split 'val': pass data.val=valid"),
    (
        "yolo",
        "data.yaml",
        yolo_yaml(train=None),
        "train is None, not a folder of images, a list of",
    ),
    ("yolo", "data.yaml", yolo_yaml(val=["test", 5]), "val is ['test', 5], not a folder of images"),
    (
        "yolo",
        "data.yaml",
        yolo_yaml(path="/no", val="x"),
        "val: /no/x is not there: correct the path",
    ),
    ("yolo", "data.yaml", yolo_yaml(val="valid/labels"), "data.yaml: val has no image"),
    (
        "yolo",
        "data.yaml",
        yolo_yaml(val=["test", "test/images"]),
        "g.jpg is listed twice, first in v",
    ),
    ("yolo", "valid/labels/f.txt", None, "none of 1 images has a label file, such as"),
    (
        "yolo",
        "train/labels/a.txt",
        "0 1 1\n3 0 0 1 1",
        "a.txt, line 2: the class '3' is not an index",
    ),
    (
        "yolo",
        "train/labels/a.txt",
        "-1",
        "the class '-1' is not an index below 3, the number of na",
    ),
    ("yolo", "train/labels/a.txt", "nan 0 0", "the class 'nan' is not an index below 3"),
    ("yolo", "train/labels/a.txt", "0.5 0.5 1 1 2", "the class '0.5' is not an index below 3"),
    (
        "yolo",
        "train/labels/a.txt",
        "dog 0 0 1 1",
        "line 1: the class 'dog' is not an index below 3",
    ),
]


@pytest.mark.parametrize(("reader", "file", "content", "message"), READER_FAULTS)
def test_a_faulty_file_is_named(tmp_path, reader, file, content, message):
    build = tree(reader, tmp_path)
    path = build.root / file
    if content is None:
        path.unlink()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))

    # The labels of VG-500 are written for the images of its validation list.
    fault = build.fault(**{"train": VG_LIST} if file == VG else {})
    assert message in fault
    assert str(build.root) in fault or "Concepts81.txt" in fault


@pytest.mark.parametrize("reader", TREES)
def test_every_reader_needs_its_folder_and_its_images(tmp_path, reader):
    build = tree(reader, tmp_path)
    assert "is not a folder; set data.root" in build.fault(root=str(tmp_path / "nowhere"))
    (tmp_path / "bare").mkdir()
    assert f"{tmp_path / 'bare'} is empty" in build.fault(root=str(tmp_path / "bare"))

    # CIFAR-100 has no image files, and the official NUS-WIDE leaves out those that are absent.
    # Folders of YOLO say what there is; lists are in test_yolo.
    if reader not in ("cifar100", "nuswide_official", "folders", "imagenet", "yolo"):
        for path in [*build.root.rglob("*.jpg"), *build.root.rglob("*.png")]:
            path.rename(path.with_suffix(".gone"))
        assert "listed images are absent, the first is" in build.fault()


@pytest.mark.parametrize(
    ("reader", "arguments", "message"),
    [
        ("cars", {"top_k": 1}, "data.top_k"),
        ("coco", {"drop_labels": 1.0}, "data.drop_labels is 1.0: it must be from 0 on and below 1"),
        ("coco", {"keep_per_class": 0}, "data.keep_per_class is 0: it must be at least 1"),
        ("coco", {"keep_per_class": 5, "drop_labels": 0.5}, "exclude each other"),
        ("coco", {"observed": 1.5}, "data.observed is 1.5: it must be in (0, 1]"),
        ("coco", {"observed": 0}, "data.observed is 0: it must be in (0, 1]"),
        ("coco", {"single_positive": -1}, "data.single_positive is -1: a seed is 0 or more"),
        (
            "coco",
            {"single_positive": 0, "observed": 1},
            "data.single_positive and observed exclude",
        ),
        ("folders", {"single_positive": 0}, "data.single_positive is for data with several labels"),
        ("coco", {"labels_seed": -1}, "data.labels_seed is -1: it must be 0 or more"),
        ("csv_table", {"split": "random"}, "data.split: 'random' is not one of stratified, hash"),
        ("csv_table", {"top_k": 2}, "data.top_k is 2, for one label per image"),
        ("folders", {"val_fraction": 1.0}, "data.val_fraction is 1.0"),
        ("nuswide_zsl", {"val_images": "some"}, "data.val_images: 'some' is not one of unseen"),
        ("openimages", {"val": "val"}, "data.val: 'val' is not one of train, validation,"),
        ("openimages_miil", {"names": "both"}, "data.names"),
        ("vg500", {"num_classes": 2, "classes": "VG_100K/x"}, "data.num_classes is 2, and data.cl"),
        ("voc", {"difficult_val": "maybe"}, "data.difficult_val: 'maybe' is not one of negative"),
    ],
)
def test_a_faulty_setting_is_named(tmp_path, reader, arguments, message):
    build = tree(reader, tmp_path)
    if "classes" in arguments:
        (build.root / arguments["classes"]).write_text("a\nb\nc\n")
    with pytest.raises(ConfigError) as caught:
        build(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "reader", sorted({*readers.__all__} - {"cars", "cifar100", "folders", "imagenet"})
)
def test_every_reader_passes_its_threshold_on(tmp_path, reader):
    (tmp_path / "some file").touch()
    with pytest.raises(ConfigError, match=r"threshold.*1\.5"):
        made(getattr(readers, reader), root=str(tmp_path), threshold=1.5)


def test_entities_of_xml_do_not_grow_and_no_other_file_is_read(tmp_path):
    build = tree("voc", tmp_path)
    levels = [f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10)]
    bomb = (
        f'<!DOCTYPE a [<!ENTITY a0 "{"ha" * 999}">{"".join(levels)}]><annotation>&a9;</annotation>'
    )
    (build.root / VOC_IMAGE).write_text(bomb)
    assert "cannot be used (ParseError" in build.fault()


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def test_a_pickle_runs_nothing(tmp_path):
    build = tree("cifar100", tmp_path)
    hostile = pickle.dumps({"data": Hostile(tmp_path / "done"), "fine_labels": [1]})
    pickle.loads(hostile)
    (tmp_path / "done").rmdir()  # it does what it says where nobody looks
    for name in ("builtins eval", "numpy load", "numpy.core.multiarray fromfile", None):
        content = f"c{name.replace(' ', chr(10))}\n.".encode() if name else hostile
        (build.root / CIFAR).write_bytes(content)
        assert "which no array needs" in build.fault()
    assert not (tmp_path / "done").exists()


def test_the_options_name_the_readers_in_their_package():
    files = Path(config_dir(), "data").glob("*.yaml")
    targets = {yaml.safe_load(file.read_text())["_target_"] for file in files}
    named = {target for target in targets if "readers" in target}
    assert named == {f"mldec.data.readers.{name}" for name in readers.__all__}
    for name in readers.__all__:
        assert getattr(readers, name).__name__ == name  # and not the module of that name
