from pathlib import Path

import pytest
import torch
from PIL import Image
from readers import Reader, write_picture

from mldec.data.readers import nuswide as module
from mldec.data.readers.nuswide import nuswide_official
from mldec.data.types import fixed_sample

CONCEPTS = ["cat", "sea"]
TAGS = ["sky", "cat", "dog"]  # "cat" is both: the human label counts
# image -> (concepts, tags)
TRAIN = {
    "actor/0001_11.jpg": ("10", "100"),
    "actor/0002_12.jpg": ("11", "010"),
    "b/0003_13.jpg": ("00", "101"),
}
TEST = {"b/0001_21.jpg": ("01", "110"), "actor/0009_22.jpg": ("00", "001")}


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "official"
    for folder in ("ImageList", "Groundtruth/TrainTestLabels", "NUS_WID_Tags", "ConceptsList"):
        (root / folder).mkdir(parents=True)
    (root / "ConceptsList" / "Concepts81.txt").write_text("\n".join(CONCEPTS) + "\n")
    (root / "NUS_WID_Tags" / "TagList1k.txt").write_text("\r\n".join(TAGS) + "\r\n")
    for split, images in (("Train", TRAIN), ("Test", TEST)):
        listed = "".join(path.replace("/", "\\") + "\r\n" for path in images)
        (root / "ImageList" / f"{split}Imagelist.txt").write_text(listed)
        tags = "".join("\t".join(tags) + "\t\n" for _, tags in images.values())
        (root / "NUS_WID_Tags" / f"{split}_Tags1k.dat").write_text(tags)
        for place, concept in enumerate(CONCEPTS):
            text = "".join(said[place] + "\n" for said, _ in images.values())
            (root / "Groundtruth" / "TrainTestLabels" / f"Labels_{concept}_{split}.txt").write_text(
                text
            )
        for path in images:
            write_picture(root / "Flickr" / path)
    torch.save(torch.arange(1.0, 13.0).reshape(3, 4), root / "wordvec_array.pth")
    return root


@pytest.fixture
def build(root):
    return Reader(nuswide_official, root, "NUS-WIDE")


def targets(split):
    names = [Path(split.dataset.name(index)).name for index in range(len(split.dataset))]
    return {
        name: fixed_sample(split.dataset, index)[1].tolist() for index, name in enumerate(names)
    }


def test_trap_16_backslashes_and_the_labels_of_both_kinds(build, root):
    data = build()
    assert data.train.classes.names == ("dog", "sky")
    assert data.val.classes.names == ("cat", "dog", "sea", "sky")
    assert targets(data.train) == {
        "0001_11.jpg": [0, 1],
        "0003_13.jpg": [1, 1],
    }  # the other has concepts only
    assert targets(data.val) == {
        "0001_21.jpg": [0, 0, 1, 1],
        "0009_22.jpg": [0, 1, 0, 0],
    }  # not its tag "cat"
    assert data.train.dataset.name(0) == str(root / "Flickr" / "actor" / "0001_11.jpg")
    assert torch.equal(data.train.classes.queries, data.val.classes.queries[[1, 3]])


def test_only_images_with_an_unseen_concept(build):
    assert list(targets(build(val_images="unseen").val)) == ["0001_21.jpg"]


def test_absent_images_are_dropped_and_counted(build, root, caplog):
    (root / "Flickr" / "actor" / "0001_11.jpg").unlink()
    data = build()
    assert list(targets(data.train)) == ["0003_13.jpg"]
    assert len(data.val.dataset) == 2
    assert (
        "Train: 1 of 3 listed images are absent and left out, the first is actor/0001_11.jpg"
        in caplog.text
    )
    (root / "Flickr" / "b" / "0003_13.jpg").rename(root / "Flickr" / "b" / "gone")
    message = build.fault()
    assert message.startswith(str(root))
    assert message.endswith("): 0 of 1 training images have a seen class")
    assert "is not a folder; set data.images" in build.fault(images="nowhere")
    (root / "bare").mkdir()
    assert "none of the 3 images of Train is there" in build.fault(images="bare")


def test_images_may_have_the_names_of_the_tarball(build, root):
    (root / "images").mkdir()
    for number in (11, 13, 21, 22):
        Image.new("RGB", (9, 6)).save(root / "images" / f"{number}7_{number}_abc_m.jpg")
    data = build(images="images")
    assert targets(data.train) == {"117_11_abc_m.jpg": [0, 1], "137_13_abc_m.jpg": [1, 1]}
    assert targets(data.val) == {"217_21_abc_m.jpg": [0, 0, 1, 1], "227_22_abc_m.jpg": [0, 1, 0, 0]}


def test_a_second_start_parses_nothing(build, monkeypatch):
    first = targets(build().train)
    monkeypatch.setattr(module, "_tags", None)
    assert targets(build().train) == first


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "ImageList/TestImagelist.txt",
            b"..\\a.jpg\nb.jpg\n",
            "line 1: '..\\\\a.jpg' is not a path inside",
        ),
        ("ImageList/TestImagelist.txt", b"\xff.jpg\n", "is not UTF-8 text"),
        ("ImageList/TestImagelist.txt", b"a\\1_1.jpg\n", "has 2 lines for 1 listed images"),
        ("NUS_WID_Tags/Test_Tags1k.dat", b"1 0 1\n", "has 1 lines for 2 listed images"),
        ("NUS_WID_Tags/Test_Tags1k.dat", b"1 0\n1 0 1\n", "line 1: 2 characters, not 3 of 0 and 1"),
        (
            "NUS_WID_Tags/Test_Tags1k.dat",
            b"1 0 2\n1 0 1\n",
            "line 1: 3 characters, not 3 of 0 and 1",
        ),
        ("NUS_WID_Tags/TagList1k.txt", b"sky\nsky\ndog\n", "a tag or concept is named twice"),
        (
            "Groundtruth/TrainTestLabels/Labels_sea_Test.txt",
            b"1\n",
            "Labels_sea_Test.txt: 1 characters, not 2",
        ),
        (
            "Groundtruth/TrainTestLabels/Labels_sea_Test.txt",
            None,
            "Labels_sea_Test.txt cannot be read",
        ),
        ("ConceptsList/Concepts81.txt", b"cat\n../sea\n", "'../sea' is not a path inside"),
        ("ConceptsList/Concepts81.txt", None, "Concepts81.txt cannot be read"),
    ],
)
def test_files_that_cannot_be(build, root, file, content, message):
    if content is None:
        (root / file).unlink()
    else:
        (root / file).write_bytes(content)
    assert message in build.fault()
