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


def words(judges) -> list[str]:
    first, second = judges.runs
    return ["--plugin", "patches", "device=cpu", "--checkpoint", first, "--checkpoint", second]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_flipped_labels_are_found_by_a_real_process(judges, tmp_path: Path) -> None:
    files = ["--errors", "e.csv", "--json", "r.json", "--out", "new/pictures"]
    command = [sys.executable, "-m", "mldec.check_data", *words(judges), *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr

    # All pairs, once each, in the order of their suspicion.
    rows = read(tmp_path / "e.csv")
    assert list(rows[0]) == COLUMNS
    assert [int(row["rank"]) for row in rows] == list(range(1, 601))
    pairs = [(Path(row["image"]).name, row["class"]) for row in rows]
    assert len(set(pairs)) == 600
    chances = [float(row["probability"]) for row in rows]
    of_label = [
        chance if row["label"] == "1" else 1 - chance
        for chance, row in zip(chances, rows, strict=True)
    ]
    assert of_label == sorted(of_label)
    assert len(judges.flipped & set(pairs[:60])) >= 0.8 * len(judges.flipped)

    report = json.loads((tmp_path / "r.json").read_text())
    assert report["checkpoints"] == list(judges.runs)
    assert (report["split"], report["images"], report["labels"]) == ("folds", 200, 600)
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
        "200 images x 3 classes of 2 folds, each judged by the model that was not trained on it: "
        f"{suspected} of 600 labels are suspected"
    )
    assert summary in done.stdout
    first = f"{chances[0]:10.3f}  {rows[0]['class']}, {rows[0]['image']}"
    assert first in done.stdout
    assert rows[9]["image"] in done.stdout

    page = (tmp_path / "new" / "pictures" / "label_errors.html").read_text()
    assert summary in page
    assert page.count("<img ") == 120
    assert page.index(rows[0]["image"]) > 0


def test_the_number_of_rows_can_be_chosen(judges, cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "e.csv"
    for word, count in (("7", 7), ("all", 600), ("0", 0)):
        status, _, err = cli("check_data", *words(judges), "--errors", target, "--rows", word)
        assert status == 0, err
        assert len(read(target)) == count


def test_an_image_that_cannot_be_read_is_named_and_left_out(
    judges, cli: Cli, tmp_path: Path
) -> None:
    root = tmp_path / "mine"
    shutil.copytree(judges.root, root)
    (root / "3.png").write_bytes(b"")
    settings = [f"data.root={root}", f"data.cache_dir={tmp_path}"]
    status, out, err = cli("check_data", *words(judges), *settings, "--json", tmp_path / "r.json")
    assert status == 0, err
    assert f"left out: {root / '3.png'}: an empty file" in out
    assert "199 images x 3 classes" in out
    assert len(json.loads((tmp_path / "r.json").read_text())["left_out"]) == 1

    for path in root.glob("*.png"):
        path.write_bytes(b"")
    status, _, err = cli("check_data", *words(judges), *settings)
    assert status == 1
    one_line(err, "no image can be read; the first message: ", "an empty file")


def test_labels_that_are_not_annotated_are_left_out(judges, cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    for path in judges.root.glob("*.png"):
        (root / path.name).hardlink_to(path)
    header, *rows = (judges.root / "data.csv").read_text().splitlines()
    header = f"{header},negatives"
    (root / "data.csv").write_text("\n".join([header, *(f"{row}," for row in rows)]) + "\n")

    settings = [f"data.root={root}", f"data.cache_dir={tmp_path}", "data.changed=allow"]
    target = tmp_path / "e.csv"
    status, _, err = cli("check_data", *words(judges), *settings, "--errors", target)
    assert status == 0, err
    assert {row["label"] for row in read(target)} == {"1"}
    assert {row["suspected"] for row in read(target)} == {"0"}


@pytest.mark.parametrize("option", ["--errors", "--json"])
def test_a_file_that_cannot_be_written_is_refused_first(judges, cli: Cli, option: str) -> None:
    status, out, err = cli("check_data", *words(judges), option, "/nowhere/e.csv")
    assert status == 1
    one_line(err, "cannot write /nowhere/e.csv")
    assert out == ""


def test_a_folder_that_cannot_be_made_is_refused_first(judges, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, out, err = cli("check_data", *words(judges), "--out", tmp_path / "file" / "inside")
    assert status == 1
    one_line(err, f"cannot write {tmp_path / 'file' / 'inside'}")
    assert "suspected" not in out
