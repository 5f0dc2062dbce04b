"""Files of tensors: written whole, hashed, and read without running anything in them."""

import hashlib
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hostile import Runs
from safetensors.torch import load_file

from mldec.errors import CheckpointError, DataError
from mldec.files.torch_files import known_hashes, read_torch, save, snapshot, write_safetensors

STATE = {"format": 1, "model": {"weight": torch.arange(1000.0)}, "epoch": 3}


@pytest.fixture
def last(tmp_path):
    path = tmp_path / "last.pt"
    save(path, STATE)
    return path


def test_what_is_saved_is_loaded(last):
    save(last, {**STATE, "epoch": 4})
    state = read_torch(last)
    assert state["epoch"] == 4
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert sorted(path.name for path in last.parent.iterdir()) == ["last.pt", "last.pt.sha256"]
    digest = hashlib.sha256(last.read_bytes()).hexdigest()
    assert last.with_name("last.pt.sha256").read_text() == f"{digest}  last.pt\n"


def test_a_snapshot_does_not_follow_its_tensors():
    weight = torch.zeros(3)
    copied = snapshot({"a": [weight], "b": (1, {"c": weight})})
    weight += 1
    assert torch.equal(copied["a"][0], torch.zeros(3))
    assert torch.equal(copied["b"][1]["c"], torch.zeros(3))


@pytest.mark.parametrize("count", range(6))
def test_a_crash_between_the_renames_leaves_a_checkpoint_that_loads(last, monkeypatch, count):
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
    newest = last if last.exists() else last.with_name("last.1.pt")
    assert read_torch(newest)["epoch"] in (4, 5)


def test_a_full_disk_keeps_the_last_good_checkpoint(last):
    code = (
        "import resource, signal, sys, torch; from pathlib import Path; "
        "from mldec.files.torch_files import save\n"
        "from mldec.errors import one_line\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        f"with one_line(): "
        f"save(Path({str(last)!r}), {{'format': 1, 'model': torch.zeros(100_000)}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"mldec: cannot write {last}: ")
    assert "resume=auto" in done.stderr
    assert done.stderr.count("\n") == 1
    assert read_torch(last)["epoch"] == 3
    assert sorted(path.name for path in last.parent.iterdir()) == ["last.pt", "last.pt.sha256"]


@pytest.mark.parametrize(("of_run", "advice"), [(True, "resume=auto"), (False, "another place")])
def test_the_advice_suits_the_command(tmp_path, of_run, advice):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"cannot write .*; make it writable.*{advice}$"):
        save(tmp_path / "file" / "last.pt", STATE, of_run=of_run)


@pytest.mark.parametrize(
    "form", ["{hash} *last.pt\n", "{capitals}  last.pt\r\n", "SHA256 (last.pt) = {hash}\n"]
)
def test_a_checksum_file_of_another_program_is_read(last, form):
    record = last.with_name("last.pt.sha256")
    digest = hashlib.sha256(last.read_bytes()).hexdigest()
    record.write_text(form.format(hash=digest, capitals=digest.upper()))
    assert known_hashes(last) == [digest]
    assert read_torch(last)["epoch"] == 3

    record.write_text(form.format(hash="0" * 64, capitals="A" * 64))
    with pytest.raises(CheckpointError, match=r"its sha256 is not the one in last\.pt\.sha256"):
        read_torch(last)


@pytest.mark.parametrize("content", [b"no hash\n", b"\xff\xfe\x00", bytes(10**6)])
def test_a_checksum_file_without_a_checksum_is_no_proof(last, content):
    last.with_name("last.pt.sha256").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_torch(last)
    last.with_name("last.pt.sha256").write_bytes(b"")
    assert read_torch(last)["epoch"] == 3
    save(last, STATE)  # and is no reason not to save
    assert read_torch(last)["epoch"] == 3


def test_damage_is_found_wherever_it_is(last):
    good = last.read_bytes()
    chosen = random.Random(0)
    for _ in range(20):
        content = bytearray(good)
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        last.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"is damaged: its sha256 is not the one in"):
            read_torch(last)

    last.with_name("last.pt.sha256").unlink()
    for share in (0.3, 0.9, 0.999):
        last.write_bytes(good[: int(len(good) * share)])
        with pytest.raises(CheckpointError, match=r"last\.pt cannot be used .*another copy$"):
            read_torch(last)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is no file of tensors, but an empty file: download it again"),
        (b"<html>404 Not Found</html>", "but a web page: download it again"),
        (b"\x80\x02}q\x00", ""),
        (random.Random(0).randbytes(5000), ""),
    ],
)
def test_what_is_no_file_of_tensors_is_refused_in_one_line(tmp_path, content, fault):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_torch(path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert fault in message
    assert "\n" not in message
    assert len(message) < 600


def test_an_archive_of_something_else_and_a_pipe_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_torch(tmp_path / "x.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match=r"no file at .*pipe.pt: check the path"):
        read_torch(tmp_path / "pipe.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path, is_zip):
    path, trace = tmp_path / "evil.pt", tmp_path / "trace"
    state = {**STATE, "config": Runs(f"touch {trace}")}
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match="is refused: it holds more than tensors") as caught:
        read_torch(path)
    assert not is_zip or "system" in str(caught.value)
    assert not trace.exists()


def test_safetensors_come_back_bit_for_bit(tmp_path):
    path, shared = tmp_path / "x.safetensors", torch.randn(3)
    tensors = {
        "scalar": torch.tensor(7),
        "half": torch.randn(3, 4).half(),
        "brain": torch.randn(5).bfloat16(),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "strided": torch.randn(4, 6).t(),
        "empty": torch.zeros(0, 3),
        "first": shared,
        "second": shared,
    }
    write_safetensors(path, tensors)
    again = load_file(path)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
        same = again[name].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().view(-1).view(torch.uint8)), name
