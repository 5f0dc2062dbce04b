"""Opening an exported file by its name."""

from pathlib import Path

import pytest

from mldec.errors import CheckpointError, ConfigError
from mldec.exported.opened import open_exported


@pytest.mark.parametrize(
    ("name", "reason"), [("x.onnx", "ONNX Runtime does not load"), ("x.pt2", "no .pt2 file")]
)
def test_the_name_says_which_kind_it_is(name: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=reason):
        open_exported(path)
    with pytest.raises(ConfigError, match=r"x\.pth: the name"):
        open_exported(tmp_path / "x.pth")
