import logging
import os
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from readers import Reader, names, versions, write_picture
from support import made

from mldec.data.readers import voc as module
from mldec.data.readers.voc import voc
from mldec.data.table import VOC as CLASSES
from mldec.data.transforms import EvalTransform
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.losses.partial import PartialAsymmetricLoss

PART = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
# Image id -> (class, is difficult) of each object; None leaves the mark out, as converted files do.
TRAIN = {
    "000012": [("dog", 0), ("dog", 1)],
    "000005": [("chair", 1), ("person", 0)],
    "2008_000002": [("tvmonitor", None)],
    "000007": [],
}
VAL = {
    "000020": [("cat", 1), ("bus", 0)],
    "000021": [("cat", 0)],
    "000022": [("bus", 1), ("bus", 1)],
}


def xml(objects):
    text = "<annotation><folder>VOC2007</folder><filename>x.jpg</filename>"
    for name, difficult in objects:
        mark = "" if difficult is None else f"<difficult>{difficult}</difficult>"
        # The part stands before the name: only a direct child is the class.
        text += f"<object>{PART}<name>{name}</name>{mark}<bndbox><xmin>5.5</xmin></bndbox></object>"
    return text + "</annotation>\n"


def write(folder, lists):
    for inner in ("Annotations", "ImageSets/Main"):
        (folder / inner).mkdir(parents=True)
    for split, images in lists.items():
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text(
            "".join(f"{image}\n" for image in images)
        )
        for image, objects in images.items():
            (folder / "Annotations" / f"{image}.xml").write_text(xml(objects))
            write_picture(folder / "JPEGImages" / f"{image}.jpg", len(objects))


@pytest.fixture
def folder(tmp_path):
    """A tree of a few small images."""
    write(tmp_path / "data" / "VOCdevkit" / "VOC2007", {"trainval": TRAIN, "test": VAL})
    return tmp_path / "data" / "VOCdevkit" / "VOC2007"


@pytest.fixture
def build(folder):
    return Reader(voc, folder, "Pascal VOC")


def ids(split):
    return [name.removesuffix(".jpg") for name in names(split)]


def labels(split):
    """For each image, class -> value of what is not absent."""
    rows = [fixed_sample(split.dataset, index)[1].tolist() for index in range(len(split.dataset))]
    return [{CLASSES[column]: value for column, value in enumerate(row) if value} for row in rows]


# Labels


def test_images_in_the_order_of_the_list_and_classes_in_that_of_the_devkit(build):
    data = build()
    assert ids(data.train) == list(TRAIN)
    assert data.train.classes.names == data.val.classes.names == CLASSES
    assert len(CLASSES) == 20
    assert list(CLASSES) == sorted(CLASSES)
    assert not data.train.classes.exclusive


@pytest.mark.parametrize(("difficult", "value"), [("negative", 0), ("positive", 1), ("ignore", -1)])
def test_difficult_objects_in_training_and_in_evaluation(build, difficult, value):
    maybe = {name: {name: value} if value else {} for name in ("chair", "cat", "bus")}
    data = build(difficult_train=difficult)
    assert labels(data.train) == [{"dog": 1}, {"person": 1, **maybe["chair"]}, {"tvmonitor": 1}, {}]
    data = build(difficult_val=difficult)
    assert labels(data.val) == [{"bus": 1, **maybe["cat"]}, {"cat": 1}, maybe["bus"]]
    assert labels(data.train)[1] == {"person": 1}  # one setting does not touch the other split


def test_the_defaults_are_negative_in_training_and_ignored_in_evaluation(build):
    data = build(train="test")
    assert labels(data.train) == [{"bus": 1}, {"cat": 1}, {}]
    assert labels(data.val) == [{"bus": 1, "cat": -1}, {"cat": 1}, {"bus": -1}]


def test_parts_are_no_objects_and_a_missing_mark_means_not_difficult(build):
    found = labels(build(difficult_val="positive").train)
    assert not any("head" in row for row in found)
    assert found[2] == {"tvmonitor": 1}


