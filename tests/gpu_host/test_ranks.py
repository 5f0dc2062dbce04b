"""Two processes with a null GPU each, under torchrun."""

import json
import os
import sys
from pathlib import Path

import pytest

HOST_TIME = str(Path(__file__).parent / "scripts" / "host_time.py")
EXECUTE = (os.execv, sys.executable)
# The launcher initializes CUDA, so that it cannot fork ranks.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = ["-m", "mldec.train", "+experiment=digits", "device=cuda", "data.train_images=64"]
TRAIN += ["data.val_images=40", "train.workers=0", "train.batch_size=16", "train.epochs=1"]


@pytest.mark.parametrize(
    "settings",
    [
        ["train.sync_batchnorm=true", "train.precision=fp16"],
        ["train.accumulate=2", "train.average_batchnorm=true", "train.clip_grad=1"],
    ],
    ids=["sync_batchnorm", "accumulate"],
)
def test_two_processes_train(null_gpu, tmp_path, settings):
    done = null_gpu.run(*EXECUTE, TORCHRUN + TRAIN + settings, cwd=tmp_path, devices=2)

    run = tmp_path / "outputs/digits"
    assert "on cuda:0 x 2" in (run / "train.log").read_text()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4
    assert "val/mAP" in last
    assert (run / "checkpoints" / "last.pt").is_file()

    # Each step and process all-reduces at least the gradients and the loss.
    assert done.counts["collectives"] >= 2 * 2 * 4


def test_synchronized_step_needs_no_host_sync(null_gpu, tmp_path):
    words = TORCHRUN + [HOST_TIME, "coco_tresnet_l", "80", "train.batch_size=8"]
    step = null_gpu.run(*EXECUTE, words, cwd=tmp_path, devices=2).result
    assert step["stream_waits"] == 0
    assert step["pageable_copies"] == 0
    # torch's SyncBatchNorm needs 4,112.
    assert step["launches"] <= 3200
