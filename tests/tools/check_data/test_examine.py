"""The command on digits in the MS-COCO layout, sound and with one fault at a time."""

import json
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import one_line, write_coco

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree of which every image is another one."""
    write_coco(tmp_path / "coco")
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / "coco").rglob("*.jpg")):
        Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).save(path)
    return tmp_path / "coco"


@pytest.fixture
def check(cli: Cli, root: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    def check(*args: str | Path) -> tuple[int, str, str]:
        return cli(
            "check_data",
            "data=coco",
            f"data.root={root}",
            f"data.cache_dir={tmp_path}",
            "train.workers=0",
            *args,
        )

    return check


def image(root: Path, number: int, split: str = "train2014") -> Path:
    return root / split / f"COCO_{split}_{number:012}.jpg"


def test_a_sound_tree(check, tmp_path: Path) -> None:
    status, out, err = check("--json", tmp_path / "r.json", "--out", tmp_path / "pictures")
    assert status == 0, err
    published = "82,081 or 82,783 or 117,266 or 118,287"
    assert f"train: 12 (published: {published}) images, 3 (published: 80) classes" in out
    assert "val: 12 (published: 4,952 or 5,000 or 40,137 or 40,504) images" in out
    assert "images per class  4 to 4, median 4" in out
    assert "labels per image  1 to 1, mean 1.00; 0 images without one" in out
    assert out.endswith("nothing is wrong\n")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["faults"] == []
    assert report["train"]["images_per_class"] == {"min": 4, "median": 4, "max": 4}
    assert report["train"]["labels_per_image"] == {"min": 1, "mean": 1, "max": 1}
    sizes = {}
    for path in (tmp_path / "pictures").iterdir():
        with Image.open(path) as picture:
            sizes[path.name] = picture.size
            assert len(picture.getcolors(1 << 24)) > 2, f"{path} shows nothing"
    assert set(sizes) == {"samples.png"} | {
        f"{part}_{kind}.png" for part in ("train", "val") for kind in ("classes", "pairs")
    }
    assert sizes["samples.png"] == (1200, 960)  # four rows of six images


def test_without_matplotlib_only_the_charts_are_refused_and_before_anything_is_read(
    check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = check("--out", tmp_path / "pictures")
    assert status == 1
    one_line(err, "--out: the charts need matplotlib", "pip install 'mldec[plot]'")
    assert out == ""
    assert not (tmp_path / "pictures").exists()
    status, out, err = check("--json", tmp_path / "r.json")
    assert status == 0, err
    assert out.endswith("nothing is wrong\n")


def test_images_that_do_not_decode_are_named_and_counted(check, root: Path, tmp_path: Path) -> None:
    whole = image(root, 3).read_bytes()
    image(root, 3).write_bytes(whole[: len(whole) // 2])
    image(root, 5).write_bytes(b"")
    image(root, 6, "val2014").write_text("a web page")
    for args in ([], ["train.workers=2"]):
        status, out, err = check("--json", tmp_path / "r.json", *args)
        assert status == 1
        one_line(
            err,
            "data=coco is not as it should be: "
            "2 images of train cannot be decoded; 1 images of val cannot",
        )
        assert f"{image(root, 3)}: " in out
        assert f"{image(root, 5)}: an empty file" in out
        assert len(json.loads((tmp_path / "r.json").read_text())["train"]["cannot_be_decoded"]) == 2
    status, _, _ = check("--decode", "0")
    assert status == 0
    status, _, err = check("--decode", "1")  # the first image is sound
    assert status == 0, err


def test_the_same_bytes_twice_and_in_both_splits(check, root: Path) -> None:
    shutil.copy(image(root, 2), image(root, 9))
    shutil.copy(image(root, 4), image(root, 7, "val2014"))
    status, out, err = check()
    assert status == 1
    one_line(err, "1 images of train are copies; 1 images are in train and in val")
    assert f"{image(root, 9)} is a copy of {image(root, 2)}" in out
    assert f"{image(root, 4)} is also {image(root, 7, 'val2014')}" in out


@pytest.mark.parametrize(("category", "labels"), [(5, "the same"), (1, "different")])
def test_a_file_that_is_listed_twice_is_called_that(
    check, root: Path, category: int, labels: str
) -> None:
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


def test_the_settings_of_parts_that_are_not_used_are_held_against_them_too(check) -> None:
    status, _, err = check("head.num_grops=3")
    assert status == 1
    one_line(err, "head.num_grops: MLDecoder takes no such argument")


def test_a_class_without_positives_is_named_and_is_no_fault(check, root: Path) -> None:
    for split in ("train2014", "val2014"):
        file = root / "annotations" / f"instances_{split}.json"
        content = json.loads(file.read_text())
        content["categories"].append({"id": 90, "name": "unicorn"})
        file.write_text(json.dumps(content))
    status, out, err = check()
    assert status == 0, err
    assert out.count("without positives 1 classes: unicorn") == 2


def test_several_valid_labels_of_an_image_are_no_fault(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for number, wnid in enumerate(("n01440764", "n02119789"), 1):
            path = tmp_path / split / wnid / f"ILSVRC2012_val_{number:08}.JPEG"
            path.parent.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).save(path)
    (tmp_path / "real.json").write_text("[[0, 5], [278]]")
    args = [
        "data=imagenet",
        f"data.root={tmp_path}",
        f"data.real_labels={tmp_path}/real.json",
        "train.workers=0",
    ]
    status, out, err = cli("check_data", *args, f"data.cache_dir={tmp_path}")
    assert status == 0, err
    assert "labels per image  1 to 2, mean 1.50" in out


def test_copies_are_found_where_pictures_are_augmented_and_come_from_one_file(
    cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3072), dtype=np.uint8)
    for split, rows in (("train", [0, 1, 2, 0]), ("test", [3, 2])):
        content = {"data": pixels[rows], "fine_labels": [0] * len(rows)}
        (folder / split).write_bytes(pickle.dumps(content, protocol=3))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["apple"]}, protocol=3))
    status, _, err = cli("check_data", "data=cifar100", f"data.root={tmp_path}", "train.workers=0")
    assert status == 1
    one_line(err, "1 images of train are copies; 1 images are in train and in val")


def test_zero_shot_data_have_other_classes_in_validation(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [
        "--layout",
        "nuswide",
        "--train",
        "200",
        "--val",
        "60",
        "--size",
        "16",
        str(tmp_path / "data"),
    ]
    monkeypatch.setattr("sys.argv", ["make_digits", *args])
    runpy.run_path(
        str(Path(__file__).parents[3] / "scripts" / "make_digits.py"), run_name="__main__"
    )
    args = [
        "data=nuswide_zsl",
        f"data.root={tmp_path / 'data'}",
        f"data.cache_dir={tmp_path}",
        "train.workers=0",
    ]
    status, out, err = cli("check_data", *args, "--out", tmp_path / "pictures")
    assert status == 0, err
    assert "train: " in out
    assert ", 32 (published: 925 or 1,006) classes" in out
    assert ", 40 (published: 925 or 1,006) classes" in out


def test_what_the_reader_refuses_is_one_line(check, root: Path) -> None:
    image(root, 1).unlink()
    status, _, err = check()
    assert status == 1
    one_line(err, "1 of 12 listed images are absent", "DATASETS.md")


def test_the_sample_of_real_photos_is_sound(cli: Cli, sample_data: Path, tmp_path: Path) -> None:
    root = sample_data / "coco2014_mini"
    status, out, err = cli(
        "check_data",
        "data=coco",
        f"data.root={root}",
        f"data.cache_dir={tmp_path}",
        "train.workers=0",
    )
    assert status == 0, err
    published = "82,081 or 82,783 or 117,266 or 118,287"
    assert f"train: 59 (published: {published}) images, 80 (as published) classes" in out
    assert "val: 38 (published" in out