def test_the_metrics_leave_out_ignored_labels(build):
    """Of the two images with a bus, one is difficult and scores low; ignored, it does not count."""
    logits = torch.full((3, 20), -5.0)
    bus, cat = CLASSES.index("bus"), CLASSES.index("cat")
    logits[:, bus] = torch.tensor([1.0, 2.0, -9.0])
    logits[:, cat] = torch.tensor([9.0, 1.0, 0.0])
    expected = {
        "ignore": (1 / 2, 1.0),
        "positive": ((1 / 2 + 2 / 3) / 2, 1.0),
        "negative": (1 / 2, 1 / 2),
    }
    for difficult, (of_bus, of_cat) in expected.items():
        data = build(difficult_val=difficult)
        evaluator = data.evaluator()
        evaluator.update(
            logits, torch.stack([fixed_sample(data.val.dataset, index)[1] for index in range(3)])
        )
        metrics = evaluator.compute()
        assert evaluator.per_class()["AP"][bus] == pytest.approx(100 * of_bus)
        assert metrics["mAP_skip_empty"] == pytest.approx(50 * (of_bus + of_cat))
        assert {"mAP", "mAP_interpolated", "mAP_11point"} <= metrics.keys()
    # The envelope lifts the difficult bus's precision over the other one; at 11 points, half of
    # the recalls see it.
    data = build(difficult_val="positive")
    evaluator = data.evaluator()
    evaluator.update(
        logits, torch.stack([fixed_sample(data.val.dataset, index)[1] for index in range(3)])
    )
    metrics = evaluator.compute()
    assert metrics["mAP_interpolated"] == pytest.approx(100 * (2 / 3 + 1) / 20)
    assert metrics["mAP_11point"] == pytest.approx(100 * (2 / 3 + 1) / 20)


def test_ignoring_in_training_needs_a_loss_that_can(build):
    targets = fixed_sample(build(difficult_train="ignore").train.dataset, 1)[1][None]
    with pytest.raises(DataError, match="target -1 is not allowed"):
        AsymmetricLoss()(torch.zeros(1, 20), targets)
    loss = PartialAsymmetricLoss(mode="ignore")
    logits = torch.zeros(1, 20, requires_grad=True)
    loss(logits, targets).backward()
    assert logits.grad is not None
    assert logits.grad[0, CLASSES.index("chair")] == 0
    assert (logits.grad != 0).sum() == 19


def test_samples(build, folder):
    data = build()
    image, target = fixed_sample(data.val.dataset, 0)
    path = folder / "JPEGImages" / "000020.jpg"
    assert data.val.dataset.name(0) == str(path)
    with Image.open(path) as stored:
        assert torch.equal(image, EvalTransform(image_size=16)(stored))
    assert (image.dtype, target.dtype, target.shape) == (torch.uint8, torch.int8, (20,))
    plain = build(augment="none", cutout=0)
    assert len(versions(plain.train.dataset)) == 1
    assert len(versions(data.train.dataset)) > 1


