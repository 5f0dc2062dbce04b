"""The command `mldec check-data`: counts, errors and warnings of small datasets."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from support import one_line, write_coco

from mldec.data.labels import from_dense, from_single
from mldec.data.types import Classes, Split
from mldec.tools.check_data.examine import (
    ImageCheck,
    _find_duplicates,
    label_fault,
    split_statistics,
)

NAMES = ("thing 0", "thing 1", "thing 2")
DENSE = np.array([[1, 0, -1], [0, 0, 0], [1, 1, 0], [-1, 0, 0]], np.int8)


def split_of(labels, *, exclusive=False):
    class Named:
        def __len__(self):
            return len(labels)

        def name(self, index):
            return f"image {index}"

    return Split(Named(), Classes(NAMES, exclusive))


@pytest.mark.parametrize(
    ("labels", "exclusive", "name"),
    [
        (from_dense(np.array([[1, 0, -1]], np.int8)), False, None),
        (from_dense(np.array([[1, 0, 0], [0, 2, 0]], np.int8)), False, "image 1"),
        (from_single(np.array([0, 2, 3]), 3), True, "image 2"),
        (from_single(np.array([0, -1]), 3), True, "image 1"),
        (from_single(np.array([0, 2]), 3), True, None),
        (from_dense(np.array([[1, 1, 0], [0, 0, 0]], np.int8)), True, "image 0"),
    ],
)
def test_invalid_labels_name_their_first_image(labels, exclusive, name):
    split = split_of(labels, exclusive=exclusive)
    fault = label_fault(split, labels)
    assert fault is None if name is None else fault.endswith(name)


def test_statistics_equal_loops():
    labels = from_dense(DENSE)
    per_class = Counter(NAMES[k] for row in DENSE for k, value in enumerate(row) if value == 1)
    per_image = [sum(value == 1 for value in row) for row in DENSE]
    assert split_statistics(split_of(labels), labels) == {
        "images": 4,
        "classes": 3,
        "positives": sum(per_image),
        "negatives_stated": 0,  # 0 is the default of unlisted labels
        "images_per_class": {"min": 0, "median": 1.0, "max": 2},
        "labels_per_image": {"min": 0, "mean": 0.75, "max": 2},
        "images_without_label": per_image.count(0),
        "classes_without_positive": [name for name in NAMES if name not in per_class],
        "images_of_class": {name: per_class[name] for name in NAMES},
    }
    partial = from_dense(DENSE, default=-1)
    statistics = split_statistics(split_of(partial), partial)
    assert statistics["negatives_stated"] == int((DENSE == 0).sum())


@pytest.fixture
def root(tmp_path):
    """Different random images in the MS-COCO layout."""
    write_coco(tmp_path / "coco")
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / "coco").rglob("*.jpg")):
        Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).save(path)
    return tmp_path / "coco"


@pytest.fixture
def check(cli, root, tmp_path):
    """Check the dataset; return the status, the output, the error and the JSON report."""

    def check(*args):
        words = ["data=coco", f"data.root={root}", f"data.cache_dir={tmp_path}", "train.workers=0"]
        result = cli("check_data", *words, *args, "--json", tmp_path / "r.json")
        return *result, json.loads((tmp_path / "r.json").read_text())

    return check


def image(root, number, split="train2014"):
    return root / split / f"COCO_{split}_{number:012}.jpg"


def test_class_without_positives_is_a_warning(check, root):
    assert check("--strict", "--decode", "0")[0] == 0
    for file in (root / "annotations").glob("instances_*.json"):
        content = json.loads(file.read_text())
        content["categories"].append({"id": 90, "name": "unicorn"})
        file.write_text(json.dumps(content))

    status, out, err, report = check()
    assert status == 0, err
    assert "train: 12 images" in out
    assert out.count("classes: unicorn") == 2
    assert report["faults"] == []
    assert ["'unicorn'" in warning for warning in report["warnings"]] == [True, True]
    assert report["train"]["images_per_class"] == {"min": 0, "median": 4, "max": 4}
    assert check("--strict", "--decode", "0")[0] == 3


def test_undecodable_images_are_listed(check, root):
    whole = image(root, 3).read_bytes()
    image(root, 3).write_bytes(whole[: len(whole) // 2])
    image(root, 5).write_bytes(b"")
    image(root, 6, "val2014").write_text("a web page")
    status, out, _, report = check()
    assert (status, len(report["faults"])) == (1, 2)
    assert str(image(root, 3)) in out
    train, val = (report[part]["cannot_be_decoded"] for part in ("train", "val"))
    assert (len(train), len(val)) == (2, 1)
    assert str(image(root, 5)) in train[1]
    for count in ("0", "1"):  # the first image is valid
        assert check("--decode", count)[0] == 0


def test_copies_and_images_in_both_splits_are_found(check, root):
    shutil.copy(image(root, 2), image(root, 9))
    shutil.copy(image(root, 4), image(root, 7, "val2014"))
    status, _, _, report = check()
    assert (status, len(report["faults"])) == (1, 2)
    copy = f"{image(root, 9)} is a copy of {image(root, 2)}, with different labels"
    assert report["train"]["copies"] == [copy]
    also = f"{image(root, 4)} is also {image(root, 7, 'val2014')}"
    assert report["in_both_splits"] == [also]
    assert len(report["similar"]) == 1


def test_file_listed_twice_is_no_copy():
    dataset = split_of(DENSE).dataset
    dataset.name = lambda index: "a.jpg" if index in (0, 2) else f"{index}.jpg"
    images = ImageCheck(np.arange(4), np.array([7, 8, 7, 8], np.uint64), {}, {})
    copies, listed_twice = _find_duplicates(dataset, from_dense(DENSE), images)
    assert listed_twice == ["a.jpg is listed twice, with different labels"]
    assert copies == ["3.jpg is a copy of 1.jpg, with different labels"]


def test_ids_of_file_listed_twice_are_named(cli, root):
    path = root / "annotations" / "instances_train2014.json"
    content = json.loads(path.read_text())
    content["images"].append({"id": 99, "file_name": image(root, 2).name})
    path.write_text(json.dumps(content))
    err = cli.fault("check_data", "data=coco", f"data.root={root}")
    one_line(err, "the id 2 and the id 99", str(path))


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "data=NAME"),
        (["data=digits", "--json", "/nowhere/r.json"], "/nowhere/r.json"),
        (["--checkpoint", __file__, "--strict"], "--strict"),
        (["+experiment=finetune_frosen"], "finetune_frozen"),
    ],
)
def test_invalid_arguments_raise_an_error(cli, here, args, part):
    status, out, err = cli("check_data", *args)
    assert (status, out) == (1, "")
    one_line(err, part)
