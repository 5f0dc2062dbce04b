"""Result files of the command `mldec.predict`: how they are made, gone on with and refused."""

import csv
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import patches
import pytest
import torch
from pictures import picture
from PIL import Image
from support import one_line

from mldec.files.run_lock import RunLock
from mldec.predict import results as division
from mldec.predict import results as parts
from mldec.predict.run import FORMATS

Cli = Callable[..., Any]
SHARED = ["--plugin", "patches", "--device", "cpu", "--threshold", "0", "--top", "2"]
BLOCK = 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (parts, division):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.fixture
def best(digits_run: Path) -> Path:
    return digits_run / "checkpoints" / "best.pt"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of ten images, the fourth of which cannot be read."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        picture(64, 64, seed=number).save(folder / f"{number}.png")
    (folder / "3.png").write_bytes(b"no image")
    return folder


def all_files(folder: Path) -> dict[str, Path]:
    """Return a result file per format."""
    return {option: folder / f"r.{option}{'.npy' * (option == 'features')}" for option in FORMATS}


def options(files: dict[str, Path]) -> list[str]:
    return [word for option, path in files.items() for word in (f"--{option}", str(path))]


def test_all_formats_at_once(cli: Cli, best: Path, photos: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    files = all_files(tmp_path)
    status, out, err = cli("predict", best, photos, *SHARED, *options(files), "--batch-size", "3")
    assert status == 1
    one_line(err, "3.png: not an image")
    assert out == f"{files['jsonl']}: 10 images, 1 without an answer\n"

    names = [str(photos / f"{number}.png") for number in range(10)]
    rows = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert [row["image"] for row in rows] == names
    assert json.loads(files["json"].read_text()) == rows
    with files["csv"].open(newline="") as file:
        table = list(csv.DictReader(file))
    columns = parquet.read_table(files["parquet"]).to_pylist()
    for row, cells, values in zip(rows, table, columns, strict=True):
        assert cells["image"] == values["image"] == row["image"]
        if "error" in row:
            assert cells["error"] == values["error"] == row["error"]
        else:
            classes = [item["name"] for item in row["predictions"]]
            assert cells["classes"].split(";") == values["classes"] == classes
            assert values["scores"] == [item["score"] for item in row["predictions"]]
    features = np.load(files["features"])
    assert len(features) == 10
    assert np.isnan(features).any(1).tolist() == [number == 3 for number in range(10)]


def test_a_complete_result_stays_as_it_is(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    words = ["predict", best, photos, *SHARED, "--jsonl", tmp_path / "r.jsonl"]
    assert cli(*words).status == 1
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("r.*")}
    assert [path.name for path in sorted(before)] == ["r.jsonl", "r.jsonl.run.json"]
    status, out, err = cli(*words)
    assert (status, err) == (0, "")
    assert out == f"{tmp_path / 'r.jsonl'} is complete: 10 images; nothing to do\n"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("r.*")} == before

    picture(64, 64).save(photos / "new.png")
    status, _, err = cli(*words)
    assert status == 1
    one_line(err, "the images are not those that it was begun with (10 images then, 11 now)")
    assert cli(*words, "--overwrite").status == 1
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 11


