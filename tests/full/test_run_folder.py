"""The folder of a run: locks, full disks, and changed data."""

import errno
import os
import shutil
import signal

import pytest
from forked import Forked, mldec_command
from photos import write_photos
from support import QUICK, numbers, one_line, wait_until

from mldec.files.torch_files import read_torch


@pytest.fixture
def run(digits_run, here):
    """Copy of a finished run in the working folder."""
    shutil.copytree(digits_run, here / "outputs" / "digits")
    return here / "outputs" / "digits"


def content(run):
    """Return the files of a run without its lock."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_folder_is_locked_until_run_is_killed(cli, here):
    folder = here / "outputs" / "digits"
    words = [*QUICK, "train.epochs=1000", "train.log_every=1", "train.workers=1"]
    words += ["train.save_every_steps=1"]
    first = Forked(mldec_command, "train", *words, cwd=here, out=here / "out")
    try:
        log, last = folder / "metrics.jsonl", folder / "checkpoints" / "last.pt"
        wait_until(lambda: first.poll() is not None or (last.exists() and log.exists()))
        assert first.poll() is None
        for word in ("seed=1", "resume=auto", f"resume={folder}/checkpoints/last.pt"):
            assert f"process {first.pid}" in cli.fault("train", *QUICK, word)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()

    # A loader process that still lives holds no lock.
    assert "seed: 0 -> 1" in cli.fault("train", *words, "resume=auto", "seed=1")
    steps = [line["step"] for line in numbers(folder)]
    assert steps == sorted(steps)
    assert not (folder / "run.lock").exists()


def test_resume_from_other_folder_keeps_run(run, cli, tmp_path):
    other = tmp_path / "elsewhere" / "last.pt"
    other.parent.mkdir()
    shutil.copy(run / "checkpoints" / "last.pt", other)
    before = content(run)
    assert f"resume={other}: {run}" in cli.fault("train", *QUICK, f"resume={other}")
    assert content(run) == before

    # A new folder, or a checkpoint of the same folder, is allowed.
    out = cli.out("train", *QUICK, "train.epochs=3", f"resume={other}", "name=other")
    assert "epoch 3 of 3" in out
    assert "missing" not in out
    assert [line["step"] for line in numbers(tmp_path / "outputs" / "other")] == [10, 12, 12]
    cli.out("train", *QUICK, "resume=outputs/digits/checkpoints/last.1.pt")


def test_restart_by_torchrun_resumes_newest_checkpoint(run, cli, tmp_path, monkeypatch):
    shutil.copy(run / "checkpoints" / "last.1.pt", tmp_path / "start.pt")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "ended after epoch 2" in cli.out("train", *QUICK, "resume=start.pt")


def test_runs_of_sweep_have_own_folders(cli, here):
    cli.out("train", *QUICK, "-m", "seed=0,1", "hydra.sweep.dir=sweep", "train.epochs=1")
    runs = sorted(path.parent for path in here.rglob("train.log"))
    assert len(runs) == 2
    assert all((folder / "train.log").read_text().count("best mAP") == 1 for folder in runs)
    assert not list(here.rglob("run.lock"))


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["config.yaml", "train.log"])
def test_full_disk_at_resume_is_one_line(name, run, cli, monkeypatch):
    before = content(run / "checkpoints")
    with monkeypatch.context() as patched:
        if name == "train.log":
            (run / name).unlink()
            (run / name).symlink_to("/dev/full")
        else:
            patched.setattr("mldec.files.atomic.os.fsync", full_disk)
        one_line(cli.fault("train", *QUICK, "resume=auto"), str(run / name))
    assert content(run / "checkpoints") == before
    assert not (run / "run.lock").exists()
    if name == "train.log":
        (run / name).unlink()
    cli.out("train", *QUICK, "resume=auto")


def test_changed_data_must_be_allowed_at_resume(cli, here):
    photos = write_photos(here / "photos")
    words = [word for word in QUICK if not word.startswith("data.")]
    words += ["data=csv", f"data.root={photos}", "data.image_size=32", "train.batch_size=8"]
    cli.out("train", *words, "train.epochs=1")
    last = here / "outputs" / "digits" / "checkpoints" / "last.pt"
    before = last.read_bytes()
    table = (photos / "data.csv").read_text()
    more = [*words, "train.epochs=2", "resume=auto"]

    (photos / "data.csv").write_text(table.replace("15.png,,train\n", ""))
    assert "data.changed=allow" in cli.fault("train", *more)
    assert last.read_bytes() == before

    assert "data.changed=allow" in cli.out("train", *more, "data.changed=allow")
    assert "changed" not in read_torch(last)["config"]["data"]

    # Later resumes compare with the changed table. The folder may move.
    shutil.move(photos, here / "moved")
    cli.out("train", *words, f"data.root={here / 'moved'}", "train.epochs=3", "resume=auto")
