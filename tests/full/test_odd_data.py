"""Faulty data through the commands: refused before training, or left out and named."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from support import QUICK, one_line, write_coco

Cli = Callable[..., tuple[int, str, str]]
WORDS = [word for word in QUICK if not word.startswith("data.")]
WORDS += ["data.cache_dir=cache", "data.image_size=32", "train.batch_size=8", "train.epochs=1"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder of its own, and not for ever."""
    monkeypatch.chdir(tmp_path)
    signal.alarm(300)
    yield
    signal.alarm(0)


def write_csv(labels: list[str]) -> Path:
    folder = Path("own")
    folder.mkdir()
    rows = []
    for number in range(24):
        Image.new("RGB", (32, 32), (10 * number, 0, 0)).save(folder / f"{number}.png")
        split = "train" if number < 16 else "val"
        rows.append(f'{number}.png,"{labels[number % len(labels)]}",{split}\n')
    (folder / "data.csv").write_text("path,labels,split\n" + "".join(rows))
    return folder


def test_a_label_with_a_tab_ends_the_run_before_it_begins(cli: Cli) -> None:
    write_csv(["dog", "red\tcar"])
    status, _, err = cli("train", *WORDS, "data=csv", "data.root=own")
    assert status == 1
    one_line(
        err,
        r"data.csv, row 3: the class name 'red\tcar' has the control character U+0009: rename it",
    )
    assert not list(Path().rglob("*.pt"))


def test_whatever_names_are_trained_on_can_be_read_again(cli: Cli) -> None:
    names = ["Ram C/V, 'Cargo'", "\u72ac", "\U0001f415", "1", "a  b", "x" * 1_000]
    write_csv(names)
    status, _, err = cli("train", *WORDS, "data=csv", "data.root=own", "name=odd")
    assert status == 0, err
    status, out, err = cli(
        "predict",
        "outputs/odd/checkpoints/best.pt",
        "own/0.png",
        "--plugin",
        "patches",
        "--json",
        "-",
    )
    assert status == 0, err
    (answer,) = json.loads(out)
    assert {item["name"] for item in answer["predictions"]} <= set(names)


def test_coco_categories_of_one_name_end_the_run_before_it_begins(cli: Cli) -> None:
    write_coco(Path("coco"))
    file = Path("coco", "annotations", "instances_train2014.json")
    file.write_text(file.read_text().replace("thing 2", "thing 0"))
    file.with_name("instances_val2014.json").write_text(
        file.read_text().replace("train2014", "val2014")
    )
    status, _, err = cli("train", *WORDS, "data=coco", "data.root=coco")
    assert status == 1
    one_line(err, "the classes 0 and 2 are both called 'thing 0': merge or rename them")


def test_a_thin_image_is_left_out_and_named(cli: Cli, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = Path("own", split, name)
            folder.mkdir(parents=True)
            for image in range(8):
                Image.new("RGB", (32, 32), (80, image, 0)).save(folder / f"{image}.png")
    thin = Path("own", "val", "dog", "thin.png")
    Image.new("RGB", (10_000_000, 1)).save(thin)
    words = [*WORDS, "data=folders", "data.root=own", "loss=cross_entropy", "data.test_crop=0.5"]
    status, _, err = cli("train", *words, "data.bad_images=skip")
    assert status == 0, err
    assert "thin.png: its 10,000,000 x 1 pixels need" in caplog.text
    status, _, err = cli("train", *words, "name=stop")
    assert status == 1
    one_line(
        err,
        "thin.png: its 10,000,000 x 1 pixels need",
        "the limit is 178,956,970; restore the file",
    )
