import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mldec.errors import CheckpointError
from mldec.files.torch_files import known_hashes, read_torch, save

STATE = {"format": 1, "model": {"weight": torch.arange(1000.0)}, "epoch": 3}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "last.pt", STATE)
    state = read_torch(tmp_path / "last.pt")
    assert state["epoch"] == 3
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "last.pt.sha256"]


def test_the_checksum_file_is_what_sha256sum_reads(tmp_path: Path) -> None:
    save(tmp_path / "last.pt", STATE)
    save(tmp_path / "last.pt", {**STATE, "epoch": 4})
    digest = hashlib.sha256((tmp_path / "last.pt").read_bytes()).hexdigest()
    assert (tmp_path / "last.pt.sha256").read_text() == f"{digest}  last.pt\n"
    assert (
        subprocess.run(
            ["sha256sum", "-c", "last.pt.sha256"], cwd=tmp_path, capture_output=True
        ).returncode
        == 0
    )


def test_a_crash_between_the_renames_leaves_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.pt"
    save(path, STATE)
    replaced: list[Path] = []
    original = Path.replace

    def crash_after(count: int) -> None:
        def replace(self: Path, target: Path) -> None:
            if len(replaced) == count:
                raise KeyboardInterrupt
            replaced.append(target)
            original(self, target)

        monkeypatch.setattr(Path, "replace", replace)

    for count in (0, 1, 2):
        replaced.clear()
        crash_after(count)
        with pytest.raises(KeyboardInterrupt):
            save(path, {**STATE, "epoch": 10 + count})
        assert read_torch(path)["epoch"] in (3, 10, 11, 12)


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save(path, STATE)
    code = (
        "import resource, signal, sys, torch; from pathlib import Path; "
        "from mldec.files.torch_files import save\n"
        "from mldec.errors import one_line\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        f"with one_line(): "
        f"save(Path({str(path)!r}), {{'format': 1, 'model': torch.zeros(100_000)}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"mldec: cannot save {path}: ")
    assert f"{path} is the last good one" in done.stderr
    assert done.stderr.count("\n") == 1
    assert read_torch(path)["epoch"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "last.pt.sha256"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize(("of_run", "advice"), [(True, "resume=auto"), (False, "--out")])
def test_the_advice_suits_the_command(tmp_path: Path, of_run: bool, advice: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"cannot save .*; free space.*{advice}$"):
        save(tmp_path / "file" / "last.pt", STATE, of_run=of_run)


@pytest.mark.parametrize(
    "form",
    [
        "{hash}  last.pt\n",
        "{hash} *last.pt\n",
        "{hash}",
        "{capitals}  last.pt\r\n",
        "\ufeff{hash}  last.pt\n",
        "SHA256 (last.pt) = {hash}\n",
        "SHA256(last.pt)= {hash}\n",
        "Algorithm  Hash  Path\r\n---------  ----  ----\r\n"
        "SHA256     {capitals}       C:\\last.pt\r\n",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_checksum_file_of_another_program_is_read(
    tmp_path: Path, form: str, encoding: str
) -> None:
    path, record = tmp_path / "last.pt", tmp_path / "last.pt.sha256"
    save(path, STATE)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record.write_text(form.format(hash=digest, capitals=digest.upper()), encoding=encoding)
    assert known_hashes(path) == [digest]
    assert read_torch(path)["epoch"] == 3

    record.write_text(form.format(hash="0" * 64, capitals="A" * 64), encoding=encoding)
    with pytest.raises(CheckpointError, match=r"its sha256 is not the one in last\.pt\.sha256"):
        read_torch(path)


@pytest.mark.parametrize("content", [b"no hash\n", b"\xff\xfe\x00", bytes(10**6)])
def test_a_checksum_file_without_a_checksum_is_no_proof(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "last.pt"
    save(path, STATE)
    path.with_name("last.pt.sha256").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_torch(path)
    path.with_name("last.pt.sha256").write_bytes(b"")
    assert read_torch(path)["epoch"] == 3
    save(path, STATE)  # and is no reason not to save
    assert read_torch(path)["epoch"] == 3


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match=r"no file at .*pipe.pt: check the path"):
        read_torch(tmp_path / "pipe.pt")
