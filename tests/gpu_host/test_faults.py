"""Regressions that the null GPU found."""

import json
import os
import sys

import pytest

TRAIN = ["+experiment=digits", "data.train_images=32", "data.val_images=16"]
TRAIN += ["train.batch_size=16", "train.workers=0", "train.epochs=1"]
BEST = "outputs/digits/checkpoints/best.pt"
CALIBRATED = "outputs/digits/checkpoints/calibrated.pt"


@pytest.fixture(scope="module")
def folder(null_gpu, tmp_path_factory):
    """Working folder of a run on the CPU with a calibrated checkpoint."""
    folder = tmp_path_factory.mktemp("faults")
    train = ["train"] + TRAIN + ["device=cpu"]
    calibrate = ["calibrate", BEST, "device=cpu", "--folds", "2"]
    done = null_gpu.run("commands.py", json.dumps([train, calibrate]), cwd=folder)
    for command in done.result:
        assert command["status"] == 0, command["err"]
    return folder


def test_training_needs_no_compiler(null_gpu, tmp_path):
    # torch computes some matrix products with Triton, which compiles C.
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {"CC": None, "PATH": str(empty), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    # A new process, because torch looks for a compiler when it is imported.
    words = [sys.executable, "-m", "mldec.train", *TRAIN, "device=cuda"]
    done = null_gpu.run(os.execv, sys.executable, words, cwd=tmp_path, env=env)
    assert done.counts["launches"] > 0
    assert done.counts["triton_launches"] == 0


def test_taggers_wait_for_copies_of_their_device(null_gpu, folder):
    # A copy that has not arrived reads as NaN.
    scores = null_gpu.run("two_devices.py", BEST, cwd=folder, devices=2).result
    assert len(scores) == 4
    for name, values in scores.items():
        assert len(values) == 10, name
        assert all(0 <= value <= 1 for value in values), name


def test_predict_has_one_host_sync_per_batch(null_gpu, folder):
    for counts in null_gpu.run("predict_waits.py", BEST, CALIBRATED, cwd=folder).result:
        assert counts["event_waits"] == 1
        assert counts["stream_waits"] == 0
        assert counts["pageable_copies"] == 0


def test_validation_loss_needs_no_host_sync(null_gpu, tmp_path):
    results = null_gpu.run("mean_loss.py", cwd=tmp_path).result
    assert len(results) > 20
    for name, counts in results.items():
        assert counts["launches"] > 5, name
        assert counts["stream_waits"] == 0, name
        assert counts["event_waits"] == 0, name
        assert counts["pageable_copies"] == 0, name


def test_evaluation_needs_no_host_sync_per_batch(null_gpu, tmp_path):
    commands = []
    for images in (32, 320):
        words = ["device=cuda", "train.eval_batch_size=16", f"data.val_images={images}"]
        commands.append(["train", *TRAIN, *words, f"name=val_{images}"])
    few, many = null_gpu.run("commands.py", json.dumps(commands), cwd=tmp_path).result
    assert (few["status"], many["status"]) == (0, 0), few["err"] + many["err"]
    for name in ("stream_waits", "device_synchronizations", "pageable_copies"):
        assert many["counts"][name] == few["counts"][name], name
    # The scores of each batch and model are copied while the next batch is computed.
    assert many["counts"]["event_waits"] <= few["counts"]["event_waits"] + 2 * 18


def test_attention_does_not_use_cudnn(null_gpu, folder):
    # torch prefers cuDNN on an H100. The null GPU has no plans of cuDNN.
    env = {"NULL_GPU_CAPABILITY": "90"}
    [counts] = null_gpu.run("predict_waits.py", BEST, cwd=folder, env=env).result
    assert counts["launches"] > 0
