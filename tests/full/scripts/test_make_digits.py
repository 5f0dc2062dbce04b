"""The files of the script, read without the package's readers, against the scenes."""

import argparse
import ast
import csv
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from mldec.data.digits import NAMES
from mldec.data.table import VOC

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_digits.py"
spec = importlib.util.spec_from_file_location("make_digits", SCRIPT)
assert spec is not None
assert spec.loader is not None
make_digits = importlib.util.module_from_spec(spec)
sys.modules["make_digits"] = make_digits  # dataclasses look their module up
spec.loader.exec_module(make_digits)

TRAIN, VAL = 30, 12
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(layout: str, *args: str, out: str = "out") -> Path:
        counts = ["--train", str(TRAIN), "--val", str(VAL), "--size", "32"]
        monkeypatch.setattr(
            sys,
            "argv",
            ["make_digits.py", "--layout", layout, str(tmp_path / out), *counts, *args],
        )
        make_digits.main()
        return tmp_path / out

    return make


def scenes(**least_and_most: int) -> list:
    args = argparse.Namespace(train=TRAIN, val=VAL, size=32, seed=0, layout="")
    return list(make_digits.scenes(args, **least_and_most))


def check_image(path: Path, scene) -> None:
    with Image.open(path) as image:
        assert (image.format, image.size) == ("JPEG", (32, 32))
        far = np.abs(np.asarray(image, float) - np.asarray(scene.image, float)).mean()
    assert far < 12, "another picture than the scene's"


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "data.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_coco(make: Make) -> None:
    out, drawn = make("coco"), scenes()
    seen = set()
    for split, count in (("train", TRAIN), ("val", VAL)):
        content = json.loads((out / "annotations" / f"instances_{split}2014.json").read_text())
        names = {category["id"]: category["name"] for category in content["categories"]}
        assert [names[key] for key in sorted(names)] == list(NAMES)
        assert len(content["images"]) == count
        assert len({entry["id"] for entry in content["annotations"]}) == len(content["annotations"])
        for image, scene in zip(
            content["images"], [scene for scene in drawn if scene.split == split], strict=True
        ):
            check_image(out / f"{split}2014" / image["file_name"], scene)
            assert image["file_name"] == f"COCO_{split}2014_{image['id']:012}.jpg"
            annotations = [
                entry for entry in content["annotations"] if entry["image_id"] == image["id"]
            ]
            boxes = [
                (left, top, left + w, top + h)
                for left, top, w, h in (entry["bbox"] for entry in annotations)
            ]
            objects = [
                (NAMES.index(names[entry["category_id"]]), box)
                for entry, box in zip(annotations, boxes, strict=True)
            ]
            assert objects == scene.objects
            assert all(
                entry["area"] == entry["bbox"][2] * entry["bbox"][3] for entry in annotations
            )
            seen.add(image["id"])
    assert len(seen) == TRAIN + VAL


def test_voc(make: Make) -> None:
    root, drawn = make("voc") / "VOCdevkit" / "VOC2007", scenes()
    main = root / "ImageSets" / "Main"
    ids = {
        part: (main / f"{part}.txt").read_text().split()
        for part in ("train", "val", "trainval", "test")
    }
    assert ids["train"] + ids["val"] == ids["trainval"]
    assert (len(ids["trainval"]), len(ids["test"])) == (TRAIN, VAL)
    assert len(list(main.iterdir())) == 4 * 21
    difficult = 0
    for name, scene in zip(ids["trainval"] + ids["test"], drawn, strict=True):
        check_image(root / "JPEGImages" / f"{name}.jpg", scene)
        objects = (
            ElementTree.parse(root / "Annotations" / f"{name}.xml").getroot().findall("object")
        )
        corners = [
            [int(node.findtext(f"bndbox/{tag}", "")) for tag in ("xmin", "ymin", "xmax", "ymax")]
            for node in objects
        ]
        labels = [VOC.index(node.findtext("name")) for node in objects]
        boxes = [(left - 1, top - 1, right, bottom) for left, top, right, bottom in corners]
        assert list(zip(labels, boxes, strict=True)) == scene.objects
        hard = [node.findtext("difficult") == "1" for node in objects]
        difficult += sum(hard)
        part = "trainval" if scene.split == "train" else "test"
        for number, class_name in enumerate(VOC):
            flags = dict(
                line.split()
                for line in (main / f"{class_name}_{part}.txt").read_text().splitlines()
            )
            own = [flag for label, flag in zip(labels, hard, strict=True) if label == number]
            assert int(flags[name]) == (-1 if not own else 0 if all(own) else 1)
    assert difficult > 0
    assert "000001  1\n" in "".join((main / f"{name}_train.txt").read_text() for name in VOC)
    assert set((main / "tvmonitor_test.txt").read_text().split()[1::2]) == {"-1"}


