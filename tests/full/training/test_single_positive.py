"""Runs with losses that keep a state per training image."""

import signal
from pathlib import Path

import pytest
import torch
from forked import mldec_command, run, torchrun
from photos import write_photos
from support import CONFIGS, assert_equal, numbers, one_line

from mldec.checkpoint.loading import load_newest
from mldec.files.torch_files import read_torch

# Four steps per epoch, and two forward passes for the evaluation.
WORDS = ["+experiment=digits", "plugins=[patches]", "backbone=patches", f"--config-dir={CONFIGS}"]
WORDS += [
    "head=gap",
    "data=csv",
    "data.root=photos",
    "data.image_size=64",
    "data.single_positive=0",
]
WORDS += ["train.batch_size=4", "train.epochs=3", "train.workers=0", "train.save_every_steps=1"]
WORDS += ["optim.lr=1e-3", "device=cpu"]
LOSSES = {
    "role": ["loss.expected_positives=1.5"],
    "em_apl": ["loss.warmup_epochs=1"],
    "ll_cp": ["loss.delta=0.1", "loss.stages=3"],
}
STATES = {"role": "estimator", "em_apl": "pseudo", "ll_cp": "corrections"}


@pytest.fixture
def photos(here):
    return write_photos(here / "photos")


def checkpoint(name):
    return read_torch(Path("outputs") / name / "checkpoints" / "last.pt")


@pytest.mark.parametrize("loss", LOSSES)
def test_killed_run_resumes_with_the_state_of_the_images(loss, photos, cli):
    words = [*WORDS, f"loss={loss}", *LOSSES[loss]]
    assert cli("train", *words, "name=whole").status == 0

    # The tenth forward pass is in the second epoch.
    env = {"PATCHES_SIGNAL": "SIGKILL:10"}
    killed = run(mldec_command, "train", *words, "name=parts", env=env)
    assert killed.status == -signal.SIGKILL
    _, saved = load_newest(Path("outputs/parts/checkpoints/last.pt"))
    assert 4 < saved.step < 8
    assert cli("train", *words, "name=parts", "resume=auto").status == 0

    whole = checkpoint("whole")
    parts = checkpoint("parts")
    for key in ("model", "loss", "optimizer"):
        assert_equal(whole[key], parts[key])
    assert numbers(Path("outputs/whole")) == numbers(Path("outputs/parts"))
    assert not torch.equal(saved.loss[STATES[loss]], parts["loss"][STATES[loss]])


def test_estimated_labels_have_their_own_learning_rate(photos, cli):
    words = [*WORDS, "loss=role", "loss.lr_factor=7", "schedule.name=cosine"]
    assert cli("train", *words, "optim.weight_decay=0.1", "name=role").status == 0
    groups = checkpoint("role")["optimizer"]["param_groups"]
    assert groups[-1]["initial_lr"] == pytest.approx(7 * groups[0]["initial_lr"])
    assert groups[-1]["weight_decay"] == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["loss=role", "mix.mixup=0.2", "mix.labels=union"], "mix.mixup"),
        (["loss=ll_cp", "data=digits"], "loss"),
    ],
)
def test_errors_name_the_setting(words, named, photos, cli):
    settings = WORDS
    if "data=digits" in words:
        settings = [word for word in WORDS if not word.startswith("data.")]
    done = cli("train", *settings, *words)
    assert done.status in (1, 2)
    one_line(done.err, named)


def test_several_processes_are_refused(photos):
    done = run(torchrun, 2, 0, mldec_command, "train", *WORDS, "loss=role")
    assert done.status != 0
    assert "loss: ROLE" in done.err + done.out
