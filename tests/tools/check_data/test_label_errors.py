"""The command `mldec check-data --checkpoint`: the ranked labels, and the page of images."""

import base64
import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from markupsafe import escape
from PIL import Image
from support import CONFIGS, train_here

from mldec.tools.check_data.label_errors import COLUMNS

NAMES = ("red", "green", '<script>alert("&")</script>')


class LabelErrors(NamedTuple):
    """A dataset with wrong labels, and a run on one of two folds."""

    root: Path
    run: str  # folder of the run, which held out fold 1/2
    flipped: set[tuple[str, str]]  # file names and classes of wrong training labels


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Squares of mixed colors with 5 % wrong labels, and a run; tests must not change them."""
    folder = tmp_path_factory.mktemp("planted")
    root = folder / "mine"
    root.mkdir()
    rng = np.random.default_rng(0)
    present = rng.random((240, 3)) < 0.4
    flipped = rng.random((240, 3)) < 0.05
    rows = ["path,labels,split"]
    for number in range(240):
        pixels = 200 * present[number] + rng.integers(0, 50, (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
        labels = ";".join(NAMES[k] for k in np.flatnonzero(present[number] ^ flipped[number]))
        escaped = labels.replace('"', '""')
        rows.append(f'{number}.png,"{escaped}",{"train" if number < 200 else "val"}')
    (root / "data.csv").write_text("\n".join(rows) + "\n")

    settings = f"""+experiment=digits --config-dir={CONFIGS} plugins=[patches] backbone=patches
        head=gap loss=bce device=cpu data=csv data.root={root} data.cache_dir={folder}
        data.image_size=16 data.augment=none data.cutout=0 data.fold=1/2
        train.epochs=6 train.batch_size=16 train.workers=0 log.images=0 name=fold1"""
    outputs = train_here(folder, *settings.split())
    wrong = {(f"{number}.png", NAMES[k]) for number, k in np.argwhere(flipped[:200])}
    return LabelErrors(root, str(outputs / "fold1"), wrong)


@pytest.fixture
def rank_labels(cli, planted, tmp_path):
    """Run the command; return its output and the rows of its CSV file."""

    def run(*words):
        target = tmp_path / "errors.csv"
        own = ["--plugin", "patches", "device=cpu", "--checkpoint", planted.run]
        out = cli.out("check_data", *own, *words, "--errors", target)
        with target.open(newline="", encoding="utf-8") as file:
            return out, list(csv.DictReader(file))

    return run


def test_planted_errors_rank_first_in_all_outputs(planted, rank_labels, tmp_path):
    page = tmp_path / "new" / "pictures"
    out, rows = rank_labels("--json", tmp_path / "r.json", "--out", page)

    # The CSV file has each label once, most suspicious first.
    assert tuple(rows[0]) == COLUMNS
    report = json.loads((tmp_path / "r.json").read_text())
    images, labels = report["images"], report["labels"]
    assert 70 < images < 130
    assert labels == 3 * images
    assert [int(row["rank"]) for row in rows] == list(range(1, labels + 1))
    pairs = [(Path(row["image"]).name, row["class"]) for row in rows]
    assert len(set(pairs)) == labels
    flipped = planted.flipped & set(pairs)
    assert len(flipped & set(pairs[: labels // 10])) >= 0.8 * len(flipped)

    assert (report["checkpoint"], report["split"], report["left_out"]) == (planted.run, "val", [])
    for name, counts in report["per_class"].items():
        for key, label in (("present", "1"), ("absent", "0")):
            own = [row for row in rows if (row["class"], row["label"]) == (name, label)]
            assert counts[key] == len(own)
            assert counts[f"suspected_{key}"] == sum(row["suspected"] == "1" for row in own)
    suspected = sum(row["suspected"] == "1" for row in rows)
    assert report["suspected"] == suspected > 0
    assert f"{suspected} of {labels} labels" in out
    assert f"{float(rows[0]['probability']):10.3f}  {rows[0]['class']}, {rows[0]['image']}" in out
    assert rows[9]["image"] in out

    # The page is offline, escapes names, and has 60 images per section.
    text = (page / "label_errors.html").read_text()
    assert rows[0]["image"] in text
    assert str(escape(NAMES[2])) in text
    assert not any(part in text for part in ("<script", "<link", "<iframe", "http"))
    thumbnails = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    assert len(thumbnails) == 120
    with Image.open(io.BytesIO(base64.b64decode(thumbnails[0], validate=True))) as image:
        assert (image.format, image.size) == ("JPEG", (16, 16))

    assert rank_labels("--rows", "7")[1] == rows[:7]


def test_split_and_fold_select_the_images(planted, rank_labels):
    names = {}
    for split in ("val", "train"):
        out, rows = rank_labels("--rows", "all", "--split", split)
        names[split] = {row["image"] for row in rows}
        assert ("was trained on these images" in out) == (split == "train")
    assert not names["val"] & names["train"]
    assert len(names["val"] | names["train"]) == 200

    # data=NAME keeps the fold and the image size.
    again = ["data=csv", f"data.root={planted.root}", f"data.cache_dir={planted.root.parent}"]
    out, rows = rank_labels(*again)
    assert "pixels" not in out
    assert {row["image"] for row in rows} == names["val"]
    assert "other training data" in rank_labels("data.fold=null")[0]


def test_missing_labels_and_unreadable_images_are_skipped(planted, rank_labels, tmp_path):
    root = tmp_path / "mine"
    shutil.copytree(planted.root, root)
    header, *rows = (root / "data.csv").read_text().splitlines()
    rows = [f"{header},negatives"] + [f"{row}," for row in rows]
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    settings = [f"data.root={root}", f"data.cache_dir={tmp_path}"]

    # Absent labels are unknown.
    _, rows = rank_labels(*settings)
    assert {(row["label"], row["suspected"]) for row in rows} == {("1", "0")}

    name = Path(rows[0]["image"]).name
    (root / name).write_bytes(b"")
    out, _ = rank_labels(*settings, "--json", tmp_path / "r.json")
    assert str(root / name) in out
    assert len(json.loads((tmp_path / "r.json").read_text())["left_out"]) == 1
