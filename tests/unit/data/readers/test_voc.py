"""Pascal VOC: difficult objects, and locations of the files."""

import os
import shutil

import pytest
from readers import Reader, names, targets, write_picture
from support import made
from trees import VOC_SPLITS, tree, voc_xml, write_voc

from mldec.data.readers import voc
from mldec.names import VOC as CLASSES


@pytest.fixture
def build(tmp_path):
    """Return the reader of data/VOCdevkit/VOC2007."""
    folder = tmp_path / "data" / "VOCdevkit"
    folder.mkdir(parents=True)
    return Reader(voc, tree("voc", tmp_path / "new").root.rename(folder / "VOC2007"))


def ids(split):
    return [name.removesuffix(".jpg") for name in names(split)]


def labels(split):
    """Return the values of present and unknown classes of each image."""
    rows = [zip(CLASSES, row, strict=True) for row in targets(split)]
    return [{name: value for name, value in row if value} for row in rows]


def test_images_are_in_order_of_list_and_classes_in_order_of_devkit(build):
    data = build()
    assert ids(data.train) == list(VOC_SPLITS["trainval"])
    assert data.train.classes.names == data.val.classes.names == CLASSES == tuple(sorted(CLASSES))
    assert not data.train.classes.exclusive
    # Parts are not objects, and a missing `difficult` means 0.
    assert labels(data.train) == [{"dog": 1}, {"person": 1}, {"tvmonitor": 1}, {}]
    assert labels(data.val) == [{"bus": 1, "cat": -1}, {"cat": 1}, {"bus": -1}]


@pytest.mark.parametrize(("difficult", "value"), [("negative", 0), ("positive", 1), ("ignore", -1)])
def test_setting_of_difficult_objects_changes_one_split(build, difficult, value):
    maybe = {name: {name: value} if value else {} for name in ("chair", "cat", "bus")}
    data = build(difficult_train=difficult)
    assert labels(data.train) == [{"dog": 1}, {"person": 1, **maybe["chair"]}, {"tvmonitor": 1}, {}]
    data = build(difficult_val=difficult)
    assert labels(data.val) == [{"bus": 1, **maybe["cat"]}, {"cat": 1}, maybe["bus"]]
    assert labels(data.train)[1] == {"person": 1}


def test_root_is_one_of_three_folders(build):
    for root in [build.root, *build.root.parents][:3]:
        path = build.root / "JPEGImages" / "000020.jpg"
        assert build(root=str(root)).val.dataset.name(0) == str(path)


def test_year_selects_folder(build):
    parent = build.root.parent
    other = parent / "VOC2012"
    write_voc(other, {"train": {"2008_000002": [("cow", 0)]}, "val": {"2009_01": [("cow", 1)]}})
    data = build(root=str(parent), year=2012, train="train", val="val")
    assert (ids(data.train), ids(data.val)) == (["2008_000002"], ["2009_01"])
    assert len(build(root=str(parent)).train.dataset) == 4
    assert "VOC2007" in build.fault(root=str(other), year=2007)

    (other / "ImageSets" / "Main" / "test.txt").write_text("2008_000001\n")
    assert "2008_000001.xml" in build.fault(root=str(parent), year=2012, train="train")

    # The folder may have another name, but not the name of another year.
    kaggle = build.root.rename(parent / "VOC2007_train_val")
    assert len(build(root=str(kaggle)).train.dataset) == 4
    assert "VOC2012" in build.fault(root=str(kaggle), year=2012)


def test_long_tail_list_of_2012_is_validated_on_2007(build, tmp_path):
    # VOC-MLT: `longtail2012/img_id.txt` of its authors, and the test images of 2007.
    parent = build.root.parent
    trainval = {f"2008_{number:06}": [("cow", number % 2)] for number in range(1, 20)}
    write_voc(parent / "VOC2012", {"trainval": trainval, "test": trainval})
    listing = tmp_path / "img_id.txt"
    listed = [f"2008_{number:06}" for number in range(8, 14)]
    listing.write_text("".join(f"{image}\n" for image in reversed(listed)))
    settings = {"year": 2012, "val_year": 2007, "train_list": str(listing)}
    data = build(root=str(parent), **settings, difficult_train="positive")
    assert ids(data.train) == listed
    assert labels(data.train) == [{"cow": 1}] * 6
    assert data.val.dataset.name(0) == str(build.root / "JPEGImages" / "000020.jpg")
    assert labels(data.val) == labels(build().val)

    # A fold is a part of the listed images.
    data = build(root=str(parent), **settings, fold="1/2")
    assert sorted(ids(data.train) + ids(data.val)) == listed

    listing.write_text("2008_000004\n2008_000029\n")
    fault = build.fault(root=str(parent), **settings)
    assert fault.startswith(str(listing))
    assert "2008_000029" in fault


