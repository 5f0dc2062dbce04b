"""Tests on a CUDA device. Run them with `pytest -m gpu`."""

import json
import math
import subprocess
import sys

import networks
import pytest
import torch
import yaml
from pictures import picture
from support import CUDA_MARKS, no_host_sync, write_coco

import mldec
from mldec.data.types import Classes
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.files.torch_files import read_torch
from mldec.heads.ml_decoder import MLDecoder
from mldec.runtime.devices import PinnedCopies
from mldec.tools.predict.answers import Rule

pytestmark = CUDA_MARKS

# The network of the digits experiment, which has batch norm, dropout and convolutions.
SHORT = ["+experiment=digits", "data.train_images=512", "data.val_images=256"]
SHORT += ["train.epochs=2", "device=cuda"]


def mldec_command(*words, cwd=None):
    """Run a command in a new process."""
    command = [sys.executable, "-m", "mldec", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def train(folder, *words):
    """Train in a new process, and return the folder of the run."""
    folder.mkdir(exist_ok=True)
    mldec_command("train", *words, cwd=folder)
    return folder / "outputs" / "digits"


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_precisions_train(tmp_path, precision, compiled):
    words = [f"train.precision={precision}", f"train.compile={compiled}", "train.log_every=2"]
    run = train(tmp_path, *SHORT, *words)
    found = losses(run)
    assert found[-1] < found[0]
    state = read_torch(run / "checkpoints" / "last.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_tresnet_trains_in_channels_last(tmp_path):
    words = ["+experiment=coco_tresnet_m", f"data.root={tmp_path / 'coco'}", "init=null"]
    words += ["backbone.pretrained=false", "data.image_size=64", "train.batch_size=8"]
    words += ["train.epochs=1", "train.log_every=1", "train.workers=2", "name=digits"]
    write_coco(tmp_path / "coco", images=24)

    run = train(tmp_path, *words, "device=cuda")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["train"]["channels_last"]
    assert len(losses(run)) == 3
    assert all(math.isfinite(loss) for loss in losses(run))


def test_compiled_run_trains_with_smaller_last_batch(tmp_path):
    words = ["data.train_images=40", "train.batch_size=16", "train.log_every=1"]
    words += ["head.dropout=0.0", "optim.name=adamw", "train.precision=fp32"]
    runs = []
    for compiled in ("false", "true"):
        folder = tmp_path / compiled
        runs.append(losses(train(folder, *SHORT, *words, f"train.compile={compiled}")))
    # Two epochs of 16, 16 and 8 images.
    assert len(runs[0]) == 6
    assert runs[1] == pytest.approx(runs[0], rel=2e-2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a run on the device, with some images."""
    run = train(tmp_path_factory.mktemp("trained"), *SHORT)
    for seed in range(5):
        picture(seed=seed).save(run / f"{seed}.png")
    return run


def answers(run, name, *words):
    """Return the scores of `predict` by class."""
    file = run / f"{name}.jsonl"
    mldec_command("predict", run, run, "--content", "scores", "--jsonl", file, *words)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 5
    return [row["scores"] for row in rows]


def metrics(run, name, *words):
    """Return the metrics of `evaluate`."""
    file = run / f"{name}.json"
    mldec_command("evaluate", run, "--json", file, *words)
    return json.loads(file.read_text())["metrics"]


# TF32 is off, so float32 equals the CPU. fp16 and bf16 have mantissas of 10 and 7 bits.
@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("fp16", 2e-2), ("bf16", 1e-1)])
def test_predict_and_evaluate_equal_cpu(trained, precision, near):
    expected = answers(trained, f"cpu-{precision}", "--device", "cpu")
    found = answers(trained, precision, "--device", "cuda", "--precision", precision)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, abs=near)

    on_cpu = metrics(trained, f"cpu-{precision}", "device=cpu")
    on_gpu = metrics(trained, precision, "device=cuda", f"train.precision={precision}")
    assert on_gpu["mAP"] == pytest.approx(on_cpu["mAP"], abs=100 * near)


def test_predictions_with_cudnn_benchmark_equal_cpu(trained):
    photos = [str(trained / f"{seed}.png") for seed in range(5)]
    on_cpu = mldec.load(trained, device="cpu", threshold=0.0)(photos)
    on_gpu = mldec.load(trained, device="cuda", threshold=0.0, precision="fp32")(photos)
    assert torch.backends.cudnn.benchmark
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert dict(found) == pytest.approx(dict(expected), abs=1e-4)


def test_calibrated_scores_need_no_host_sync():
    calibration = networks.CALIBRATION
    logits = torch.randn(4, networks.CLASSES)
    on_gpu = logits.cuda()
    # The first batch moves the calibration to the device.
    calibration.scaled(on_gpu)
    with no_host_sync():
        scaled = calibration.scaled(on_gpu)
    torch.testing.assert_close(scaled.cpu(), calibration.scaled(logits))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_copies_of_other_device_are_awaited():
    values = torch.ones(1000, device="cuda:1")
    with torch.cuda.device(1):
        torch.cuda._sleep(10**9)  # cycles
        values += 1
    with torch.cuda.device(0):
        [copy] = PinnedCopies(values).wait()
    assert copy.eq(2).all()


@pytest.mark.parametrize(
    "options", [{}, {"threshold": 0.5}, {"content": "decisions", "threshold": 0.9}]
)
def test_classes_of_rows_need_no_host_sync(options):
    rule = Rule(classes=Classes(tuple(map(str, range(9605)))), **options)
    # The lower class comes first if scores are equal.
    scores = (50 * torch.rand(64, 9605)).round() / 50
    min_scores = rule.min_scores().cuda()
    on_gpu = scores.cuda()
    with no_host_sync():
        selected = rule.selected(on_gpu, min_scores)
    assert torch.equal(selected.cpu(), rule.selected(scores, rule.min_scores()))


@pytest.mark.parametrize(
    ("evaluator", "options"),
    [
        (MultiLabelEvaluator, {}),
        (PartialLabelEvaluator, {}),
        (SingleLabelEvaluator, {}),
        (ZeroShotEvaluator, {"unseen": range(0, 80, 5)}),
        (ZeroShotEvaluator, {"unseen": range(0, 80, 5), "images": "all"}),
    ],
)
def test_evaluators_need_no_host_sync(evaluator, options):
    torch.manual_seed(0)
    logits = (8 * torch.randn(160, 80)).round() / 8
    targets = torch.nn.functional.one_hot(torch.randint(80, (160,)), 80).to(torch.int8)
    on_cpu = evaluator(80, **options)
    on_cpu.update(logits, targets)

    on_gpu = evaluator(80, **options)
    on_gpu.update(logits[:32].cuda(), targets[:32])
    for first in range(32, 160, 32):
        block = logits[first : first + 32].cuda()
        labels = targets[first : first + 32].pin_memory()
        with no_host_sync():
            on_gpu.update(block, labels)
    assert on_gpu.compute() == pytest.approx(on_cpu.compute(), rel=1e-9)
    # Compare strings, because NaN does not equal NaN.
    assert str(on_gpu.per_class()) == str(on_cpu.per_class())


@pytest.mark.parametrize("classes", [80, 9605])
def test_head_gradients_equal_cpu(classes):
    torch.manual_seed(0)
    head = MLDecoder(256, classes, num_groups=200, dropout=0.0)
    tokens = torch.randn(2, 49, 256)
    found = []
    for device in ("cpu", "cuda"):
        head.to(device).zero_grad()
        logits = head(tokens.to(device))
        logits.sum().backward()
        found.append((logits.cpu(), head.pool_weight.grad.cpu()))
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-3)


def test_logits_under_autocast_do_not_tie():
    torch.manual_seed(0)
    head = MLDecoder(256, 80).cuda().eval()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        logits = head(torch.randn(512, 49, 256, device="cuda"))
    assert logits.dtype == torch.float32
    assert len(logits[:, 0].unique()) > 500