def test_the_log_says_what_was_read(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        build()
    assert caplog.messages == [
        "VOC2007 trainval: 4 images, 20 classes",
        "VOC2007 trainval: 1 labels of difficult objects only: negative",
        "VOC2007 test: 3 images, 20 classes",
        "VOC2007 test: 2 labels of difficult objects only: ignore",
    ]


# Where the files are


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_the_root_is_any_of_three_folders(build, folder, levels):
    root = [folder, *folder.parents][levels]
    assert build(root=str(root)).val.dataset.name(0) == str(folder / "JPEGImages" / "000020.jpg")


def test_two_years_side_by_side(build, folder):
    write(
        folder.parent / "VOC2012",
        {"train": {"2008_000002": [("cow", 0)]}, "val": {"2009_000001": [("cow", 1)]}},
    )
    root = str(folder.parent)
    data = build(root=root, year=2012, train="train", val="val")
    assert (ids(data.train), ids(data.val)) == (["2008_000002"], ["2009_000001"])
    assert len(build(root=root).train.dataset) == 4
    with pytest.raises(DataError, match="VOC2012 holds no VOC2007"):
        build(root=str(folder.parent / "VOC2012"), year=2007)
    with pytest.raises(DataError, match="VOCdevkit holds no VOC2010"):
        build(root=root, year=2010)


def test_a_tree_of_another_name(build, folder):
    folder.rename(folder.parent / "pascal")
    assert len(build(root=str(folder.parent / "pascal")).train.dataset) == 4


@pytest.mark.parametrize(
    "text",
    [
        "000012  1\n000007 -1\n000005  0\n",
        "\ufeff000012\r\n000007\r\n\r\n000005\r\n",
        "  000012\n\n000007\n000005",
    ],
    ids=["list of a class", "windows", "blanks"],
)
def test_lists_as_they_occur(build, folder, text):
    (folder / "ImageSets" / "Main" / "dog_trainval.txt").write_bytes(text.encode())
    assert ids(build(train="dog_trainval").train) == ["000012", "000007", "000005"]


def test_files_that_no_list_names_are_not_read(build, folder):
    (folder / "Annotations" / "2007_000027.xml").write_text(
        "broken"
    )  # as the segmentation images of 2012
    assert len(build().train.dataset) == 4


def test_the_test_split_of_2012_has_no_labels(build, folder):
    write(folder.parent / "VOC2012", {"train": {"2008_000002": []}})
    (folder.parent / "VOC2012" / "ImageSets" / "Main" / "test.txt").write_text("2008_000001\n")
    message = build.fault(root=str(folder.parent), year=2012, train="train")
    assert (
        "2008_000001.xml is absent, though its image is listed (no labels of the test split of 2012"
        in message
    )


# Real files


def test_counts_of_the_sample(sample_data, tmp_path):
    root = str(sample_data / "voc2012_mini")
    data = made(
        voc, root=root, year=2012, train="train", val="val", image_size=32, cache_dir=str(tmp_path)
    )
    whole = made(
        voc, root=root, year=2012, train="trainval", val="trainval", cache_dir=str(tmp_path)
    )
    assert (len(data.train.dataset), len(data.val.dataset), len(whole.val.dataset)) == (60, 40, 100)
    assert whole.val.dataset.labels.counts(-1).sum() == 15
    assert whole.train.dataset.labels.counts(-1).sum() == 0
    assert (whole.val.dataset.labels.counts() > 0).all()
    assert fixed_sample(data.train.dataset, 0)[0].shape == (3, 32, 32)
    trees = [ElementTree.parse(path) for path in (sample_data / "voc2012_mini").rglob("*.xml")]
    objects = [thing for tree in trees for thing in tree.getroot().iter("object")]
    assert (len(objects), sum(thing.findtext("difficult") == "1" for thing in objects)) == (273, 38)


def test_labels_of_the_sample_are_those_of_its_class_lists(sample_data, tmp_path):
    """ImageSets/Main/<class>_<set>.txt: 1 present, -1 absent, 0 difficult objects only."""
    root = sample_data / "voc2012_mini"
    data = made(
        voc, root=str(root), year=2012, train="train", val="trainval", cache_dir=str(tmp_path)
    )
    dense = data.val.dataset.labels.dense()
    order = ids(data.val)
    for column, name in enumerate(CLASSES):
        lines = (next(root.rglob(f"{name}_trainval.txt"))).read_text().splitlines()
        listed = {image: {1: 1, -1: 0, 0: -1}[int(value)] for image, value in map(str.split, lines)}
        assert [listed[image] for image in order] == dense[:, column].tolist(), name


# The cache


def test_a_second_start_reads_no_xml_whatever_difficult_means(build, monkeypatch):
    first = labels(build().val)

    def parse(*_):
        raise AssertionError("the annotations are parsed again")

    monkeypatch.setattr(module, "_parse", parse)
    assert labels(build().val) == first
    assert labels(build(difficult_val="positive").val)[0] == {"bus": 1, "cat": 1}


def test_a_changed_list_or_folder_is_read_again(build, folder):
    build()
    listing = folder / "ImageSets" / "Main" / "test.txt"
    listing.write_text("000021\n")
    assert ids(build().val) == ["000021"]
    replacement = folder / "Annotations" / "new"
    replacement.write_text(xml([("sofa", 0)]))
    replacement.replace(folder / "Annotations" / "000021.xml")
    os.utime(folder / "Annotations", ns=(0, 10**18))
    assert labels(build().val) == [{"sofa": 1}]


# Faults


def bomb():
    entities = '<!ENTITY a0 "ha">' + "".join(
        f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10)
    )
    return f"<?xml version='1.0'?><!DOCTYPE annotation [{entities}]><annotation>&a9;</annotation>"


OUTSIDE = (
    '<!DOCTYPE annotation [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>'
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (bomb().encode(), "declares a document type or entities"),
        (OUTSIDE.encode(), "declares a document type or entities"),
        (OUTSIDE.lower().encode(), "declares a document type or entities"),
        (bomb().encode("utf-16"), "is not text in UTF-8"),
        (bomb().encode("cp037"), "is not"),  # EBCDIC, in which no character is where ASCII has it
        (b"\xef\xbb\xbf" + bomb().encode(), "declares a document type or entities"),
        (b"<annotation>&x;</annotation>", "is not valid XML (undefined entity"),
        (b"", "is not valid XML"),
        (b"<annotation><object>", "is not valid XML"),
        (b"hello", "is not valid XML"),
        (b"\xff\xd8\xff\xe0 a picture", "is not text in UTF-8"),
        (b"<html><body/></html>", "its root is <html>, not <annotation>"),
        (b"<a>" * 20000 + b"</a>" * 20000, "its root is <a>"),
        (b"<annotation>" + b" " * 2**20 + b"</annotation>", "has more than 1,048,576 bytes"),
        (b"<annotation><object/></annotation>", "an <object> has no <name>"),
        (b"<annotation><object><name> </name></object></annotation>", "an <object> has no <name>"),
        (xml([("dog", "maybe")]).encode(), "<difficult> is 'maybe', not 0 or 1"),
        (
            xml([("Dog", 0)]).encode(),
            "the class 'Dog' is not in the list of 20 classes; did you mean 'dog'?",
        ),
        (xml([("head", 0)]).encode(), "the class 'head' is not in the list of 20 classes"),
        (xml([("x" * 10**5, 0)]).encode(), "is not in the list of 20 classes"),
    ],
)
def test_xml_that_is_refused(build, folder, content, expected):
    path = folder / "Annotations" / "000005.xml"
    path.write_bytes(content)
    message = build.fault()
    assert message.startswith(str(path))
    assert expected in message


