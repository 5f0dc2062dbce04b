"""What is counted and what is called a fault: by plain loops, and by the command on small data."""

import json
import pickle
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import one_line, write_coco

from mldec.config.compose import config_dir
from mldec.data.labels import from_dense, from_single
from mldec.data.types import Classes, Split
from mldec.names import COCO_NAMES, VOC
from mldec.tools.check_data import examine
from mldec.tools.check_data.examine import (
    OFFICIAL,
    bar_chart,
    label_faults,
    split_statistics,
)
from mldec.tools.pages import NAME_LENGTH, save

NAMES = ("thing 0", "thing 1", "thing 2")
DENSE = np.array([[1, 0, -1], [0, 0, 0], [1, 1, 0], [-1, 0, 0]], np.int8)
PUBLISHED = "82,081 or 82,783 or 117,266 or 118,287"


def split_of(labels, *, exclusive=False):
    class Named:
        def __len__(self):
            return len(labels)

        def name(self, index):
            return f"image {index}"

    dataset = Named()
    return Split(dataset, Classes(NAMES, exclusive))


@pytest.mark.parametrize(
    ("labels", "exclusive", "fault"),
    [
        (from_dense(np.array([[1, 0, -1]], np.int8)), False, None),
        (
            from_dense(np.array([[1, 0, 0], [0, 2, 0]], np.int8)),
            False,
            "1 labels out of range, the first of image 1",
        ),
        (from_single(np.array([0, 2, 3]), 3), True, "1 labels out of range, the first of image 2"),
        (from_single(np.array([0, -1]), 3), True, "1 labels out of range, the first of image 1"),
        (from_single(np.array([0, 2]), 3), True, None),
        (
            from_dense(np.array([[1, 1, 0], [0, 0, 0]], np.int8)),
            True,
            "2 images without exactly one label, the first is image 0",
        ),
    ],
)
def test_impossible_labels(labels, exclusive, fault):
    split = split_of(labels, exclusive=exclusive)
    assert label_faults(split, labels) == ([fault] if fault else [])
    if fault and "exactly one" in fault:
        assert label_faults(split, labels, several=True) == []


def test_statistics_are_those_of_a_loop():
    labels = from_dense(DENSE)
    per_class = Counter(NAMES[k] for row in DENSE for k, value in enumerate(row) if value == 1)
    per_image = [sum(value == 1 for value in row) for row in DENSE]
    assert split_statistics(split_of(labels), labels) == {
        "images": 4,
        "classes": 3,
        "positives": sum(per_image),
        "negatives_stated": 0,  # 0 is what the entries that are not listed have
        "images_per_class": {"min": 0, "median": 1.0, "max": 2},
        "labels_per_image": {"min": 0, "mean": 0.75, "max": 2},
        "images_without_label": per_image.count(0),
        "classes_without_positive": [name for name in NAMES if name not in per_class],
    }
    partial = from_dense(DENSE, default=-1)
    stated = split_statistics(split_of(partial), partial)
    assert stated["negatives_stated"] == int((DENSE == 0).sum())


def test_published_counts_are_of_options_that_exist():
    assert set(OFFICIAL) <= {path.stem for path in Path(config_dir(), "data").glob("*.yaml")}
    assert OFFICIAL["coco"][2] == {len(COCO_NAMES)}
    assert OFFICIAL["voc2007"][2] == OFFICIAL["voc2012"][2] == {len(VOC)}


# -------------------------------------------------------------------------------------- the charts


def written(figure, path):
    """Write a figure and return the pixels of the file: uint8 [H, W, 3]."""
    save(figure, path)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_bars_have_names_and_counts_the_largest_on_top(tmp_path):
    names = ["$x^2$", "two\nlines" * 30, "dog"]
    figure = bar_chart(np.array([3, 0, 1200]), names, r"train: $\frac{$")
    assert written(figure, tmp_path / "bars.png").shape[1] == 800
    [axes] = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [1200, 3, 0]
    assert [text.get_text() for text in axes.texts] == ["1,200", "3", "0"]
    labels = axes.get_yticklabels()
    assert [label.get_text() for label in labels][:2] == ["dog", "$x^2$"]
    assert not labels[1].get_parse_math()
    assert len(labels[2].get_text()) <= NAME_LENGTH
    assert labels[2].get_text().isprintable()

    # Of many classes only the distribution is legible.
    many = bar_chart(np.arange(9_605), [str(index) for index in range(9_605)], "title")
    assert written(many, tmp_path / "bars.png").shape == (600, 800, 3)
    [outline] = many.axes[0].patches
    assert outline.get_data().values.tolist() == list(range(9_605))[::-1]


