import hashlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mldec.storage import read_torch, save

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
    assert subprocess.run(["sha256sum", "-c", "last.pt.sha256"], cwd=tmp_path, capture_output=True).returncode == 0


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
        "import resource, signal, sys, torch; from pathlib import Path; from mldec.storage import save\n"
        "from mldec.errors import one_line\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        f"with one_line(): save(Path({str(path)!r}), {{'format': 1, 'model': torch.zeros(100_000)}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"mldec: cannot save {path}: ")
    assert f"{path} is the last good one" in done.stderr
    assert done.stderr.count("\n") == 1
    assert read_torch(path)["epoch"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "last.pt.sha256"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