def test_the_encoding_a_file_claims_cannot_hide_anything(build, folder):
    path = folder / "Annotations" / "000005.xml"
    path.write_text("<?xml version='1.0' encoding='utf-7'?>" + xml([("sofa", 0)]))
    assert labels(build().train)[1] == {"sofa": 1}


def test_deep_nesting_inside_an_annotation_is_harmless(build, folder):
    path = folder / "Annotations" / "000005.xml"
    path.write_text("<annotation>" + "<object>" * 50000 + "</object>" * 50000 + "</annotation>")
    assert "an <object> has no <name>" in build.fault()


def test_a_listed_image_without_xml(build, folder):
    (folder / "Annotations" / "000007.xml").unlink()
    assert build.fault().startswith(
        f"{folder / 'Annotations' / '000007.xml'} is absent, though its image is listed"
    )


def test_xml_that_cannot_be_read(build, folder):
    path = folder / "Annotations" / "000007.xml"
    path.unlink()
    path.mkdir()
    assert f"{path} cannot be read" in build.fault()


def test_absent_images_are_counted_and_the_case_of_a_name_matters(build, folder):
    images = folder / "JPEGImages"
    (images / "000012.jpg").rename(images / "000012.JPG")
    (images / "000005.jpg").unlink()
    message = build.fault()
    first = images / "000012.jpg"
    assert message.startswith(f"{folder}: 2 of 4 listed images are absent, the first is {first}")


def test_an_image_that_is_none_is_named(build, folder):
    (folder / "JPEGImages" / "000020.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"000020\.jpg: an empty file"):
        fixed_sample(build().val.dataset, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "names no image"),
        (b" \n\n", "names no image"),
        (
            b"000005\n000007\n\n000005\n",
            "line 4: the image 000005.jpg is listed twice, first in line 1",
        ),
        (b"../../000005\n", "line 1: '../../000005' is not an image id"),
        (b"000007\n/etc/passwd\n", "line 2: '/etc/passwd' is not an image id"),
        (b"..\\000005\n", "is not an image id"),
        (b"\xff\xfe0\x000\x00", "is not UTF-8 text"),
    ],
)
def test_lists_that_are_refused(build, folder, text, expected):
    path = folder / "ImageSets" / "Main" / "trainval.txt"
    path.write_bytes(text)
    message = build.fault()
    assert message.startswith(str(path))
    assert expected in message


def test_files_and_folders_that_are_missing(build, folder, tmp_path):
    message = "ImageSets/Main/tets.txt cannot be read (No such file or directory)"
    assert message in build.fault(val="tets")
    (folder / "JPEGImages").rename(folder / "elsewhere")
    assert f"{folder / 'JPEGImages'} cannot be listed" in build.fault()
    (folder / "Annotations").rename(folder / "away")
    assert f"{folder / 'Annotations'} cannot be read" in build.fault()
    assert "is not a folder; set data.root" in build.fault(root=str(tmp_path / "nowhere"))
    (tmp_path / "bare").mkdir()
    assert "is empty" in build.fault(root=str(tmp_path / "bare"))
    assert "holds no VOC2007" in build.fault(root=str(folder / "elsewhere"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission(build, folder):
    for path in (
        folder / "ImageSets" / "Main" / "trainval.txt",
        folder / "Annotations" / "000005.xml",
    ):
        path.chmod(0)
        assert f"{path} cannot be read (Permission denied)" in build.fault()
        path.chmod(0o644)


@pytest.mark.parametrize("name", ["difficult_train", "difficult_val"])
def test_another_meaning_is_refused(build, name):
    with pytest.raises(
        ConfigError, match=f"data.{name}: 'maybe' is not one of negative, positive, ignore"
    ):
        build(**{name: "maybe"})


def test_the_table_is_sparse_and_small(build):
    dataset = build().train.dataset
    assert dataset.storage.files.dtype == np.dtype("S15")
    assert len(dataset.labels.values) == 4  # statements, one of them about a difficult object


def test_an_id_with_a_nul(build, folder):
    (folder / "ImageSets" / "Main" / "trainval.txt").write_bytes(b"000012\n0000\x0005\n")
    assert "trainval.txt, line 2: '0000\\x0005' is not an image id" in build.fault()