# ------------------------------------------------------------------------------------- the command


@pytest.fixture
def root(tmp_path):
    """Digits in the MS-COCO layout, of which every image is another one."""
    write_coco(tmp_path / "coco")
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / "coco").rglob("*.jpg")):
        Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).save(path)
    return tmp_path / "coco"


@pytest.fixture
def check(cli, root, tmp_path):
    def check(*args):
        words = ["data=coco", f"data.root={root}", f"data.cache_dir={tmp_path}", "train.workers=0"]
        return cli("check_data", *words, *args)

    return check


def image(root, number, split="train2014"):
    return root / split / f"COCO_{split}_{number:012}.jpg"


def test_a_sound_tree_with_a_class_without_positives(check, root, tmp_path):
    for file in (root / "annotations").glob("instances_*.json"):
        content = json.loads(file.read_text())
        content["categories"].append({"id": 90, "name": "unicorn"})
        file.write_text(json.dumps(content))

    status, out, err = check("--json", tmp_path / "r.json", "--out", tmp_path / "pictures")
    assert status == 0, err
    assert f"train: 12 (published: {PUBLISHED}) images, 4 (published: 80) classes" in out
    assert "images per class  0 to 4, median 4" in out
    assert "labels per image  1 to 1, mean 1.00; 0 images without one" in out
    assert out.count("without positives 1 classes: unicorn") == 2
    assert out.endswith("2 warnings, no errors\n")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["faults"] == []
    assert ["'unicorn'" in warning for warning in report["warnings"]] == [True, True]
    assert check("--strict", "--decode", "0")[0] == 3
    assert report["train"]["images_per_class"] == {"min": 0, "median": 4, "max": 4}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        *("samples.png", "train_classes.png", "val_classes.png")
    }
    with Image.open(tmp_path / "pictures" / "samples.png") as samples:
        assert samples.size == (1200, 960)  # four rows of six images
        assert len(samples.getcolors(1 << 24)) > 1_000


