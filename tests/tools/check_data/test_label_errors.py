"""The ranking of labels against loops and on planted errors; the command; the page of pictures."""

import base64
import csv
import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
from markupsafe import escape
from PIL import Image
from support import one_line

from mldec.evaluators.label_errors import calibrated, platt, rank, suspected_labels
from mldec.tools.check_data.label_errors import COLUMNS, Suspect, page

EVIL = '<script>alert("&")</script>\'\x1b[31m\n\udcff'
SHOWN = '<script>alert("&")</script>\'?[31m??'


def planted(*, images=600, classes=8, seed=0):
    """Return logits [N, K], labels of which 5 % are flipped, and which those are.

    As after training with the asymmetric loss, the logits of each class have a scale and an offset
    of their own.
    """
    rng = np.random.default_rng(seed)
    truth = rng.random((images, classes)) < rng.uniform(0.03, 0.4, classes)
    evidence = 2.5 * (2 * truth - 1) + rng.normal(size=truth.shape)
    logits = evidence * rng.uniform(0.1, 2, classes) + rng.uniform(-3, 3, classes)

    flipped = np.zeros(truth.size, bool)
    flipped[rng.permutation(truth.size)[: truth.size // 20]] = True
    flipped = flipped.reshape(truth.shape)
    return logits.astype(np.float32), (truth ^ flipped).astype(np.int8), flipped


def test_a_class_with_one_label_only_has_probabilities_near_it_and_no_suspects():
    logits = np.random.default_rng(0).normal(size=(50, 2))
    labels = np.zeros((50, 2), np.int8)
    labels[:, 1] = 1
    probabilities = calibrated(logits, labels)
    assert (probabilities[:, 0] < 0.05).all()
    assert (probabilities[:, 1] > 0.95).all()
    assert not suspected_labels(probabilities, labels).any()


def test_suspected_labels_are_those_of_loops():
    rng = np.random.default_rng(1)
    probabilities = rng.random((60, 4)) * [1, 1, 0.6, 0.9]
    labels = rng.integers(-1, 2, (60, 4)).astype(np.int8)
    suspected = suspected_labels(probabilities, labels)
    assert 0 < suspected.sum() < 240
    for k in range(4):
        column = list(zip(probabilities[:, k], labels[:, k], strict=True))
        with_class = [p for p, label in column if label == 1]
        without = [1 - p for p, label in column if label == 0]
        for index, (p, label) in enumerate(column):
            opposite = {0: p, 1: 1 - p, -1: 0}[int(label)]
            same = without if label == 1 else with_class
            expected = opposite > 0.5 and opposite >= sum(same) / len(same)
            assert suspected[index, k] == expected


def test_the_ranking_is_that_of_loops():
    logits, labels, _ = planted(images=90)
    labels[np.random.default_rng(2).random(labels.shape) < 0.1] = -1

    pairs = []
    probabilities = np.zeros(labels.shape)
    for k in range(8):
        annotated = [n for n in range(90) if labels[n, k] >= 0]
        slope, offset = platt(logits[annotated, k], labels[annotated, k] == 1)
        for n in annotated:
            p = probabilities[n, k] = 1 / (1 + math.exp(-(slope * logits[n, k] + offset)))
            pairs.append((p if labels[n, k] == 1 else 1 - p, n, k))
    pairs.sort()

    ranking = rank(logits, labels)
    assert len(ranking) == len(pairs) == (labels >= 0).sum()
    assert list(zip(ranking.images, ranking.classes, strict=True)) == [(n, k) for _, n, k in pairs]
    places = ranking.images, ranking.classes
    np.testing.assert_allclose(ranking.probabilities, probabilities[places], atol=1e-6)
    assert (ranking.present == (labels[places] == 1)).all()
    assert (ranking.suspected == suspected_labels(probabilities, labels)[places]).all()

    # Equal pairs keep the order of the images.
    equal = rank(np.zeros((5, 2)), np.zeros((5, 2), np.int8))
    assert equal.images.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_planted_errors_are_among_the_first_tenth():
    logits, labels, flipped = planted()
    ranking = rank(logits, labels)
    found = flipped[ranking.images, ranking.classes]
    first = len(found) // 10
    assert found[:first].sum() > 0.9 * flipped.sum()
    assert (found & ranking.suspected).sum() > 0.5 * flipped.sum()
    assert found[ranking.suspected].mean() > 0.9

    # The scores alone are worse: a class with high logits looks present everywhere.
    count = flipped.sum()
    of_label = np.where(labels == 1, logits, -logits).ravel()
    by_score = flipped.ravel()[np.argsort(of_label)[:count]].sum()
    assert found[:count].sum() > 0.9 * count > 0.85 * count > by_score


# ------------------------------------------------------------------------------------- the command


def words(judge):
    return ["--plugin", "patches", "device=cpu", "--checkpoint", judge.run]


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_flipped_labels_are_found(judge, cli, tmp_path):
    files = ["--errors", tmp_path / "e.csv", "--json", tmp_path / "r.json"]
    out = cli.out("check_data", *words(judge), *files, "--out", tmp_path / "new/pictures")

    # All pairs, once each, in the order of their suspicion.
    rows = read(tmp_path / "e.csv")
    assert tuple(rows[0]) == COLUMNS
    report = json.loads((tmp_path / "r.json").read_text())
    images, labels = report["images"], report["labels"]
    assert 70 < images < 130
    assert labels == 3 * images
    assert [int(row["rank"]) for row in rows] == list(range(1, labels + 1))
    pairs = [(Path(row["image"]).name, row["class"]) for row in rows]
    assert len(set(pairs)) == labels
    flipped = judge.flipped & set(pairs)
    assert len(flipped & set(pairs[: labels // 10])) >= 0.8 * len(flipped)

    assert (report["checkpoint"], report["split"], report["left_out"]) == (judge.run, "val", [])
    for name, counts in report["per_class"].items():
        own = [row for row in rows if row["class"] == name]
        for key, label in (("present", "1"), ("absent", "0")):
            labelled = [row for row in own if row["label"] == label]
            assert counts[key] == len(labelled)
            assert counts[f"suspected_{key}"] == sum(row["suspected"] == "1" for row in labelled)
    suspected = sum(row["suspected"] == "1" for row in rows)
    assert report["suspected"] == suspected > 0

    summary = f"judged by {judge.run}: {suspected} of {labels} labels are suspected"
    text = (tmp_path / "new" / "pictures" / "label_errors.html").read_text()
    assert summary in out
    assert summary in text
    assert f"{float(rows[0]['probability']):10.3f}  {rows[0]['class']}, {rows[0]['image']}" in out
    assert rows[9]["image"] in out
    assert text.count("<img ") == 120
    assert rows[0]["image"] in text

    assert cli("check_data", *words(judge), "--errors", tmp_path / "7.csv", "--rows", "7")[0] == 0
    assert read(tmp_path / "7.csv") == rows[:7]


def test_one_model_judges_its_fold_or_what_it_was_trained_on_and_says_so(judge, cli, tmp_path):
    files = ["--rows", "all", "--errors", tmp_path / "e.csv"]
    names = {}
    for split in ("val", "train"):
        out = cli.out("check_data", *words(judge), *files, "--split", split)
        warning = f"{judge.run} was trained on these images, and their wrong labels too"
        assert (warning in out) == (split == "train")
        names[split] = {row["image"] for row in read(tmp_path / "e.csv")}
    assert not names["val"] & names["train"]
    assert len(names["val"] | names["train"]) == 200

    # The fold and the image size are kept where data=NAME replaces the node of the data.
    again = ["data=csv", f"data.root={judge.root}", f"data.cache_dir={judge.root.parent}"]
    out = cli.out("check_data", *words(judge), *again, *files)
    assert "pixels" not in out
    assert {row["image"] for row in read(tmp_path / "e.csv")} == names["val"]

    out = cli.out("check_data", *words(judge), "data.fold=null")
    assert " training images, now 200): if these images were among it" in out


def test_images_and_labels_that_are_missing_are_left_out(judge, cli, tmp_path):
    root = tmp_path / "mine"
    shutil.copytree(judge.root, root)
    header, *rows = (root / "data.csv").read_text().splitlines()
    rows = [f"{header},negatives", *(f"{row}," for row in rows)]
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    settings = [f"data.root={root}", f"data.cache_dir={tmp_path}"]
    target = tmp_path / "e.csv"

    # No label says that a class is absent.
    assert cli("check_data", *words(judge), *settings, "--errors", target)[0] == 0
    assert {(row["label"], row["suspected"]) for row in read(target)} == {("1", "0")}

    name = Path(read(target)[0]["image"]).name
    (root / name).write_bytes(b"")
    out = cli.out("check_data", *words(judge), *settings, "--json", tmp_path / "r.json")
    assert f"count: {root / name}: an empty file" in out
    assert len(json.loads((tmp_path / "r.json").read_text())["left_out"]) == 1

    for path in root.glob("*.png"):
        path.write_bytes(b"")
    err = cli.fault("check_data", *words(judge), *settings)
    one_line(err, "no validation image can be scored", "an empty file")


# ---------------------------------------------------------------------------------------- the page


def test_pairs_are_listed_with_their_pictures_and_every_text_is_escaped():
    picture = Image.new("RGB", (1000, 500), (200, 0, 0))
    pairs = [
        (Suspect(1, "a.jpg", "dog", True, 0.12345, suspected=True), picture),
        (Suspect(2, EVIL, EVIL, False, 0.12345, suspected=False), picture),
    ]
    text = page(EVIL, {"One": pairs[:1], EVIL: pairs[1:]})
    text.encode("utf-8")
    assert "1. <b>dog</b> is labelled present; present with probability 0.123" in text
    assert f"2. <b>{escape(SHOWN)}</b> is labelled absent; present with probability" in text
    assert text.count(escape(SHOWN)) == 5
    assert (text.count("<li>"), text.count('<li class="suspected">')) == (1, 1)

    # It asks for nothing.
    assert not any(part in text for part in ("<script", "<link", "<iframe", "http"))
    pictures = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    assert len(pictures) == 2
    for content in pictures:
        with Image.open(io.BytesIO(base64.b64decode(content, validate=True))) as small:
            assert (small.format, small.size) == ("JPEG", (240, 120))