def test_other_options_or_another_checkpoint_are_refused(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    target = tmp_path / "r.jsonl"
    cli("predict", best, photos, *SHARED, "--jsonl", target)
    content = target.read_bytes()
    other = tmp_path / "other.pt"
    shutil.copy(best, other)
    # The same weights in another file are no other checkpoint; the other set of weights is.
    assert cli("predict", other, photos, *SHARED, "--jsonl", target).status == 0
    for words, part in {
        ("--content", "decisions"): '--content "top", not "decisions"',
        ("--draft",): "--draft false, not true",
        ("--weights", "raw"): '--weights none, not "raw"',
        ("--csv", tmp_path / "r.csv"): "the result files",
        (photos / "0.png",): "the images",
    }.items():
        given = [word for word in SHARED if words[0] != "--content" or word not in ("--top", "2")]
        status, _, err = cli("predict", best, photos, *given, "--jsonl", target, *words)
        assert status == 1
        one_line(err, f"{target} was begun with {part}", "name another file, or pass --overwrite")

    state = torch.load(best, weights_only=True)
    for weights in (state["model"], state["ema"]):
        weights["head.pool_bias"] += 1
    torch.save(state, other)
    status, _, err = cli("predict", other, photos, *SHARED, "--jsonl", target)
    assert status == 1
    one_line(err, f"{target} was begun with the checkpoint")
    assert target.read_bytes() == content


def test_a_file_of_someone_else_is_not_replaced(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "r.jsonl").write_text("mine")
    words = ["predict", best, photos, *SHARED, "--jsonl", tmp_path / "r.jsonl"]
    status, _, err = cli(*words)
    assert status == 1
    one_line(err, "r.jsonl exists, and nothing says how it was made", "--overwrite")
    assert (tmp_path / "r.jsonl").read_text() == "mine"
    cli(*words, "--overwrite")
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_same_command_goes_on(
    name: str,
    cli: Cli,
    best: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cli("predict", best, photos, *SHARED, *options(all_files(tmp_path)), "--batch-size", "1")
    whole = {option: path.read_bytes() for option, path in all_files(tmp_path).items()}

    (tmp_path / "again").mkdir()
    files = all_files(tmp_path / "again")
    words = ["predict", best, photos, *SHARED, *options(files), "--batch-size", "1"]
    # Six images have an answer in this forward pass, and the fourth has none without one.
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:6")
    status, out, err = cli(*words)
    assert status == (130 if name == "SIGINT" else 143)
    last = err.splitlines()[-1]
    assert last == f"mldec: stopped by {name} after 7 images; the same command goes on"
    assert not any(path.exists() for path in files.values())

    monkeypatch.setenv("PATCHES_SIGNAL", "SIGTERM:0")
    monkeypatch.setattr(patches, "forwards", 0)
    status, out, err = cli(*words)
    assert status == 1, "an image of the first part has no answer"
    assert f"{files['jsonl']}: 4 images are done, going on" in out
    assert patches.forwards == 6, "the first block is not answered again"
    assert {option: path.read_bytes() for option, path in files.items()} == whole
    assert not files["jsonl"].with_name("r.jsonl.parts").exists()


def test_two_commands_cannot_write_the_same_result(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "r.jsonl.parts"
    folder.mkdir()
    with RunLock(folder, of_run=False) as lock:
        lock.take()
        status, _, err = cli("predict", best, photos, *SHARED, "--jsonl", tmp_path / "r.jsonl")
    assert status == 1
    one_line(err, "another run is using this folder", "or name another file")
    assert not (tmp_path / "r.jsonl.run.json").exists()


def test_lists_tar_files_and_standard_input_name_the_same_images(
    cli: Cli, best: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}.png" for number in range(10)]
    (tmp_path / "l.txt").write_text("\n".join(names))
    (tmp_path / "l.csv").write_text("\n".join(["id,file", *(f"1,{name}" for name in names)]))
    with tarfile.open(photos.parent / "x.tar", "w") as tar:
        for name in names:
            tar.add(photos / name, name)

    def answers(*words: str | Path) -> list[Any]:
        out = cli("predict", best, *words, *SHARED, "--jsonl", "-").out
        rows = [json.loads(line) for line in out.splitlines()]
        return [(Path(row["image"]).name, row.get("predictions")) for row in rows]

    expected = answers(photos)
    assert len(expected) == 10
    assert answers("--list", tmp_path / "l.txt", "--root", photos) == expected
    assert answers("--list", tmp_path / "l.csv", "--column", "file", "--root", photos) == expected
    assert answers(tmp_path / "x.tar") == expected
    given = SimpleNamespace(buffer=io.BytesIO("\n".join(names).encode()))
    monkeypatch.setattr(sys, "stdin", given)
    assert answers("--list", "-", "--root", photos) == expected


def test_a_missing_image_of_a_list_is_a_row(cli: Cli, best: Path, photos: Path) -> None:
    (photos / "l.txt").write_text("0.png\nmissing.png\n1.png\n")
    status, out, err = cli(
        "predict", best, "--list", photos / "l.txt", "--root", photos, *SHARED, "--jsonl", "-"
    )
    assert status == 1
    one_line(err, "missing.png: no such file")
    assert ["error" in json.loads(line) for line in out.splitlines()] == [False, True, False]


def test_the_rows_of_an_exported_file_are_those_of_its_checkpoint(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    model = tmp_path / "model.onnx"
    assert cli("export", best, model, "--plugin", "patches", "--threshold", "0.4").status == 0
    rule = ["--content", "decisions"]
    cli("predict", model, photos, *rule, "--jsonl", tmp_path / "a.jsonl")
    words = ["--plugin", "patches", "--threshold", "0.4", "--device", "cpu"]
    cli("predict", best, photos, *rule, *words, "--jsonl", tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()

    for given in (["--weights", "raw"], ["--image-size", "32"], ["--plugin", "patches"]):
        status, _, err = cli("predict", model, photos, *given)
        assert status == 1
        one_line(err, f"{given[0]} has no effect on an exported file such as {model}")
    status, _, err = cli("predict", model, photos, "--device", "cuda:0")
    assert status == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--parquet", "-"], "--parquet - must be a file"),
        (["--features", "-"], "--features -: the name of an array file ends in .npy"),
        (["--jsonl", "-", "--csv", "{folder}/x.csv"], "is written in parts and a pipe row by row"),
        (["--overwrite"], "--overwrite has no effect without a result file"),
        (["--root", "{folder}"], "--root has no effect without --list"),
        (["--list", "{folder}/none.txt"], "none.txt cannot be read"),
        (["--content", "scores", "--top", "3"], "--top has no effect with --content scores"),
        (["--content", "decisions"], "the checkpoint has no thresholds; pass --threshold"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    cli: Cli, best: Path, photos: Path, words: list[str], part: str
) -> None:
    given = [word.format(folder=photos) for word in words]
    status, out, err = cli("predict", best, photos / "0.png", "--plugin", "patches", *given)
    assert (status, out) == (1, "")
    one_line(err, part)


def test_without_images_the_ways_to_name_them_are_said(cli: Cli, best: Path) -> None:
    status, _, err = cli("predict", best, "--plugin", "patches")
    assert status == 1
    one_line(err, "no image is named: pass files, folders, tar files or --list FILE")


def test_several_processes_write_to_a_file_only(
    cli: Cli, best: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = cli("predict", best, photos, *SHARED)
    assert status == 1
    one_line(err, "several processes write to a file only: pass --jsonl FILE, for example")


def test_a_checkpoint_without_thresholds_is_said(cli: Cli, best: Path, photos: Path) -> None:
    words = ["--plugin", "patches", "--device", "cpu", photos / "0.png"]
    status, _, err = cli("predict", best, *words)
    assert status == 0
    one_line(err, "has no thresholds: classes are listed by score alone")
    assert cli("predict", best, *words, "--content", "scores").err == ""


def test_draft_changes_little(cli: Cli, best: Path, tmp_path: Path) -> None:
    image = picture(600, 400).resize((1200, 800), Image.Resampling.BICUBIC)
    image.save(tmp_path / "x.jpg", quality=95)
    words = ["predict", best, tmp_path / "x.jpg", *SHARED, "--content", "scores"]
    words = [word for word in words if word not in ("--threshold", "0", "--top", "2")]
    whole, draft = (
        json.loads(cli(*words, "--jsonl", "-", *more).out)["scores"] for more in ([], ["--draft"])
    )
    assert whole.keys() == draft.keys()
    assert max(abs(whole[name] - draft[name]) for name in whole) < 0.05
