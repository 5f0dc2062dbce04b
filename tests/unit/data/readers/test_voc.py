"""Pascal VOC: labels with and without difficult objects, and where the files are."""

import logging
import os
from xml.etree import ElementTree

import pytest
from readers import Reader, names, targets
from support import made
from trees import VOC_SPLITS, tree, voc_xml, write_voc

from mldec.data.readers import voc
from mldec.names import VOC as CLASSES


@pytest.fixture
def build(tmp_path):
    """The tree lies two folders below that of the data."""
    folder = tmp_path / "data" / "VOCdevkit"
    folder.mkdir(parents=True)
    root = tree("voc", tmp_path / "new").root.rename(folder / "VOC2007")
    return Reader(voc, root, "Pascal VOC")


def ids(split):
    return [name.removesuffix(".jpg") for name in names(split)]


def labels(split):
    """For each image, class -> value of what is not absent."""
    rows = [zip(CLASSES, row, strict=True) for row in targets(split)]
    return [{name: value for name, value in row if value} for row in rows]


def test_images_in_the_order_of_the_list_and_classes_in_that_of_the_devkit(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build()
    assert ids(data.train) == list(VOC_SPLITS["trainval"])
    assert data.train.classes.names == data.val.classes.names == CLASSES == tuple(sorted(CLASSES))
    assert not data.train.classes.exclusive
    # Parts are no objects, and a missing mark means not difficult.
    assert labels(data.train) == [{"dog": 1}, {"person": 1}, {"tvmonitor": 1}, {}]
    assert labels(data.val) == [{"bus": 1, "cat": -1}, {"cat": 1}, {"bus": -1}]
    assert caplog.messages == [
        "VOC2007 trainval: 4 images, 20 classes",
        "VOC2007 trainval: 1 labels of difficult objects only: negative",
        "VOC2007 test: 3 images, 20 classes",
        "VOC2007 test: 2 labels of difficult objects only: ignore",
    ]


@pytest.mark.parametrize(("difficult", "value"), [("negative", 0), ("positive", 1), ("ignore", -1)])
def test_difficult_objects_in_training_and_in_evaluation(build, difficult, value):
    maybe = {name: {name: value} if value else {} for name in ("chair", "cat", "bus")}
    data = build(difficult_train=difficult)
    assert labels(data.train) == [{"dog": 1}, {"person": 1, **maybe["chair"]}, {"tvmonitor": 1}, {}]
    data = build(difficult_val=difficult)
    assert labels(data.val) == [{"bus": 1, **maybe["cat"]}, {"cat": 1}, maybe["bus"]]
    assert labels(data.train)[1] == {"person": 1}  # one setting does not touch the other split


# Where the files are


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_the_root_is_any_of_three_folders(build, levels):
    root = [build.root, *build.root.parents][levels]
    path = build.root / "JPEGImages" / "000020.jpg"
    assert build(root=str(root)).val.dataset.name(0) == str(path)


def test_two_years_side_by_side_and_a_tree_of_another_name(build):
    other = build.root.parent / "VOC2012"
    one_image = {"train": {"2008_000002": [("cow", 0)]}, "val": {"2009_000001": [("cow", 1)]}}
    write_voc(other, one_image)
    root = str(build.root.parent)
    data = build(root=root, year=2012, train="train", val="val")
    assert (ids(data.train), ids(data.val)) == (["2008_000002"], ["2009_000001"])
    assert len(build(root=root).train.dataset) == 4

    assert "VOC2012 holds no VOC2007" in build.fault(root=str(other), year=2007)
    assert "VOCdevkit holds no VOC2010" in build.fault(root=root, year=2010)
    (other / "ImageSets" / "Main" / "test.txt").write_text("2008_000001\n")
    message = build.fault(root=root, year=2012, train="train")
    assert "2008_000001.xml cannot be read" in message
    assert "no labels of the test split of 2012 are public" in message
    kaggle = build.root.rename(build.root.parent / "VOC2007_train_val")
    assert len(build(root=str(kaggle)).train.dataset) == 4
    assert "VOC2007_train_val holds no VOC2012" in build.fault(root=str(kaggle), year=2012)
    kaggle.rename(build.root.parent / "pascal")
    assert len(build(root=str(build.root.parent / "pascal")).train.dataset) == 4


@pytest.mark.parametrize(
    "text",
    [
        "000012  1\n000007 -1\n000005  0\n",
        "\ufeff000012\r\n000007\r\n\r\n000005\r\n",
        "  000012\n\n000007\n000005",
    ],
    ids=["list of a class", "windows", "blanks"],
)
def test_lists_as_they_occur(build, text):
    (build.root / "ImageSets" / "Main" / "dog_trainval.txt").write_bytes(text.encode())
    # A file that no list names is not read, as those of the segmentation images of 2012.
    (build.root / "Annotations" / "2007_000027.xml").write_text("broken")
    assert ids(build(train="dog_trainval").train) == ["000012", "000007", "000005"]


def test_a_changed_list_or_folder_is_read_again(build):
    build()
    (build.root / "ImageSets" / "Main" / "test.txt").write_text("000021\n")
    assert ids(build().val) == ["000021"]
    (build.root / "Annotations" / "000021.xml").write_text(voc_xml([("sofa", 0)]))
    os.utime(build.root / "Annotations", ns=(0, 10**18))
    assert labels(build().val) == [{"sofa": 1}]


# The sample


def test_labels_of_the_sample_are_those_of_its_class_lists(sample_data, tmp_path):
    root = sample_data / "voc2012_mini"
    place = {"root": str(root), "year": 2012, "cache_dir": str(tmp_path)}
    data = made(voc, **place, train="train", val="val")
    assert (len(data.train.dataset), len(data.val.dataset)) == (60, 40)

    # ImageSets/Main/<class>_<set>.txt: 1 present, -1 absent, 0 difficult objects only.
    whole = made(voc, **place, train="train", val="trainval").val
    rows = targets(whole)
    for column, name in enumerate(CLASSES):
        lines = next(root.rglob(f"{name}_trainval.txt")).read_text().splitlines()
        listed = {image: {1: 1, -1: 0, 0: -1}[int(value)] for image, value in map(str.split, lines)}
        assert [listed[image] for image in ids(whole)] == [row[column] for row in rows], name

    trees = [ElementTree.parse(path) for path in root.rglob("*.xml")]
    objects = [thing for tree in trees for thing in tree.getroot().iter("object")]
    assert (len(objects), sum(thing.findtext("difficult") == "1" for thing in objects)) == (273, 38)
