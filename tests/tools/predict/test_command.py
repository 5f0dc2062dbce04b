"""Naming images: what is written, when, and what ends a command."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import patches
import pytest
import torch
from PIL import Image
from support import one_line

from mldec import predict
from mldec.checkpoint import load_model
from mldec.files.torch_files import read_torch, save
from mldec.predict import answers as pictures
from mldec.predict import answers as rows
from mldec.predict import engine
from mldec.predict.heat_maps import Explainer
from mldec.runtime.devices import MAX_IMAGE_SIZE

Cli = Callable[..., Any]
SHARED = ["--plugin", "patches", "--device", "cpu", "--top", "1", "--threshold", "0"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of six images, the fourth of which cannot be read."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in "abcdef":
        Image.new("RGB", (64, 64), (40 * ord(name) % 255, 9, 9)).save(folder / f"{name}.png")
    (folder / "d.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def best(digits_run: Path) -> Path:
    return digits_run / "checkpoints" / "best.pt"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_and_list_hold_the_same_rows(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    words = ["--jsonl", tmp_path / "p.jsonl", "--json", tmp_path / "p.json"]
    status, out, err = cli("predict", best, photos, *SHARED, *words)
    assert status == 1
    one_line(err, str(photos / "d.png"), "not an image")
    rows = rows_of(tmp_path / "p.jsonl")
    assert rows == json.loads((tmp_path / "p.json").read_text())
    assert [row["image"] for row in rows] == [str(photos / f"{name}.png") for name in "abcdef"]
    assert [list(row) for row in rows] == [
        ["image", "error" if i == 3 else "predictions"] for i in range(6)
    ]
    assert err == f"mldec: {rows[3]['error']}\n"
    assert out == f"{tmp_path / 'p.jsonl'}: 6 images, 1 without an answer\n"


def test_without_a_file_there_is_a_line_per_image(cli: Cli, best: Path, photos: Path) -> None:
    status, out, err = cli("predict", best, photos, *SHARED)
    assert status == 1
    one_line(err, str(photos / "d.png"), "not an image")
    [row, *_] = [
        json.loads(line)
        for line in cli("predict", best, photos, *SHARED, "--jsonl", "-").out.splitlines()
    ]
    shown = row["predictions"][0]
    assert out.startswith(f"{photos / 'a.png'}: {shown['name']} {shown['score']:.3f}\n")
    assert len(out.splitlines()) == 5


def test_lines_on_standard_output_are_alone_there(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    (photos / "d.png").unlink()
    status, out, err = cli("predict", best, photos, *SHARED, "--jsonl", "-")
    assert (status, err) == (0, "")
    cli("predict", best, photos, *SHARED, "--json", tmp_path / "p.json")
    expected = json.loads((tmp_path / "p.json").read_text())
    assert [json.loads(line) for line in out.splitlines()] == expected
    status, out, err = cli("predict", best, photos, *SHARED, "--json", "-")
    assert (status, err, json.loads(out)) == (0, "", expected)


def test_pictures_of_what_is_named(cli: Cli, best: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "again").mkdir()
    Image.new("RGB", (90, 30)).save(photos / "again" / "a.png")
    words = ["--pictures", tmp_path / "drawn" / "here", "--top", "2", "--json", tmp_path / "p.json"]
    status, _, err = cli("predict", best, photos, *SHARED, *words)
    assert status == 1
    one_line(err, str(photos / "d.png"), "not an image")

    rows = json.loads((tmp_path / "p.json").read_text())
    assert [list(row) for row in rows if "error" in row] == [["image", "error"]]
    drawn = [Path(row["picture"]) for row in rows if "picture" in row]
    assert len(drawn) == len(rows) - 1 == 6
    assert sorted(drawn) == sorted((tmp_path / "drawn" / "here").iterdir())
    for path in drawn:
        with Image.open(path) as sheet:
            assert sheet.width > 3 * 150, "the image and two classes"


def test_pictures_are_of_the_same_classes_as_the_scores(
    cli: Cli, best: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(
        pictures, "draw", lambda *arguments: drawn.append(arguments) or Image.new("RGB", (9, 9))
    )
    words = ["--pictures", tmp_path / "p", "--top", "3", "--json", tmp_path / "p.json"]
    assert cli("predict", best, photos / "a.png", *SHARED, *words).status == 0
    [(image, title, findings, method, _)] = drawn
    [row] = json.loads((tmp_path / "p.json").read_text())
    assert [(item.name, item.score) for item in findings] == [
        (item["name"], item["score"]) for item in row["predictions"]
    ]
    assert (image.size, title) == ((64, 64), "a.png")
    assert method.startswith("attention of the query of the class")

    # Of the whole list of classes, the map of each name is its own.
    loaded = load_model(best, plugins=["patches"])
    maps = Explainer(loaded.model, 64).maps(
        loaded.transform(image)[None], [[*range(len(loaded.classes))]]
    )[0]
    for item in findings:
        expected = maps[loaded.classes.names.index(item.name)].numpy()
        np.testing.assert_allclose(item.heat, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_keeps_what_is_streamed(
    name: str, cli: Cli, best: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:2")
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = cli("predict", best, photos, *SHARED, "--json", "-", "--batch-size", "2")
    assert status == (130 if name == "SIGINT" else 143)
    assert err.splitlines()[-1] == f"mldec: stopped by {name} after 4 images"
    assert len(json.loads(out)) == 4
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_keeps_the_list_too(
    cli: Cli, best: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = []

    def slow(*arguments: Any, **options: Any) -> Any:
        if len(answered) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        answered.append(None)
        return []

    monkeypatch.setattr(rows.Rule, "chosen", slow)
    status, out, err = cli("predict", best, photos, *SHARED, "--json", "-")
    assert status == 130
    one_line(err, "interrupted")
    assert len(json.loads(out)) == 2


def test_scores_of_a_broken_network_are_no_answer(
    cli: Cli, best: Path, photos: Path, tmp_path: Path
) -> None:
    state = read_torch(best)
    for weights in ("model", "ema"):
        state[weights]["head.pool_bias"].fill_(float("nan"))
    save(tmp_path / "nan.pt", state)
    status, out, err = cli(
        "predict", tmp_path / "nan.pt", photos / "a.png", *SHARED, "--jsonl", tmp_path / "p.jsonl"
    )
    assert (status, out) == (1, f"{tmp_path / 'p.jsonl'}: 1 image, 1 without an answer\n")
    one_line(
        err, f"{photos / 'a.png'}: its scores are not finite; look at the weights of the checkpoint"
    )
    assert rows_of(tmp_path / "p.jsonl") == [
        {"image": str(photos / "a.png"), "error": err.strip()[len("mldec: ") :]}
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--json", "{folder}"], "it is a folder; add the name of a file"),
        (["--jsonl", "{folder}/missing/p.jsonl"], "there is no folder"),
        (["--json", "-", "--jsonl", "-"], "cannot write two results to -"),
        (["--pictures", "{folder}/a.png"], "/a.png is a file; name a folder"),
        (["--pictures", "{folder}/p", "--font", "{folder}/a.png"], "a.png: not a font"),
        (["--font", "{folder}/a.ttf"], "--font has no effect without --pictures"),
        (
            ["--device", "banana"],
            "device 'banana' is unknown: choose auto, cpu, cuda or cuda:<number>",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    cli: Cli, photos: Path, words: list[str], part: str
) -> None:
    status, out, err = cli(
        "predict", "no.pt", photos, *[word.format(folder=photos) for word in words]
    )
    assert (status, out) == (1, "")
    one_line(err, part)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("--threshold", value) for value in ("nan", "5", "-0.1", "inf", "x", "")],
        *[
            ("--image-size", value)
            for value in (str(10**12), str(MAX_IMAGE_SIZE + 1), "0", "9" * 5000)
        ],
    ],
)
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_numbers_out_of_range_are_refused(cli: Cli, command: str, option: str, value: str) -> None:
    words = ["a.png"] if command == "predict" else []
    status, out, err = cli(command, "no.pt", *words, option, value)
    assert (status, out) == (2, "")
    assert f"error: argument {option}: " in err.splitlines()[-1]


def test_a_large_top_is_all_classes(cli: Cli, best: Path, photos: Path) -> None:
    status, out, err = cli("predict", best, photos / "a.png", *SHARED, "--top", str(10**30))
    assert (status, err) == (0, "")
    assert out.count(", ") == 9


def test_too_large_a_batch_is_one_line(
    cli: Cli, best: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, "probabilities", full)
    status, _, err = cli("predict", best, photos / "a.png", *SHARED, "--batch-size", "7")
    assert status == 1
    one_line(
        err, "out of memory on cpu: batches of 1, images of 64 pixels; pass a smaller --batch-size"
    )


def test_odd_names_in_a_real_process_on_an_ascii_terminal(
    cli: Cli, best: Path, tmp_path: Path
) -> None:
    names = [
        b"\xff\xfe.png",
        "\u65e5\u672c.png".encode(),
        b"two\nlines.png",
        b"x\x1b]0;pwn\x07.png",
    ]
    folder = os.fsencode(tmp_path / "names")
    os.mkdir(folder)  # noqa: PTH102
    for name in names:
        with open(os.path.join(folder, name), "wb") as file:  # noqa: PTH118, PTH123
            Image.new("RGB", (64, 64)).save(file, "PNG")
    with open(os.path.join(folder, b"bad\x1b[31m.png"), "wb") as file:  # noqa: PTH118, PTH123
        file.write(b"no image")

    # Pillow's limit is below the pixels of these images: twice the limit is not reached, and its
    # warning is not shown.
    code = (
        "from PIL import Image; Image.MAX_IMAGE_PIXELS = 3000; "
        "from mldec import predict; predict.main()"
    )
    words = [best, tmp_path / "names", *SHARED]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1, done.stderr
    out, err = done.stdout.decode("ascii"), done.stderr.decode("ascii")
    one_line(err, "bad?[31m.png: not an image")
    assert {line.partition(": ")[0].rpartition("/")[2] for line in out.splitlines()} == {
        "??.png",
        "\\u65e5\\u672c.png",
        "two?lines.png",
        "x?]0;pwn?.png",
    }

    cli("predict", *words, "--jsonl", tmp_path / "p.jsonl")
    rows = rows_of(tmp_path / "p.jsonl")
    paths = {
        bytes.fromhex(row["image_bytes"]) if "image_bytes" in row else row["image"].encode()
        for row in rows
    }
    assert paths == {os.path.join(folder, name) for name in [*names, b"bad\x1b[31m.png"]}  # noqa: PTH118
    (odd,) = (row for row in rows if "image_bytes" in row)
    assert odd["image"].endswith("names/\\xff\\xfe.png")
    assert ["names/bad?[31m.png: not" in row["error"] for row in rows if "error" in row] == [True]


def test_no_example_names_a_threshold() -> None:
    text = (predict.__doc__ or "") + predict.parser().format_help()
    assert "0.5" not in text
    assert "scores after ASL are not probabilities" in " ".join(text.split())


def test_a_device_is_checked_by_load_model_too(best: Path) -> None:
    for device in ("banana", "cuda:99", "mps", ""):
        with pytest.raises(ValueError, match="device"):
            load_model(best, plugins=["patches"], device=device)
    for device in ("cpu", "auto", torch.device("cpu")):
        load_model(best, plugins=["patches"], device=device)
    with pytest.raises(ValueError, match=f"image_size: {10**9} is above {MAX_IMAGE_SIZE:,}"):
        load_model(best, plugins=["patches"], image_size=10**9)


def test_a_full_device_under_a_list_is_named(cli: Cli, best: Path, photos: Path) -> None:
    status, _, err = cli("predict", best, photos / "a.png", *SHARED, "--json", "/dev/full")
    assert status == 1
    one_line(err, "cannot write /dev/full: No space left on device")
