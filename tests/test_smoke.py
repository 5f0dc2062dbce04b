"""The life of a model in one process: train, stop, resume, and everything after training."""

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


def test_a_model_from_training_to_export(
    cli: Cli, digits_run: Path, here: Path, monkeypatch: pytest.MonkeyPatch, few_resamples: None
) -> None:
    run = Path("outputs/digits")

    # A signal in the middle of an epoch stops the run; resumed, it ends like one without a stop.
    learn, steps = Learner.learn, []

    def stopping(*args: Any, **keywords: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*args, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "learn", stopping)
        assert cli("train", *QUICK).status == 143
    cli.out("train", *QUICK, "resume=auto")
    assert numbers(run) == numbers(digits_run)
    for name in ("last.pt", "best.pt"):
        paths = [folder / "checkpoints" / name for folder in (run, digits_run)]
        assert_equal(*[read_torch(path) for path in paths])

    # The metrics of the checkpoint are those of the run.
    best = run / "checkpoints" / "best.pt"
    cli.out("evaluate", run, *PLUGIN, "--json", "evaluated.json")
    metrics = json.loads(Path("evaluated.json").read_text())["metrics"]
    assert metrics["mAP"] == pytest.approx(read_torch(best)["best"]["value"], abs=1e-9)

    # Calibrated, it answers with the classes above their thresholds.
    cli.out("calibrate", run, *PLUGIN, "--folds", "2")
    calibrated = best.with_name("calibrated.pt")
    picture = fixed_sample(made(digits, val_images=1).val.dataset, 0)[0]
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save("scene.png")
    [answer] = json.loads(cli.out("predict", calibrated, "scene.png", *PLUGIN, "--json", "-"))
    assert {item["name"] for item in answer["predictions"]} <= set(NAMES)
    assert all(item["score"] >= item["threshold"] for item in answer["predictions"])

    cli.out("report", calibrated, *PLUGIN, "--out", "report.html")
    assert all(name in Path("report.html").read_text() for name in NAMES)

    # The exported network gives the same answers.
    cli.out("export", best, "model.onnx", *PLUGIN)
    scores = [
        json.loads(cli.out("predict", path, "scene.png", *words, "--threshold", "0", "--json", "-"))
        for path, words in ((best, PLUGIN), ("model.onnx", []))
    ]
    ours, exported = (
        {item["name"]: item["score"] for item in rows[0]["predictions"]} for rows in scores
    )
    assert exported == pytest.approx(ours, abs=1e-5)
    assert "digits" in cli.out("summary", "outputs")
