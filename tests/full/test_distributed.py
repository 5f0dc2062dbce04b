"""Processes of torchrun on the CPU with gloo."""

import json
import signal
from pathlib import Path

import divided
import forked
import pytest
import torch
from forked import Forked, Outcome, mldec_command
from squares import fit, resume, settings, trainer
from support import QUICK, in_processes, numbers, wait_until

from mldec.files.torch_files import read_torch
from mldec.training.log import RunLog

SQUARES = settings("train.epochs=1", "train.eval_batch_size=6", "device=cpu")
TRAIN = ["train", *QUICK, "head.dropout=0.0", "optim.name=sgd", "train.epochs=1"]


def torchrun(ranks, folder, job, *words, restarts=0, **environment) -> Outcome:
    """Run job(*words) in several ranks of torchrun in a folder, or in one process without it."""
    folder.mkdir(exist_ok=True)
    job = (job, *map(str, words))
    if ranks > 1:
        job = (forked.torchrun, ranks, restarts, *job)
    return forked.run(*job, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Folder of a run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    done = torchrun(2, folder, mldec_command, *TRAIN)
    assert done.status == 0, done.err
    assert done.out.count("best mAP") == 1
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
    for count in (1, 2):
        folder = tmp_path / str(count)
        done = torchrun(count, folder, mldec_command, *train, f"train.accumulate={count}")
        assert done.status == 0, done.err
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
    averaged = "train.average_batchnorm=true"
    done = torchrun(2, here / "two", mldec_command, "train", *words, averaged)
    assert done.status == 0, done.err
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
    words = [*TRAIN, "train.save_every_steps=1"]
    kill = "SIGKILL:3:1"
    done = torchrun(2, tmp_path, mldec_command, *words, restarts=1, PATCHES_SIGNAL=kill)
    assert done.status == 0, done.err
    again = tmp_path / "outputs" / "digits"
    one, other = (read_torch(run / "checkpoints" / "last.pt") for run in (two, again))
    for part in ("model", "ema"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)
    assert numbers(two) == numbers(again)
    assert "2 of 4 steps done" in done.out


def test_signal_to_torchrun_stops_all_processes(tmp_path):
    log = tmp_path / "outputs" / "digits" / "metrics.jsonl"
    words = [*TRAIN, "train.epochs=1000", "train.log_every=1"]
    err = tmp_path / "err"
    process = Forked(
        forked.torchrun, 2, 0, mldec_command, *words, cwd=tmp_path, out=tmp_path / "out", err=err
    )
    wait_until(lambda: process.poll() is not None or (log.exists() and log.read_text()))
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert err.read_text().count("mldec: stopped by ") == 1, err.read_text()
    state = read_torch(log.parent / "checkpoints" / "last.pt")
    assert state["step"] == numbers(log.parent)[-1]["step"] > 0


def three_ranks(folder, **environment):
    """Start or resume a run of three processes with two unreadable images."""
    words = [folder, "train.batch_size=12", "train.save_every_steps=1"]
    return torchrun(3, folder, divided.main, *words, **environment)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Folder of a run of three processes with five steps per epoch."""
    folder = tmp_path_factory.mktemp("three")
    done = three_ranks(folder)
    assert done.status == 0, done.err
    return folder


# Other ranks learn of a signal one step later, and at the end of an epoch at once.
@pytest.mark.parametrize(
    ("sent", "stopped"), [("SIGTERM:1:1", 2), ("SIGTERM:5:2", 5), ("SIGKILL:3:1", None)]
)
def test_three_processes_stop_together_and_resume(sent, stopped, tmp_path, three):
    done = three_ranks(tmp_path, PATCHES_SIGNAL=sent)
    assert done.status != 0
    last = Path("checkpoints", "last.pt")
    if stopped:
        # torchrun repeats some lines with an indentation.
        ends = [line for line in done.err.splitlines() if line.startswith("mldec.errors.Stopped")]
        [message] = [line for line in ends if line != "mldec.errors.Stopped"]
        assert len(ends) == 3
        assert f" after step {stopped}; saved in " in message
        assert read_torch(tmp_path / last)["step"] == stopped

    again = three_ranks(tmp_path)
    assert again.status == 0, again.err
    # DDP sums gradients in another order from the second step after a start on.
    one, other = (read_torch(folder / last) for folder in (three, tmp_path))
    for part in ("model", "ema"):
        torch.testing.assert_close(one[part], other[part], rtol=1e-6, atol=1e-9)
    for a, b in zip(numbers(three), numbers(tmp_path), strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_losses_do_not_depend_on_processes_and_accumulation(tmp_path):
    outcomes = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        done = torchrun(count, folder, divided.main, folder, f"train.accumulate={count}")
        assert done.status == 0, done.err
        for number in (7, 30):
            assert done.out.count(f"skipped: square {number} is broken") == 2
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
    done = torchrun(4, tmp_path, mldec_command, "evaluate", *words, "--json", target)
    assert done.status == 0, done.err
    assert target.read_text() == (tmp_path / "1.json").read_text()
