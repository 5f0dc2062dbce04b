"""Data with one label per image: train, evaluate, predict, and what is refused before."""

import json
from pathlib import Path

import pytest
from PIL import Image
from support import QUICK, made

from mldec.data.digits import digit
from mldec.data.types import fixed_sample
from mldec.words.digits import NAMES

ONE = ["+experiment=digits_single", *(word for word in QUICK if not word.startswith("+experiment"))]
A2 = ["mix.mixup=0.1", "mix.cutmix=1.0", "loss=bce_threshold", "train.repeats=3"]
A2 += ["optim.name=lamb", "schedule.name=cosine_epochs", "schedule.cooldown_epochs=1"]


@pytest.mark.parametrize("head", ["ml_decoder_small", "gap"])
def test_the_whole_way_with_the_parts_of_the_imagenet_recipe(cli, here, head):
    words = [word for word in ONE if head != "gap" or not word.startswith("head.")]
    cli.out("train", *words, *A2, f"head={head}")
    best = "outputs/digits_single/checkpoints/best.pt"
    cli.out("evaluate", best, "--plugin", "patches", "--json", "results.json")
    metrics = json.loads(Path("results.json").read_text())["metrics"]
    assert list(metrics) == ["top1", "top5", "class_accuracy", "ECE"]
    for index in range(2):
        Image.fromarray(
            fixed_sample(made(digit).val.dataset, index)[0].permute(1, 2, 0).numpy()
        ).save(f"{index}.png")
    out = cli.out("predict", best, "0.png", "1.png", "--plugin", "patches", "--json", "-")
    for answer in json.loads(out):  # a softmax: one label an image, however the model was trained
        assert {item["name"] for item in answer["predictions"]} == set(NAMES)
        assert sum(item["score"] for item in answer["predictions"]) == pytest.approx(1)

    # Calibration changes the scores by a temperature, and nothing else.
    cli.out("calibrate", best, "--plugin", "patches", "--json", "calibrated.json")
    content = json.loads(Path("calibrated.json").read_text())
    assert content["uncalibrated"] == pytest.approx(
        {name: metrics[name] for name in ("top1", "ECE")}
    )
    copy = best.replace("best.pt", "calibrated.pt")
    cli.out("evaluate", copy, "--plugin", "patches", "--json", "results.json")
    after = json.loads(Path("results.json").read_text())["metrics"]
    assert after["top1"] == metrics["top1"]
    assert after["ECE"] == pytest.approx(content["fitted"]["ECE"])
