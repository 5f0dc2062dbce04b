"""Commands on the null GPU."""

import json

import numpy as np
import pytest
from forked import mldec_command
from PIL import Image

DATA = "data.train_images=64 data.val_images=40 train.workers=0"
QUICK = f"+experiment=digits device=cuda {DATA} train.batch_size=16"
FP16 = f"{QUICK} train.precision=fp16 train.log_every=2"
BEST = "outputs/digits/checkpoints/best.pt"
CALIBRATED = "outputs/digits/checkpoints/calibrated.pt"
ON_CUDA = "--device cuda"
TIMED = "--experiment digits --repeats 1 device=cuda train.batch_size=8"
PHOTOS = "data=csv data.root=photos data.image_size=40 data.cache_dir=cache backbone=tiny"

COMMANDS = {
    "resume": f"train {FP16} train.epochs=3 resume=auto",
    "automatic batch size": f"train {QUICK} name=auto train.epochs=1 train.batch_size=auto",
    "compiled training": f"train {QUICK} name=compiled train.epochs=1 train.compile=true",
    "zero-shot": f"train +experiment=digits_zsl device=cuda {DATA} train.epochs=1",
    "stored tokens": f"train +experiment=finetune_frozen head=csra device=cuda {PHOTOS} "
    "train.workers=0 train.epochs=1 train.min_steps=2",
    "train on the CPU": f"train {QUICK} device=cpu name=cpu train.epochs=1",
    "evaluate": "evaluate outputs/digits device=cuda --json metrics.json",
    "predict": f"predict {BEST} photos {ON_CUDA} --workers 0 --threshold 0 --json rows.json "
    "--features features.npy --pictures maps",
    "calibrate": f"calibrate {BEST} device=cuda --folds 2",
    "predict calibrated": f"predict {CALIBRATED} photos {ON_CUDA} --workers 0 --content scores "
    "--json scores.json",
    "report": f"report {CALIBRATED} device=cuda --out report.html",
    "suspected labels": f"check_data --checkpoint {BEST} device=cuda --errors errors.csv",
    "export": "export outputs/cpu model.onnx",
    "benchmark throughput": f"benchmark throughput {TIMED}",
    "benchmark profile": f"benchmark profile {TIMED}",
    "benchmark predict": f"benchmark predict {BEST} photos {ON_CUDA} --count 16 --rounds 1",
    "demo": f"demo {CALIBRATED} {ON_CUDA} --port 0",
}
# An export is compared with its checkpoint, whose weights would be zeros after training here.
ON_THE_CPU = ("train on the CPU", "export")
IMAGES = 8  # in the folder photos, the last two for validation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Working folder of all commands, with some labeled images."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    rows = ["path,labels,split"]
    for number in range(IMAGES):
        pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
        split = "train" if number < IMAGES - 2 else "val"
        rows.append(f"{number}.png,{'red' if number % 2 else 'blue'},{split}")
    (folder / "photos" / "data.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(null_gpu, folder):
    """A finished run in fp16 in a new process."""
    return null_gpu.run(mldec_command, "train", *FP16.split(), "train.epochs=2", cwd=folder)


@pytest.fixture(scope="module")
def finished(null_gpu, trained, folder):
    """Results of all commands, which run in one process."""
    commands = [command.split() for command in COMMANDS.values()]
    done = null_gpu.run("commands.py", json.dumps(commands), cwd=folder)
    return dict(zip(COMMANDS, done.result, strict=True))


def test_training_uses_the_device(trained, folder):
    log = (folder / "outputs/digits/train.log").read_text()
    assert "fp16 on cuda:0" in log
    assert trained.counts["convolutions"] > 0
    assert trained.counts["device_synchronizations"] == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_command_succeeds(finished, name):
    done = finished[name]
    assert done["status"] == (130 if name == "demo" else 0), done["err"]
    assert (done["counts"]["launches"] > 0) == (name not in ON_THE_CPU)


def test_run_with_scaler_resumes(finished, folder):
    log = (folder / "outputs/digits/train.log").read_text()
    assert "epoch 3 of 3, 0 of 4 steps done" in log
    lines = (folder / "outputs/digits/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["epoch"] == 3
    assert json.loads(lines[-1])["step"] == 12


def test_predict_waits_for_copies(finished, folder):
    # A copy that has not arrived reads as NaN.
    for row in json.loads((folder / "rows.json").read_text()):
        assert all(0 <= item["score"] <= 1 for item in row["predictions"])
        assert len(row["predictions"]) == 10
    rows = json.loads((folder / "scores.json").read_text())
    assert len(rows) == IMAGES
    for row in rows:
        assert all(0 <= score <= 1 for score in row["scores"].values())
    assert np.isfinite(np.load(folder / "features.npy")).all()


def test_web_page_answers(finished):
    assert '"predictions"' in finished["demo"]["out"]
