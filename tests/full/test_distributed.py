"""Processes of torchrun on the CPU with gloo."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from squares import fit, resume, settings, trainer
from support import QUICK, in_processes, numbers, wait_until

from mldec.files.torch_files import read_torch
from mldec.training.log import RunLog

PLUGINS = Path(__file__).parents[1] / "plugins"
SQUARES = settings("train.epochs=1", "train.eval_batch_size=6", "device=cpu")
TRAIN = ["-m", "mldec.train", *QUICK, "head.dropout=0.0", "optim.name=sgd", "train.epochs=1"]


def torchrun(processes, *words):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, *map(str, words)]


def finish(folder, command, **environment):
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Folder of a run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    done = finish(folder, torchrun(2, *TRAIN))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best mAP") == 1
    return folder / "outputs" / "digits"


def test_two_processes_with_accumulation_fine_tune_like_one(tmp_path):
    # Each batch norm sees a part of the batch, unless it is frozen.
    train = [word for word in TRAIN if word != "backbone=patches"]
    train += [
        "backbone.name=test_resnet",
        "train.freeze=[backbone.network.conv1,backbone.network.layer1]",
        "train.freeze_batchnorm=all",
        "optim.decay=all",
        "optim.backbone_lr=5e-5",
        "optim.layer_decay=0.7",
    ]
    runs = []
    for command in ([sys.executable, *train], torchrun(2, *train, "train.accumulate=2")):
        folder = tmp_path / str(len(runs))
        done = finish(folder, command)
        assert done.returncode == 0, done.stderr
        runs.append(folder / "outputs" / "digits")

    one, two = (read_torch(run / "checkpoints" / "last.pt") for run in runs)
    for part in ("model", "ema"):
        torch.testing.assert_close(one[part], two[part], rtol=1e-4, atol=1e-5)
    for a, b in zip(*map(numbers, runs), strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert len(one["optimizer"]["param_groups"]) == len(two["optimizer"]["param_groups"]) > 4


def test_averaged_batch_norm_statistics_cover_all_images(cli, here):
    words = ["+experiment=digits", "backbone=tiny", "data.train_images=8", "data.val_images=8"]
    words += ["train.batch_size=8", "train.epochs=1", "train.workers=0", "device=cpu"]
    done = finish(
        here / "two", torchrun(2, "-m", "mldec.train", *words, "train.average_batchnorm=true")
    )
    assert done.returncode == 0, done.stderr
    assert cli("train", *words).status == 0

    # The run has one step, so the first batch norm sees the same features in both runs.
    last = "outputs/digits/checkpoints/last.pt"
    one, two = (read_torch(run / last)["model"] for run in (here, here / "two"))
    first = next(name for name in one if name.endswith("running_mean"))
    assert one[first].abs().max() > 0.01
    torch.testing.assert_close(two[first], one[first], rtol=1e-5, atol=1e-7)


def train_squares(rank, count, folder):
    fit(trainer(SQUARES, folder, network="test_resnet"), folder)


def test_all_ranks_evaluate_the_batch_norm_statistics_of_the_checkpoint(tmp_path):
    """In training, each rank has the statistics of its own images."""
    in_processes(train_squares, 2, tmp_path)

    job = resume(trainer(SQUARES, tmp_path, network="test_resnet"), tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    log = RunLog(alone, step=0, lines=0)
    job.evaluate(log)
    log.close()

    [expected] = numbers(alone)
    together = numbers(tmp_path)[-1]
    for name in ("val/loss", "val_raw/loss"):
        assert together[name] == pytest.approx(expected[name], rel=1e-5)


def test_restart_by_torchrun_resumes_exactly(tmp_path, two):
    launch = torchrun(2, "--max-restarts", "1", *TRAIN, "train.save_every_steps=1")
    done = finish(tmp_path, launch, PATCHES_SIGNAL="SIGKILL:3:1")
    assert done.returncode == 0, done.stderr
    again = tmp_path / "outputs" / "digits"
    one, other = (read_torch(run / "checkpoints" / "last.pt") for run in (two, again))
    for part in ("model", "ema"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)
    assert numbers(two) == numbers(again)
    assert "2 of 4 steps done" in done.stdout


def test_signal_to_torchrun_stops_all_processes(tmp_path):
    log = tmp_path / "outputs" / "digits" / "metrics.jsonl"
    command = torchrun(2, *TRAIN, "train.epochs=1000", "train.log_every=1")
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: process.poll() is not None or (log.exists() and log.read_text()))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert err.count("mldec: stopped by ") == 1, err
    state = read_torch(log.parent / "checkpoints" / "last.pt")
    assert state["step"] == numbers(log.parent)[-1]["step"] > 0


def divided(folder, **environment):
    """Start or resume a run of three processes with two unreadable images."""
    words = ["train.batch_size=12", "train.save_every_steps=1"]
    return finish(folder, torchrun(3, PLUGINS / "divided.py", folder, *words), **environment)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Folder of a run of three processes with five steps per epoch."""
    folder = tmp_path_factory.mktemp("three")
    done = divided(folder)
    assert done.returncode == 0, done.stderr
    return folder


