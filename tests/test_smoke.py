"""One model in one process: train, stop, resume, evaluate, calibrate, predict, report, export."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import QUICK, Cli, assert_equal, made, numbers

from mldec.data.digits import digits
from mldec.data.types import fixed_sample
from mldec.files.torch_files import read_torch
from mldec.training.step import Learner
from mldec.words.digits import NAMES

PLUGIN = ["--plugin", "patches"]


def predict(cli: Cli, checkpoint: Path, *words: str) -> list[dict[str, Any]]:
    """Return the predicted classes of scene.png."""
    [row] = json.loads(cli.out("predict", checkpoint, "scene.png", *words, "--json", "-"))
    return list(row["predictions"])


def scores(predictions: list[dict[str, Any]]) -> dict[str, float]:
    return {item["name"]: item["score"] for item in predictions}


def test_model_from_training_to_export(
    cli: Cli, digits_run: Path, here: Path, monkeypatch: pytest.MonkeyPatch, few_resamples: None
) -> None:
    run = Path("outputs/digits")
    best = run / "checkpoints" / "best.pt"

    # A run that a signal stops in the middle of an epoch and that is resumed equals a whole run.
    learn = Learner.learn
    steps: list[int] = []

    def learn_and_stop(*args: Any, **keywords: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*args, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "learn", learn_and_stop)
        assert cli("train", *QUICK).status == 143
    cli.out("train", *QUICK, "resume=auto")
    assert numbers(run) == numbers(digits_run)
    for name in ("last.pt", "best.pt"):
        expected = read_torch(digits_run / "checkpoints" / name)
        assert_equal(read_torch(run / "checkpoints" / name), expected)

    # Evaluation gives the metric of the training.
    cli.out("evaluate", run, *PLUGIN, "--json", "evaluated.json")
    metrics = json.loads(Path("evaluated.json").read_text())["metrics"]
    assert metrics["mAP"] == pytest.approx(read_torch(best)["best"]["value"], abs=1e-9)

    # A calibrated model predicts the classes above their thresholds.
    cli.out("calibrate", run, *PLUGIN, "--folds", "2")
    calibrated = best.with_name("calibrated.pt")
    image = fixed_sample(made(digits, val_images=1).val.dataset, 0)[0]
    Image.fromarray(image.permute(1, 2, 0).numpy()).save("scene.png")
    for item in predict(cli, calibrated, *PLUGIN):
        assert item["name"] in NAMES
        assert item["score"] >= item["threshold"]

    cli.out("report", calibrated, *PLUGIN, "--out", "report.html")
    page = Path("report.html").read_text()
    assert all(name in page for name in NAMES)

    # The exported model predicts the same scores.
    cli.out("export", best, "model.onnx", *PLUGIN)
    expected = scores(predict(cli, best, *PLUGIN, "--threshold", "0"))
    exported = scores(predict(cli, Path("model.onnx"), "--threshold", "0"))
    assert exported == pytest.approx(expected, abs=1e-5)

    assert "digits" in cli.out("summary", "outputs")
