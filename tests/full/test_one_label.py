"""Data with one label per image: train, evaluate, predict, and what is refused before."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support import QUICK, made, one_line

from mldec.data.digits import NAMES, digit
from mldec.data.types import fixed_sample

Cli = Callable[..., tuple[int, str, str]]
ONE = ["+experiment=digits_single", *(word for word in QUICK if not word.startswith("+experiment"))]
A2 = ["mix.mixup=0.1", "mix.cutmix=1.0", "loss=bce_threshold", "train.repeats=3"]
A2 += ["optim.name=lamb", "schedule.name=cosine_epochs", "schedule.cooldown_epochs=1"]


@pytest.mark.parametrize("head", ["ml_decoder_small", "gap"])
def test_the_whole_way_with_the_parts_of_the_imagenet_recipe(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in ONE if head != "gap" or not word.startswith("head.")]
    status, _, err = cli("train", *words, *A2, f"head={head}")
    assert status == 0, err
    best = "outputs/digits_single/checkpoints/best.pt"
    status, _, err = cli("evaluate", best, "--plugin", "patches", "--json", "results.json")
    assert status == 0, err
    metrics = json.loads(Path("results.json").read_text())["metrics"]
    assert list(metrics) == ["top1", "top5", "class_accuracy", "ECE"]
    for index in range(2):
        Image.fromarray(
            fixed_sample(made(digit).val.dataset, index)[0].permute(1, 2, 0).numpy()
        ).save(f"{index}.png")
    status, out, err = cli("predict", best, "0.png", "1.png", "--plugin", "patches", "--json", "-")
    assert status == 0, err
    for answer in json.loads(out):  # a softmax: one label an image, however the model was trained
        assert {item["name"] for item in answer["predictions"]} == set(NAMES)
        assert sum(item["score"] for item in answer["predictions"]) == pytest.approx(1)

    # Calibration changes the scores by a temperature, and nothing else.
    status, out, err = cli("calibrate", best, "--plugin", "patches", "--json", "calibrated.json")
    assert status == 0, err
    content = json.loads(Path("calibrated.json").read_text())
    assert content["uncalibrated"] == pytest.approx(
        {name: metrics[name] for name in ("top1", "ECE")}
    )
    copy = best.replace("best.pt", "best.calibrated.pt")
    status, _, err = cli("evaluate", copy, "--plugin", "patches", "--json", "results.json")
    assert status == 0, err
    after = json.loads(Path("results.json").read_text())["metrics"]
    assert after["top1"] == metrics["top1"]
    assert after["ECE"] == pytest.approx(content["fitted"]["ECE"])

    status, _, err = cli("evaluate", best, "--plugin", "patches", "--threshold", "0.5")
    assert status == 1
    one_line(err, "--threshold has no effect: an image of this data has one label")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["mix.mixup=0.2", "loss=asl_single_label"],
            ["mix makes soft labels", "choose loss=bce or cross_entropy"],
        ),
        (
            ["loss.target_threshold=0.2"],
            ["loss.target_threshold: CrossEntropy takes no such argument"],
        ),
        (
            ["train.repeats=3", "train.batch_size=72"],
            ["train.repeats 3 needs as many images as a batch", "72"],
        ),
        (
            ["loss=asl"],
            ["AsymmetricLoss is for several labels per image, the data has one label per image"],
        ),
        (
            ["data=digits"],
            ["CrossEntropy is for one label per image, the data has several labels per image"],
        ),
        (["data.top_k=11"], ["data.top_k 11 needs as many classes; there are 10"]),
        (["backbone.drop_path=0.1"], ["backbone.drop_path: Patches takes no such argument"]),
    ],
)
def test_parts_that_do_not_fit_are_refused_at_the_start(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = cli("train", *ONE, *words)
    assert status == 1
    one_line(err, *parts)
    assert not list(tmp_path.rglob("*.pt"))


def test_drop_path_on_a_network_of_timm_without_it_is_refused_at_the_start(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "backbone=tresnet_m",
        "backbone.name=vgg11",
        "backbone.pretrained=false",
        "backbone.drop_path=0.1",
    ]
    status, _, err = cli("train", "+experiment=digits_single", "device=cpu", *words)
    assert status == 1
    one_line(err, "backbone.name=vgg11: timm cannot build it", "argument 'drop_path_rate'")


def test_top_5_of_three_classes_is_refused_at_the_start(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog", "emu")):
            folder = tmp_path / "own" / split / name
            folder.mkdir(parents=True)
            for image in range(8):
                Image.new("RGB", (32, 32), (80 * number, image, 0)).save(folder / f"{image}.png")
    words = [word for word in ONE if not word.startswith("data.")]
    words += ["data=folders", "data.root=own", "data.cache_dir=cache", "data.image_size=32"]
    status, _, err = cli("train", *words, "data.top_k=5")
    assert status == 1
    one_line(err, "data.top_k 5 needs as many classes; there are 3")
    assert not list(tmp_path.rglob("*.pt"))
    status, _, err = cli("train", *words, "train.batch_size=8", "train.epochs=1")
    assert status == 0, err
