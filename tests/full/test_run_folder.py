"""A run's folder: one run at a time, on a disk that may be full, with data that may change."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import QUICK, numbers, one_line, wait_until

from mldec import checkpoint
from mldec.files.torch_files import read_torch

Cli = Callable[..., Any]


@pytest.fixture
def run(digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run that a test may spoil, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(digits_run, tmp_path / "outputs" / "digits")
    return tmp_path / "outputs" / "digits"


def content(run: Path) -> dict[str, bytes]:
    """Return every file of a run but its lock."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_a_second_run_is_stopped_and_a_killed_one_gives_its_folder_free(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "digits"
    words = [
        *QUICK,
        "train.epochs=1000",
        "train.log_every=1",
        "train.workers=1",
        "train.save_every_steps=1",
    ]
    first = subprocess.Popen(
        [sys.executable, "-m", "mldec.train", *words], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        log, last = folder / "metrics.jsonl", folder / "checkpoints" / "last.pt"
        wait_until(lambda: first.poll() is not None or (last.exists() and log.exists()))
        assert first.poll() is None
        for word in ("seed=1", "resume=auto", f"resume={folder}/checkpoints/last.pt"):
            status, _, err = cli("train", *QUICK, word)
            assert status == 1
            one_line(
                err,
                f"{folder}: another run is using this folder (process {first.pid} on ",
                "name=...",
            )
    finally:
        first.kill()
        first.wait()

    # Its loader process may still live; the folder is free nevertheless.
    status, _, err = cli("train", *words, "resume=auto", "seed=1")
    assert status == 1
    one_line(err, "is of a run with other settings (seed: 0 -> 1)")
    steps = [line["step"] for line in numbers(folder)]
    assert steps == sorted(steps)
    assert not (folder / "run.lock").exists()


def test_the_checkpoint_of_another_run_does_not_replace_this_one(
    run: Path, cli: Cli, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "last.pt"
    other.parent.mkdir()
    shutil.copy(run / "checkpoints" / "last.pt", other)
    before = content(run)
    status, _, err = cli("train", *QUICK, f"resume={other}")
    assert status == 1
    one_line(err, f"resume={other}: {run} holds another run, which it would replace; pass name=...")
    assert content(run) == before

    # In a new folder, and in the same one with a file of its own, it goes on.
    status, out, _ = cli("train", *QUICK, "train.epochs=3", f"resume={other}", "name=other")
    assert (status, "epoch 3 of 3" in out, "missing" in out) == (0, True, False)
    assert [line["step"] for line in numbers(tmp_path / "outputs" / "other")] == [10, 12, 12]
    assert (
        read_torch(tmp_path / "outputs" / "other" / "checkpoints" / "last.pt")["log"]["lines"] == 3
    )
    assert cli("train", *QUICK, "resume=outputs/digits/checkpoints/last.1.pt").status == 0


def test_a_restart_goes_on_from_its_own_checkpoint(
    run: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(run / "checkpoints" / "last.1.pt", tmp_path / "start.pt")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    status, out, _ = cli("train", *QUICK, "resume=start.pt")
    assert (status, "ended after epoch 2, nothing is left to train" in out) == (0, True)


def test_the_runs_of_a_sweep_each_have_their_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*QUICK, "-m", "seed=0,1", "hydra.sweep.dir=sweep", "train.epochs=1"]
    assert cli("train", *words).status == 0
    runs = sorted(path.parent for path in tmp_path.rglob("train.log"))
    assert len(runs) == 2
    assert all((folder / "train.log").read_text().count("best mAP") == 1 for folder in runs)
    assert not list(tmp_path.rglob("run.lock"))


@pytest.mark.parametrize("name", ["config.yaml", "train.log"])
@pytest.mark.parametrize("start", ["new", "resume"])
def test_a_full_disk_at_the_start_is_one_line(
    name: str,
    start: str,
    cli: Cli,
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "digits"
    words = list(QUICK)
    if start == "resume":
        shutil.copytree(digits_run, folder)
        words.append("resume=auto")
    folder.mkdir(parents=True, exist_ok=True)
    full = folder / (name if name == "train.log" else f"{name}.tmp")
    full.unlink(missing_ok=True)
    full.symlink_to("/dev/full")
    before = content(folder / "checkpoints")
    status, _, err = cli("train", *words)
    assert status == 1
    one_line(
        err, f"cannot write {folder / name}: No space left on device; free space", "resume=auto"
    )
    assert content(folder / "checkpoints") == before
    assert not (folder / "run.lock").exists()
    full.unlink(missing_ok=True)
    assert cli("train", *QUICK, "resume=auto").status == 0


@pytest.mark.parametrize("kibibytes", [4, 8, 16, 40, 200])
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk_is_one_line(kibibytes: int, tmp_path: Path) -> None:
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


def test_a_damaged_log_is_mended_at_a_resume(run: Path, cli: Cli) -> None:
    log = run / "metrics.jsonl"
    whole = log.read_text()
    log.write_bytes(b"\xff\xfe" + whole[:-3].encode())
    status, out, _ = cli("train", *QUICK, "train.epochs=3", "resume=auto")
    assert status == 0
    assert "metrics.jsonl: 2 of the 6 lines that the run had written are missing or damaged" in out
    assert [line["step"] for line in numbers(run)] == [4, 4, 6, 8, 10, 12, 12]
    assert read_torch(run / "checkpoints" / "last.pt")["log"]["lines"] == 7


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CSV data set of small images, in the working folder."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "photos"
    root.mkdir()
    rows = ["path,labels,split"]
    for number in range(24):
        Image.new("RGB", (16, 16), (10 * number, 0, 0)).save(root / f"{number}.png")
        rows.append(
            f"{number}.png,{'red' if number % 2 else 'green'},{'val' if number >= 16 else 'train'}"
        )
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    return root


def test_a_run_repeats_images_of_rare_classes(photos: Path, cli: Cli) -> None:
    base = [word for word in QUICK if not word.startswith("data.")]
    base += ["data=csv", f"data.root={photos}", "data.image_size=32", "train.batch_size=8"]
    words = [*base, "train.epochs=1", "data.repeat_threshold=1"]

    # 16 images of two classes: each appears sqrt(1 / (1 / 2)) times, together 22.6 times.
    status, out, err = cli("train", *words, "data.sampler=repeat_factor")
    assert status == 0, err
    assert "16 training and 8 validation images (23 images per epoch: data.sampler=rep" in out
    assert "0 of 3 steps done" in out


def test_a_run_leaves_its_fold_out_and_goes_on_with_no_other(photos: Path, cli: Cli) -> None:
    base = [word for word in QUICK if not word.startswith("data.")]
    base += ["data=csv", f"data.root={photos}", "data.image_size=32", "train.batch_size=4"]
    base += ["train.epochs=1", "name=fold"]
    for fold in ("3/2", "0/5", "a/b", "1/1"):
        status, _, err = cli("train", *base, f"data.fold={fold}")
        assert status == 1
        one_line(err, f"data.fold is '{fold}': it must be i/N", "such as 1/5")

    # Of the 16 training images; the 8 others are not read.
    (photos / "20.png").unlink()
    folds = [sha256(f"0 {number}.png".encode()).digest()[7] % 2 for number in range(16)]
    status, out, err = cli("train", *base, "data.fold=2/2")
    assert status == 0, err
    assert f"{folds.count(0)} training and {folds.count(1)} validation images" in out
    assert "fold: 2/2" in Path("outputs/fold/config.yaml").read_text()

    status, _, err = cli("train", *base, "data.fold=1/2", "resume=auto", "train.epochs=2")
    assert status == 1
    one_line(err, "is of a run with other settings (data.fold: 2/2 -> 1/2): put them back")


def test_a_change_of_the_data_is_refused_at_a_resume(
    photos: Path, cli: Cli, tmp_path: Path
) -> None:
    base = [word for word in QUICK if not word.startswith("data.")]
    base += ["data=csv", "data.image_size=32", "train.batch_size=8"]
    words = [*base, f"data.root={photos}", "train.epochs=1"]
    status, _, err = cli("train", *words)
    assert status == 0, err
    last = tmp_path / "outputs" / "digits" / "checkpoints" / "last.pt"
    before = last.read_bytes()
    table = (photos / "data.csv").read_text()
    more = [*words, "train.epochs=2", "resume=auto"]

    for change, said in [
        (table.replace("3.png,red", "3.png,green", 1), "other labels of the same training images"),
        (table.replace("15.png,red,train\n", "", 1), "16 training images, now 15"),
        (
            table.replace(
                "1.png,red,train\n2.png,green,train\n", "2.png,green,train\n1.png,red,train\n", 1
            ),
            "order",
        ),
    ]:
        assert change != table
        (photos / "data.csv").write_text(change)
        status, _, err = cli("train", *more)
        assert status == 1
        one_line(err, f"{last} was trained on other data (", said, "data.changed=allow")
        assert last.read_bytes() == before

    status, _, err = cli("train", *more, "data.changed=maybe")
    assert status == 1
    one_line(err, "data.changed: 'maybe' is not one of refuse, allow")
    status, out, _ = cli("train", *more, "data.changed=allow")
    assert (status, "going on with this one, as data.changed=allow says" in out) == (0, True)
    assert "changed" not in read_torch(last)["config"]["data"]

    # The changed table counts from now on, wherever the images are; it is accepted only once.
    shutil.move(photos, tmp_path / "moved")
    words[words.index(f"data.root={photos}")] = f"data.root={tmp_path / 'moved'}"
    assert cli("train", *words, "train.epochs=3", "resume=auto").status == 0
    assert (
        cli(
            "evaluate",
            last,
            "--plugin",
            "patches",
            "data.changed=refuse",
            f"data.root={tmp_path / 'moved'}",
        ).status
        == 0
    )


def test_an_older_checkpoint_without_a_fingerprint_goes_on_with_a_warning(
    run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_newest = checkpoint.load_newest

    def older(path: Path) -> tuple[Path, checkpoint.Checkpoint]:
        path, saved = load_newest(path)
        return path, dataclasses.replace(saved, fingerprint=None)

    monkeypatch.setattr(checkpoint, "load_newest", older)
    status, out, _ = cli("train", *QUICK, "train.epochs=3", "resume=auto")
    assert status == 0
    assert "last.pt has no fingerprint of its training data" in out
    assert "fingerprint" in read_torch(run / "checkpoints" / "last.pt")