# Other ranks learn of a signal one step later, and at the end of an epoch at once.
@pytest.mark.parametrize(
    ("sent", "stopped"), [("SIGTERM:1:1", 2), ("SIGTERM:5:2", 5), ("SIGKILL:3:1", None)]
)
def test_three_processes_stop_together_and_resume(sent, stopped, tmp_path, three):
    done = divided(tmp_path, PATCHES_SIGNAL=sent)
    assert done.returncode != 0
    last = Path("checkpoints", "last.pt")
    if stopped:
        assert done.stderr.count("Stopped: stopped by a signal to another process") == 1
        assert f"process after step {stopped}; saved in " in done.stderr
        assert done.stderr.count("mldec.errors.Stopped\n") == 2
        assert read_torch(tmp_path / last)["step"] == stopped

    again = divided(tmp_path)
    assert again.returncode == 0, again.stderr
    # DDP sums gradients in another order from the second step after a start on.
    one, other = (read_torch(folder / last) for folder in (three, tmp_path))
    for part in ("model", "ema"):
        torch.testing.assert_close(one[part], other[part], rtol=1e-6, atol=1e-9)
    for a, b in zip(numbers(three), numbers(tmp_path), strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_losses_do_not_depend_on_processes_and_accumulation(tmp_path):
    outcomes = []
    for processes, accumulate in ((1, 1), (2, 2)):
        folder = tmp_path / str(processes)
        launch = torchrun(2) if processes == 2 else [sys.executable]
        word = f"train.accumulate={accumulate}"
        done = finish(folder, [*launch, str(PLUGINS / "divided.py"), str(folder), word])
        assert done.returncode == 0, done.stderr
        for number in (7, 30):
            assert done.stdout.count(f"skipped: square {number} is broken") == 2
        outcomes.append((numbers(folder), json.loads((folder / "outcome.json").read_text())))
    for one, two in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert one == pytest.approx(two, rel=1e-6)
    assert outcomes[0][1] == outcomes[1][1]
    assert outcomes[0][1]["bad_images"] == 4
    averaged = [line["epoch"] for line in outcomes[0][0] if "val_raw/mAP" in line]
    assert averaged == [2]


def test_evaluation_does_not_depend_on_processes(cli, digits_run, tmp_path):
    # 41 images in batches of 16: one of 4 processes has none.
    words = [digits_run / "checkpoints" / "best.pt", "--plugin", "patches"]
    words += ["data.val_images=41", "train.eval_batch_size=16"]
    words += ["--metrics", "all", "--groups", "12", "20"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert cli("evaluate", *words, "--json", tmp_path / "1.json").status == 0
    torch.set_num_threads(threads)
    target = tmp_path / "4.json"
    done = finish(tmp_path, torchrun(4, "-m", "mldec.evaluate", *words, "--json", target))
    assert done.returncode == 0, done.stderr
    assert target.read_text() == (tmp_path / "1.json").read_text()