def test_openimages(make: Make) -> None:
    out, drawn = make("openimages"), scenes()
    table = rows(out)
    assert list(table[0]) == ["image_id", "class_list", "class_list_neg", "split"]
    names = torch.load(out / "mid_to_classes.pth", weights_only=True)
    assert set(names.values()) == set(NAMES)
    verified = 0
    for row, scene in zip(table, drawn, strict=True):
        check_image(out / row["image_id"], scene)
        assert row["split"] == scene.split
        assert row["image_id"].split("/")[0] == {"train": "train", "val": "test"}[scene.split]
        present = {NAMES.index(names[mid]) for mid in ast.literal_eval(row["class_list"])}
        absent = {NAMES.index(names[mid]) for mid in ast.literal_eval(row["class_list_neg"])}
        assert present <= set(scene.digits)
        assert not absent & set(scene.digits)
        verified += len(present) + len(absent)
    assert 0.5 < verified / (10 * len(table)) < 0.7  # the rest is not annotated


def test_nuswide(make: Make) -> None:
    out, drawn = make("nuswide"), scenes(least=1)
    table = rows(out)
    assert list(table[0]) == ["filepath", "label", "split_name"]
    vectors = torch.load(out / "wordvec_array.pth", weights_only=True)
    names = sorted(f"{colour}{digit}" for colour in make_digits.COLOURS for digit in NAMES)
    assert vectors.shape == (14, len(names))
    assert (out / "wordvec_array.txt").read_text().splitlines() == names
    assert torch.allclose(vectors.norm(dim=0), torch.ones(len(names)))
    unseen = json.loads((out / "benchmark_81_v0.json").read_text())
    assert list(unseen) == ["test class"]
    assert set(unseen["test class"]) < set(names)
    seen = [index for index, name in enumerate(names) if name not in unseen["test class"]]
    assert (
        (vectors[:, seen] > 0).sum(1) > 0
    ).all()  # every part of an unseen class is learnt from seen ones
    assert vectors[:, names.index("redfive")] @ vectors[:, names.index("redsix")] == pytest.approx(
        0.5
    )
    for row, scene in zip(table, drawn, strict=True):
        tags = row["label"].strip("[]").split(", ")
        colours = [colour for colour in make_digits.COLOURS if tags[0].startswith(colour)]
        assert sorted(tags) == sorted(colours[0] + NAMES[digit] for digit in scene.digits)
        with Image.open(out / row["filepath"]) as image:
            light = np.asarray(image, float).mean((0, 1)) / np.asarray(scene.image, float).mean(
                (0, 1)
            )
        assert np.abs(light - make_digits.COLOURS[colours[0]]).max() < 0.1
        assert row["split_name"] == scene.split


def test_imagenet(make: Make) -> None:
    out, drawn = make("imagenet"), scenes(least=1, most=1)
    pairs = [
        line.split(" ", 1) for line in (out / "LOC_synset_mapping.txt").read_text().splitlines()
    ]
    assert [name for _, name in pairs] == list(NAMES)
    assert sorted(wnid for wnid, _ in pairs) == [wnid for wnid, _ in pairs]
    for split, count in (("train", TRAIN), ("val", VAL)):
        assert sorted(path.name for path in (out / split).iterdir()) == [wnid for wnid, _ in pairs]
        files = sorted(
            (out / split).rglob("*.JPEG"), key=lambda path: int(path.stem.rpartition("_")[2])
        )
        assert len(files) == count
        for file, scene in zip(
            files, [scene for scene in drawn if scene.split == split], strict=True
        ):
            assert [int(file.parent.name[1:])] == scene.digits
            check_image(file, scene)


def test_csv(make: Make) -> None:
    out, drawn = make("csv"), scenes()
    for row, scene in zip(rows(out), drawn, strict=True):
        check_image(out / row["path"], scene)
        assert [NAMES.index(name) for name in row["labels"].split(";") if name] == scene.digits
        assert row["split"] == scene.split


@pytest.mark.parametrize("layout", sorted(make_digits.LAYOUTS))
def test_the_same_words_give_the_same_files(make: Make, layout: str) -> None:
    one, two, other = (
        make(layout, out="a"),
        make(layout, out="b"),
        make(layout, "--seed", "1", out="c"),
    )

    def content(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    assert content(one) == content(two) != content(other)


def test_an_existing_folder_and_wrong_numbers_are_refused_in_one_line(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    for args, message in (
        ((), f"mldec: {tmp_path / 'out'} exists and is not an empty folder: choose another one\n"),
        (("--train", "0"), "mldec: --train 0: give a whole number from 2 on\n"),
        (("--size", "4"), "mldec: --size 4: give a whole number from 16 on\n"),
    ):
        with pytest.raises(SystemExit) as stop:
            make("csv", *args)
        assert stop.value.code == 1
        assert capsys.readouterr().err == message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