def test_without_matplotlib_only_the_charts_are_refused_and_before_anything_is_read(
    check, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = check("--out", tmp_path / "pictures")
    assert (status, out) == (1, "")
    one_line(err, "--out: a chart: matplotlib", "pip install -e '.[plot]'")
    assert check("--json", tmp_path / "r.json")[0] == 0


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(check, tmp_path):
    (tmp_path / "file").touch()
    status, out, err = check("--out", tmp_path / "file")
    assert (status, out) == (1, "")
    one_line(err, f"--out {tmp_path / 'file'}: ", "is a file; name a folder")


def test_without_warnings_nothing_is_wrong(check):
    status, out, _ = check("--strict", "--decode", "0")
    assert status == 0
    assert out.endswith("nothing is wrong\n")


def test_unsupported_files_are_in_the_last_lines_and_in_the_report(cli, tmp_path):
    root = tmp_path / "photos"
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            Image.new("RGB", (9, 9), (len(split), len(name), name == "cat")).save(
                root / split / name / "1.png"
            )
    (root / "train" / "dog" / "2.heic").touch()
    words = ["data=folders", f"data.root={root}", f"data.cache_dir={tmp_path}", "train.workers=0"]
    status, out, _ = cli("check_data", *words, "--json", str(tmp_path / "r.json"))
    assert status == 0
    assert "1 .heic (such as dog/2.heic)" in "".join(out.splitlines()[-2:])
    [warning] = json.loads((tmp_path / "r.json").read_text())["warnings"]
    assert "1 .heic (such as dog/2.heic)" in warning


def test_the_settings_of_train_show_what_its_recipe_sees(cli, root, tmp_path, monkeypatch):
    drawn = []
    sheet = bar_chart(np.ones(1), ["a"], "sheet")
    monkeypatch.setattr(examine, "sample_sheet", lambda batches, _: drawn.append(batches) or sheet)
    words = ["data=coco", f"data.root={root}", f"data.cache_dir={tmp_path}", "train.workers=0"]
    words += ["+experiment=finetune_frozen", "train.epochs=3", "name=mine", "--decode", "0"]
    for more in ([], ["train.cache_features=false", "mix.mixup=1"]):
        out = cli.out("check_data", *words, *more, "--out", str(tmp_path / "charts"))
        assert f"train: 12 (published: {PUBLISHED}) images" in out
    plain, mixed = drawn

    # The recipe has no augmentation.
    assert torch.equal(plain["as in training"].images, plain[""].images)
    assert not torch.equal(mixed["as in training"].images, plain[""].images)

    err = cli.fault("check_data", "+experiment=finetune_frosen", f"data.root={root}")
    one_line(err, "finetune_frozen")
    one_line(cli.fault("check_data", *words, "optim.lr=x"), "optim.lr")


def test_images_that_do_not_decode_are_named_and_counted(check, root, tmp_path):
    whole = image(root, 3).read_bytes()
    image(root, 3).write_bytes(whole[: len(whole) // 2])
    image(root, 5).write_bytes(b"")
    image(root, 6, "val2014").write_text("a web page")
    status, out, err = check("--json", tmp_path / "r.json")
    assert status == 1
    one_line(err, "2 images of train cannot be decoded; 1 images of val cannot be decoded")
    assert f"{image(root, 3)}: " in out
    assert f"{image(root, 5)}: an empty file" in out
    assert len(json.loads((tmp_path / "r.json").read_text())["train"]["cannot_be_decoded"]) == 2
    for count in ("0", "1"):  # the first image is sound
        assert check("--decode", count)[0] == 0


def test_the_same_bytes_twice_and_in_both_splits(check, root):
    shutil.copy(image(root, 2), image(root, 9))
    shutil.copy(image(root, 4), image(root, 7, "val2014"))
    status, out, err = check()
    assert status == 1
    one_line(err, "1 images of train are copies; 1 images are in train and in val")
    assert f"{image(root, 9)} is a copy of {image(root, 2)}" in out
    assert f"{image(root, 4)} is also {image(root, 7, 'val2014')}" in out


@pytest.mark.parametrize(("category", "labels"), [(5, "the same"), (1, "different")])
def test_a_file_that_is_listed_twice_is_called_that(check, root, category, labels):
    path = root / "annotations" / "instances_train2014.json"
    content = json.loads(path.read_text())
    content["images"].append({"id": 99, "file_name": image(root, 2).name})
    content["annotations"].append({"id": 99, "image_id": 99, "category_id": category})
    path.write_text(json.dumps(content))
    status, out, err = check()
    assert status == 1
    one_line(err, "1 images of train are listed twice")
    assert f"{image(root, 2)} is listed twice, with {labels} labels" in out
    assert "a copy of" not in out


def test_copies_are_found_where_pictures_are_augmented_and_come_from_one_file(cli, tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3072), dtype=np.uint8)
    for split, rows in (("train", [0, 1, 2, 0]), ("test", [3, 2])):
        content = {"data": pixels[rows], "fine_labels": [0] * len(rows)}
        (folder / split).write_bytes(pickle.dumps(content, protocol=3))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["apple"]}, protocol=3))
    err = cli.fault("check_data", "data=cifar100", f"data.root={tmp_path}", "train.workers=0")
    one_line(err, "1 images of train are copies; 1 images are in train and in val")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "no dataset is chosen: pass data=NAME"),
        (["data=digits", "--json", "/nowhere/r.json"], "cannot write /nowhere/r.json"),
    ],
)
def test_wrong_arguments_are_one_line(cli, args, part):
    one_line(cli.fault("check_data", *args), part)
