"""The search for wrong labels, from the command line to its files."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import one_line

Cli = Callable[..., tuple[int, str, str]]
COLUMNS = ["rank", "image", "class", "label", "probability", "suspected"]


def words(judge) -> list[str]:
    return ["--plugin", "patches", "device=cpu", "--checkpoint", judge.run]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_flipped_labels_are_found_by_a_real_process(judge, tmp_path: Path) -> None:
    files = ["--errors", "e.csv", "--json", "r.json", "--out", "new/pictures"]
    command = [sys.executable, "-m", "mldec.check_data", *words(judge), *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr

    # All pairs, once each, in the order of their suspicion.
    rows = read(tmp_path / "e.csv")
    assert list(rows[0]) == COLUMNS
    report = json.loads((tmp_path / "r.json").read_text())
    images, labels = report["images"], report["labels"]
    assert 70 < images < 130
    assert labels == 3 * images
    assert [int(row["rank"]) for row in rows] == list(range(1, labels + 1))
    pairs = [(Path(row["image"]).name, row["class"]) for row in rows]
    assert len(set(pairs)) == labels
    chances = [float(row["probability"]) for row in rows]
    of_label = [
        chance if row["label"] == "1" else 1 - chance
        for chance, row in zip(chances, rows, strict=True)
    ]
    assert of_label == sorted(of_label)
    flipped = judge.flipped & set(pairs)
    assert len(flipped & set(pairs[: labels // 10])) >= 0.8 * len(flipped)

    assert (report["checkpoint"], report["split"]) == (judge.run, "val")
    assert report["left_out"] == []
    for name, counts in report["per_class"].items():
        own = [row for row in rows if row["class"] == name]
        for key, label in (("present", "1"), ("absent", "0")):
            labelled = [row for row in own if row["label"] == label]
            assert counts[key] == len(labelled)
            assert counts[f"suspected_{key}"] == sum(row["suspected"] == "1" for row in labelled)
    suspected = sum(row["suspected"] == "1" for row in rows)
    assert report["suspected"] == suspected > 0

    summary = (
        f"{images} images x 3 classes of val, judged by {judge.run}: "
        f"{suspected} of {labels} labels are suspected"
    )
    assert summary in done.stdout
    first = f"{chances[0]:10.3f}  {rows[0]['class']}, {rows[0]['image']}"
    assert first in done.stdout
    assert rows[9]["image"] in done.stdout

    page = (tmp_path / "new" / "pictures" / "label_errors.html").read_text()
    assert summary in page
    assert page.count("<img ") == 120
    assert page.index(rows[0]["image"]) > 0


def test_the_number_of_rows_can_be_chosen(judge, cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "e.csv"
    for word, count in (("7", 7), ("all", None), ("0", 0)):
        status, _, err = cli("check_data", *words(judge), "--errors", target, "--rows", word)
        assert status == 0, err
        rows = len(read(target))
        assert rows == count or (count is None and rows > 200)


def judge_first(judge, cli: Cli, folder: Path) -> str:
    """Return the image of the most suspicious pair."""
    assert cli("check_data", *words(judge), "--errors", folder / "first.csv")[0] == 0
    return read(folder / "first.csv")[0]["image"]


def test_an_image_that_cannot_be_read_is_named_and_left_out(
    judge, cli: Cli, tmp_path: Path
) -> None:
    root = tmp_path / "mine"
    shutil.copytree(judge.root, root)
    name = Path(judge_first(judge, cli, tmp_path)).name
    (root / name).write_bytes(b"")
    settings = [f"data.root={root}", f"data.cache_dir={tmp_path}"]
    status, out, err = cli("check_data", *words(judge), *settings, "--json", tmp_path / "r.json")
    assert status == 0, err
    assert f"left out: {root / name}: an empty file" in out
    assert len(json.loads((tmp_path / "r.json").read_text())["left_out"]) == 1

    for path in root.glob("*.png"):
        path.write_bytes(b"")
    status, _, err = cli("check_data", *words(judge), *settings)
    assert status == 1
    one_line(err, "no image can be read; the first message: ", "an empty file")


def test_labels_that_are_not_annotated_are_left_out(judge, cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    for path in judge.root.glob("*.png"):
        (root / path.name).hardlink_to(path)
    header, *rows = (judge.root / "data.csv").read_text().splitlines()
    header = f"{header},negatives"
    (root / "data.csv").write_text("\n".join([header, *(f"{row}," for row in rows)]) + "\n")

    settings = [f"data.root={root}", f"data.cache_dir={tmp_path}"]
    target = tmp_path / "e.csv"
    status, _, err = cli("check_data", *words(judge), *settings, "--errors", target)
    assert status == 0, err
    assert {row["label"] for row in read(target)} == {"1"}
    assert {row["suspected"] for row in read(target)} == {"0"}


@pytest.mark.parametrize("option", ["--errors", "--json"])
def test_a_file_that_cannot_be_written_is_refused_first(judge, cli: Cli, option: str) -> None:
    status, out, err = cli("check_data", *words(judge), option, "/nowhere/e.csv")
    assert status == 1
    one_line(err, "cannot write /nowhere/e.csv")
    assert out == ""


def test_a_folder_that_cannot_be_made_is_refused_first(judge, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, out, err = cli("check_data", *words(judge), "--out", tmp_path / "file" / "inside")
    assert status == 1
    one_line(err, f"cannot write {tmp_path / 'file' / 'inside'}")
    assert "suspected" not in out


def test_one_model_judges_its_fold_or_what_it_was_trained_on_and_says_so(
    judge, cli: Cli, tmp_path: Path
) -> None:
    names = {}
    for split in ("val", "train"):
        options = ["--split", split, "--rows", "all", "--errors", tmp_path / "e.csv"]
        status, out, err = cli("check_data", *words(judge), *options)
        assert status == 0, err
        warning = f"{judge.run} was trained on these images, and their wrong labels too"
        assert (warning in out + err) == (split == "train")
        names[split] = {row["image"] for row in read(tmp_path / "e.csv")}
    assert not names["val"] & names["train"]
    assert len(names["val"] | names["train"]) == 200

    # The fold is kept where data=NAME replaces the node of the data.
    again = ["data=csv", f"data.root={judge.root}", f"data.cache_dir={judge.root.parent}"]
    files = ["--rows", "all", "--errors", tmp_path / "e.csv"]
    assert cli("check_data", *words(judge), *again, *files)[0] == 0
    assert {row["image"] for row in read(tmp_path / "e.csv")} == names["val"]

    status, out, err = cli("check_data", *words(judge), "data.fold=null")
    assert " training images, now 200): if these images were among it" in out + err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--decode", "3"], "--decode has no effect with --checkpoint"),
        (["--checkpoint", "nowhere.pt"], "no file at nowhere.pt"),
    ],
)
def test_wrong_options_are_one_line(judge, cli: Cli, words: list[str], part: str) -> None:
    status, _, err = cli("check_data", "--plugin", "patches", "--checkpoint", judge.run, *words)
    assert status == 1
    one_line(err, part)


@pytest.mark.parametrize("option", ["--split", "--errors", "--rows", "--weights", "--plugin"])
def test_options_of_a_model_need_one(cli: Cli, option: str) -> None:
    word = {"--split": "train", "--rows": "3", "--weights": "ema"}.get(option, "x")
    status, _, err = cli("check_data", "data=digits", option, word)
    assert status == 1
    one_line(err, f"{option} needs a model: pass --checkpoint FILE")


def test_data_with_one_label_per_image_is_refused(judge, cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "single"
    shutil.copytree(judge.root, root)
    rows = [f"{number}.png,{('red', 'green', 'blue')[number % 3]},train" for number in range(9)]
    (root / "data.csv").write_text("\n".join(["path,labels,split", *rows]) + "\n")
    settings = [f"data.root={root}", f"data.cache_dir={tmp_path}", "data.exclusive=true"]
    status, _, err = cli("check_data", *words(judge), *settings)
    assert status == 1
    one_line(err, "--checkpoint: wrong labels are looked for where an image may have several")
