"""A run's folder: one run at a time, on a disk that may be full, with data that may change."""

import dataclasses
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image
from support import QUICK, numbers, one_line, wait_until

from mldec.checkpoint import loading
from mldec.files.torch_files import read_torch


@pytest.fixture
def run(digits_run, here):
    """A finished run that a test may spoil, in the working folder."""
    shutil.copytree(digits_run, here / "outputs" / "digits")
    return here / "outputs" / "digits"


def content(run):
    """Return every file of a run but its lock."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_a_second_run_is_stopped_and_a_killed_one_gives_its_folder_free(cli, here):
    folder = here / "outputs" / "digits"
    words = [*QUICK, "train.epochs=1000", "train.log_every=1", "train.workers=1"]
    words += ["train.save_every_steps=1"]
    first = subprocess.Popen(
        [sys.executable, "-m", "mldec.train", *words], cwd=here, stdout=subprocess.DEVNULL
    )
    try:
        log, last = folder / "metrics.jsonl", folder / "checkpoints" / "last.pt"
        wait_until(lambda: first.poll() is not None or (last.exists() and log.exists()))
        assert first.poll() is None
        for word in ("seed=1", "resume=auto", f"resume={folder}/checkpoints/last.pt"):
            err = cli.fault("train", *QUICK, word)
            one_line(err, f"another run is using this folder (process {first.pid} on ", "name=...")
    finally:
        first.kill()
        first.wait()

    # Its loader process may still live; the folder is free nevertheless.
    err = cli.fault("train", *words, "resume=auto", "seed=1")
    one_line(err, "is of a run with other settings (seed: 0 -> 1)")
    steps = [line["step"] for line in numbers(folder)]
    assert steps == sorted(steps)
    assert not (folder / "run.lock").exists()


def test_the_checkpoint_of_another_run_does_not_replace_this_one(run, cli, tmp_path):
    other = tmp_path / "elsewhere" / "last.pt"
    other.parent.mkdir()
    shutil.copy(run / "checkpoints" / "last.pt", other)
    before = content(run)
    err = cli.fault("train", *QUICK, f"resume={other}")
    one_line(err, f"resume={other}: {run} holds another run; pass name=...")
    assert content(run) == before

    # In a new folder, and in the same one with a file of its own, it goes on.
    status, out, _ = cli("train", *QUICK, "train.epochs=3", f"resume={other}", "name=other")
    assert (status, "epoch 3 of 3" in out, "missing" in out) == (0, True, False)
    assert [line["step"] for line in numbers(tmp_path / "outputs" / "other")] == [10, 12, 12]
    assert cli("train", *QUICK, "resume=outputs/digits/checkpoints/last.1.pt").status == 0


def test_a_restart_goes_on_from_its_own_checkpoint(run, cli, tmp_path, monkeypatch):
    shutil.copy(run / "checkpoints" / "last.1.pt", tmp_path / "start.pt")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    status, out, _ = cli("train", *QUICK, "resume=start.pt")
    assert (status, "ended after epoch 2, nothing is left to train" in out) == (0, True)


def test_the_runs_of_a_sweep_each_have_their_folder(cli, here):
    words = [*QUICK, "-m", "seed=0,1", "hydra.sweep.dir=sweep", "train.epochs=1"]
    assert cli("train", *words).status == 0
    runs = sorted(path.parent for path in here.rglob("train.log"))
    assert len(runs) == 2
    assert all((folder / "train.log").read_text().count("best mAP") == 1 for folder in runs)
    assert not list(here.rglob("run.lock"))


@pytest.mark.parametrize("name", ["config.yaml", "train.log"])
def test_a_full_disk_at_a_resume_is_one_line(name, run, cli):
    full = run / (name if name == "train.log" else f"{name}.tmp")
    full.unlink(missing_ok=True)
    full.symlink_to("/dev/full")
    before = content(run / "checkpoints")
    status, _, err = cli("train", *QUICK, "resume=auto")
    assert status == 1
    one_line(err, f"cannot write {run / name}: No space left on device; free space", "resume=auto")
    assert content(run / "checkpoints") == before
    assert not (run / "run.lock").exists()
    full.unlink(missing_ok=True)
    assert cli("train", *QUICK, "resume=auto").status == 0


@pytest.mark.parametrize("kibibytes", [4, 8, 16, 40, 200])
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk_is_one_line(kibibytes, tmp_path):
    command = (
        f"mount -t tmpfs -o size={kibibytes}k none {tmp_path} && cd {tmp_path} && "
        f"{sys.executable} -m mldec.train " + " ".join(f"'{word}'" for word in QUICK)
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 1
    one_line(done.stderr, "free space")
    assert "No space left on device" in done.stderr or "the disk is full" in done.stderr


# A quick run on a table of photos, of which `data.root` is the folder.
ON_PHOTOS = [word for word in QUICK if not word.startswith("data.")]
ON_PHOTOS += ["data=csv", "data.image_size=32", "train.batch_size=8", "train.epochs=1"]


@pytest.fixture
def photos(here):
    """A CSV data set of small images, in the working folder."""
    root = here / "photos"
    root.mkdir()
    rows = ["path,labels,split"]
    for number in range(24):
        Image.new("RGB", (16, 16), (10 * number, 0, 0)).save(root / f"{number}.png")
        name, split = ("green", "red")[number % 2], "train" if number < 16 else "val"
        rows.append(f"{number}.png,{name},{split}")
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    return root


def test_a_run_repeats_images_of_rare_classes(photos, cli):
    # 16 images of two classes: each appears sqrt(1 / (1 / 2)) times, together 22.6 times.
    words = ["data.repeat_threshold=1", "data.sampler=repeat_factor"]
    out = cli.out("train", *ON_PHOTOS, f"data.root={photos}", *words)
    assert "16 training and 8 validation images (23 images per epoch: data.sampler=rep" in out
    assert "0 of 3 steps done" in out


def test_a_run_leaves_its_fold_out_and_goes_on_with_no_other(photos, cli):
    base = [*ON_PHOTOS, f"data.root={photos}", "train.batch_size=4", "name=fold"]
    # Of the 16 training images; the 8 others are not read.
    (photos / "20.png").unlink()
    folds = [sha256(f"0 {number}.png".encode()).digest()[7] % 2 for number in range(16)]
    out = cli.out("train", *base, "data.fold=2/2")
    assert f"{folds.count(0)} training and {folds.count(1)} validation images" in out
    assert "fold: 2/2" in Path("outputs/fold/config.yaml").read_text()

    err = cli.fault("train", *base, "data.fold=1/2", "resume=auto", "train.epochs=2")
    one_line(err, "is of a run with other settings (data.fold: 2/2 -> 1/2): restore them")


def test_a_change_of_the_data_is_refused_at_a_resume(photos, cli, tmp_path):
    words = [*ON_PHOTOS, f"data.root={photos}"]
    cli.out("train", *words)
    last = tmp_path / "outputs" / "digits" / "checkpoints" / "last.pt"
    before = last.read_bytes()
    table = (photos / "data.csv").read_text()
    more = [*words, "train.epochs=2", "resume=auto"]

    for old, new, said in [
        ("3.png,red", "3.png,green", "other labels of the same training images"),
        ("15.png,red,train\n", "", "16 training images, now 15"),
    ]:
        assert old in table
        (photos / "data.csv").write_text(table.replace(old, new, 1))
        err = cli.fault("train", *more)
        one_line(err, f"{last} was trained on other data (", said, "data.changed=allow")
        assert last.read_bytes() == before

    rows = [line for line in table.splitlines(keepends=True) if line.endswith(",val\n")]
    (photos / "data.csv").write_text(table.replace(rows[-1], ""))
    err = cli.fault("train", *more)
    one_line(err, f"{last} was evaluated on other data (", f"{len(rows)} validation images, now")
    (photos / "data.csv").write_text(table.replace("15.png,red,train\n", "", 1))

    status, out, _ = cli("train", *more, "data.changed=allow")
    assert (status, "continuing because of data.changed=allow" in out) == (0, True)
    assert "changed" not in read_torch(last)["config"]["data"]

    # The changed table counts from now on, wherever the images are; it is accepted only once.
    shutil.move(photos, tmp_path / "moved")
    words = [*ON_PHOTOS, f"data.root={tmp_path / 'moved'}", "train.epochs=3", "resume=auto"]
    assert cli("train", *words).status == 0


def test_an_older_checkpoint_without_a_fingerprint_goes_on_with_a_warning(run, cli, monkeypatch):
    load_newest = loading.load_newest

    def older(path):
        path, saved = load_newest(path)
        return path, dataclasses.replace(saved, fingerprint=None)

    monkeypatch.setattr(loading, "load_newest", older)
    status, out, _ = cli("train", *QUICK, "train.epochs=3", "resume=auto")
    assert status == 0
    assert "last.pt has no fingerprint of its training data" in out
    assert "fingerprint" in read_torch(run / "checkpoints" / "last.pt")
