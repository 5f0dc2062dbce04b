from pathlib import Path

import numpy as np
import pytest

from mldec.files.cached import cache_folder, write_cached


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "mldec"
    assert cache_folder("/other") == Path("/other")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder(None) == Path("/home/me/.cache/mldec")


def test_a_file_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new" / "x.npz"
    write_cached(path, {"numbers": np.arange(3)}, "")
    with np.load(path) as stored:
        assert stored["numbers"].tolist() == [0, 1, 2]

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez", full)
    write_cached(path, {"numbers": np.arange(9)}, "it is read again")
    assert "No space left on device; free space" in caplog.text
    assert [file.name for file in path.parent.iterdir()] == ["x.npz"]
    with np.load(path) as stored:
        assert len(stored["numbers"]) == 3