@pytest.mark.parametrize(
    "text",
    [
        "000012  1\n000007 -1\n000005  0\n",  # list of a class
        "\ufeff000012\r\n000007\r\n\r\n000005\r\n",
        "  000012\n\n000007\n000005",
    ],
)
def test_lists_have_several_formats(build, text):
    (build.root / "ImageSets" / "Main" / "dog_trainval.txt").write_bytes(text.encode())
    # Files that are not listed are not read.
    (build.root / "Annotations" / "2007_000027.xml").write_text("broken")
    assert ids(build(train="dog_trainval").train) == ["000012", "000007", "000005"]


def test_changed_list_or_folder_is_read_again(build):
    build()
    (build.root / "ImageSets" / "Main" / "test.txt").write_text("000021\n")
    assert ids(build().val) == ["000021"]
    (build.root / "Annotations" / "000021.xml").write_text(voc_xml([("sofa", 0)]))
    os.utime(build.root / "Annotations", ns=(0, 10**18))
    assert labels(build().val) == [{"sofa": 1}]
    # An edit of a file does not change the time of the folder.
    (build.root / "Annotations" / "000021.xml").write_text(voc_xml([("boat", 0)]))
    os.utime(build.root / "Annotations", ns=(0, 10**18))
    assert labels(build().val) == [{"boat": 1}]


def test_namespace_and_broken_link_among_annotations(build):
    expected = labels(build().train)
    folder = build.root / "Annotations"
    (folder / "zz.xml").symlink_to(folder / "nowhere.xml")
    path = folder / "000007.xml"
    path.write_text(voc_xml([]).replace("<annotation>", "<annotation xmlns='urn:x'>"))
    path = folder / "000012.xml"
    path.write_text(path.read_text().replace("<annotation>", "<annotation xmlns='urn:x'>"))
    assert labels(build().train) == expected


def test_labels_of_sample_equal_its_class_lists(sample_data, tmp_path):
    root = sample_data / "voc2012_mini"
    place = {"root": str(root), "year": 2012, "cache_dir": str(tmp_path)}
    whole = made(voc, **place, train="train", val="trainval").val
    rows = targets(whole)
    assert len(rows) == 100

    # ImageSets/Main/<class>_<set>.txt: 1 present, -1 absent, 0 difficult objects only.
    for column, name in enumerate(CLASSES):
        lines = next(root.rglob(f"{name}_trainval.txt")).read_text().splitlines()
        listed = {image: {1: 1, -1: 0, 0: -1}[int(value)] for image, value in map(str.split, lines)}
        assert [listed[image] for image in ids(whole)] == [row[column] for row in rows]


def test_lists_of_classes_are_enough(build):
    shutil.rmtree(build.root / "Annotations")
    assert "aeroplane_trainval.txt" in build.fault()
    lists = {"dog_trainval": "000007 1\n000020 -1\n", "cat_trainval": "000007  0\n000020  1\n"}
    lists |= {"dog_test": "000005 1\n", "cat_test": "000005 0\n"}
    for name, text in lists.items():
        (build.root / "ImageSets" / "Main" / f"{name}.txt").write_text(text)
    for split in ("trainval", "test"):
        (build.root / "ImageSets" / "Main" / f"{split}.txt").unlink()
    for image in ("000005", "000007", "000020"):
        write_picture(build.root / "JPEGImages" / f"{image}.jpg")
    data = build()
    assert ids(data.train) == ["000007", "000020"]
    assert labels(data.train) == [{"dog": 1}, {"cat": 1}]
    assert labels(data.val) == [{"dog": 1, "cat": -1}]

    (build.root / "ImageSets" / "Main" / "dog_test.txt").write_text("000005 2\n")
    assert "dog_test.txt, line 1" in build.fault()
