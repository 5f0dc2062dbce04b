"""Single-label data: train, evaluate, predict and calibrate with the ImageNet recipe."""

import json
from pathlib import Path

import pytest
from PIL import Image
from support import QUICK, made

from mldec.data.digits import digit
from mldec.data.types import fixed_sample
from mldec.words.digits import NAMES

# The parts of the ImageNet recipe.
TRAIN = ["+experiment=digits_single"] + QUICK[1:]
TRAIN += [
    "mix.mixup=0.1",
    "mix.cutmix=1.0",
    "loss=bce_threshold",
    "train.repeats=3",
    "optim.name=lamb",
]
TRAIN += ["schedule.name=cosine_epochs", "schedule.cooldown_epochs=1"]
PLUGIN = ["--plugin", "patches"]


def evaluate(cli, checkpoint):
    cli.out("evaluate", checkpoint, *PLUGIN, "--json", "results.json")
    return json.loads(Path("results.json").read_text())["metrics"]


def test_single_label_from_training_to_calibration(cli, here):
    cli.out("train", *TRAIN)
    best = Path("outputs/digits_single/checkpoints/best.pt")
    metrics = evaluate(cli, best)
    assert list(metrics) == ["top1", "top5", "class_accuracy", "ECE"]

    # The scores of an image sum to 1, also after training with a binary loss.
    for index in range(2):
        image = fixed_sample(made(digit).val.dataset, index)[0]
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(f"{index}.png")
    answers = json.loads(cli.out("predict", best, "0.png", "1.png", *PLUGIN, "--json", "-"))
    assert len(answers) == 2
    for answer in answers:
        assert {item["name"] for item in answer["predictions"]} == set(NAMES)
        assert sum(item["score"] for item in answer["predictions"]) == pytest.approx(1)

    # Calibration fits a temperature, so top-1 does not change.
    cli.out("calibrate", best, *PLUGIN, "--json", "calibrated.json")
    content = json.loads(Path("calibrated.json").read_text())
    uncalibrated = {name: metrics[name] for name in ("top1", "ECE")}
    assert content["uncalibrated"] == pytest.approx(uncalibrated)
    after = evaluate(cli, best.with_name("calibrated.pt"))
    assert after["top1"] == metrics["top1"]
    assert after["ECE"] == pytest.approx(content["fitted"]["ECE"])
