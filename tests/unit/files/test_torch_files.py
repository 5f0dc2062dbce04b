"""Tensor files: atomic writes, hashes, and safe reads."""

import hashlib
import os
import random
import resource
import signal
from pathlib import Path
from threading import Thread

import pytest
import torch
from hostile import Runs
from support import assert_equal

from mldec.errors import CheckpointError, UserError
from mldec.files import torch_files
from mldec.files.torch_files import read_torch, save, snapshot

STATE = {"format": 1, "model": {"weight": torch.arange(1000.0)}, "epoch": 3}


@pytest.fixture
def last(tmp_path):
    path = tmp_path / "last.pt"
    save(path, STATE)
    return path


def test_save_and_read(last):
    save(last, {**STATE, "epoch": 4})
    state = read_torch(last)
    assert state["epoch"] == 4
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert sorted(path.name for path in last.parent.iterdir()) == ["last.pt", "last.pt.sha256"]
    digest = hashlib.sha256(last.read_bytes()).hexdigest()
    assert last.with_name("last.pt.sha256").read_text() == f"{digest}  last.pt\n"


def test_checkpoint_can_be_read_during_saves(last):
    epochs = []
    reader = Thread(target=lambda: [epochs.append(read_torch(last)["epoch"]) for _ in range(80)])
    reader.start()
    epoch = 3
    while reader.is_alive() or epoch < 6:  # three versions exist after three saves
        epoch += 1
        save(last, {**STATE, "epoch": epoch}, keep=3)
    reader.join()
    assert len(epochs) == 80
    assert epochs == sorted(epochs)
    kept = [read_torch(path)["epoch"] for path in torch_files.versions(last, 3)]
    assert kept == [epoch, epoch - 1, epoch - 2]
    assert len(list(last.parent.iterdir())) == 6


def test_large_file_is_memory_mapped(last, monkeypatch):
    calls = []
    load = torch.load
    monkeypatch.setattr(
        torch,
        "load",
        lambda *given, **options: calls.append(options["mmap"]) or load(*given, **options),
    )
    states = []
    for limit in (torch_files.MAPPED, 1000):
        monkeypatch.setattr(torch_files, "MAPPED", limit)
        states.append(read_torch(last))
    assert calls == [False, True]
    assert_equal(*states)


def test_snapshot_copies_tensors():
    weight = torch.zeros(3)
    copied = snapshot({"a": [weight], "b": (1, {"c": weight})})
    weight += 1
    assert torch.equal(copied["a"][0], torch.zeros(3))
    assert torch.equal(copied["b"][1]["c"], torch.zeros(3))


@pytest.mark.parametrize("count", range(6))
def test_crash_between_renames_leaves_valid_checkpoints(last, monkeypatch, count):
    save(last, {**STATE, "epoch": 4}, keep=2)
    renamed = iter(range(count))
    original = Path.replace

    def replace(self, target):
        if next(renamed, None) is None:
            raise KeyboardInterrupt
        original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save(last, {**STATE, "epoch": 5}, keep=2)
    for path in torch_files.versions(last, 2):
        assert read_torch(path)["epoch"] in (3, 4, 5)
    assert read_torch(last)["epoch"] > 3


def test_full_disk_keeps_the_last_checkpoint(last):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match=f"{last}: .*resume=auto"):
            save(last, {"format": 1, "model": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert read_torch(last)["epoch"] == 3
    assert sorted(path.name for path in last.parent.iterdir()) == ["last.pt", "last.pt.sha256"]


@pytest.mark.parametrize("content", [b"0" * 64, b"no hash\n", b"\xff\xfe\x00"])
def test_other_checksum_means_damage(last, content):
    last.with_name("last.pt.sha256").write_bytes(content)
    with pytest.raises(CheckpointError, match=str(last)):
        read_torch(last)
    # The writer of an empty file was killed.
    last.with_name("last.pt.sha256").write_bytes(b"")
    assert read_torch(last)["epoch"] == 3


def test_damaged_and_other_files_raise_an_error(last):
    good = last.read_bytes()
    chosen = random.Random(0)
    damaged = []
    for _ in range(20):
        content = bytearray(good)
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        damaged.append(content)
    others = [good[: int(len(good) * share)] for share in (0, 0.3, 0.9, 0.999)]
    others += [b"<html>404 Not Found</html>", b"\x80\x02}q\x00", chosen.randbytes(5000)]
    for content in damaged + others:
        last.write_bytes(content)
        # A damaged bit is only found by the checksum.
        if content is others[0]:
            last.with_name("last.pt.sha256").unlink()
        with pytest.raises(CheckpointError, match=f"^{last}") as caught:
            read_torch(last)
        assert "\n" not in str(caught.value)
    os.mkfifo(last.with_name("pipe.pt"))
    with pytest.raises(CheckpointError, match=r"pipe\.pt"):
        read_torch(last.with_name("pipe.pt"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_pickle_is_not_run(tmp_path, is_zip):
    path = tmp_path / "evil.pt"
    trace = tmp_path / "trace"
    state = {**STATE, "config": Runs(f"touch {trace}")}
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match="system" if is_zip else str(path)):
        read_torch(path)
    assert not trace.exists()
