from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Write word vectors: bytes, text, an array as .npy, or anything else as torch does."""

    def save(name: str, content: Any) -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif path.suffix == ".npy":
            np.save(path, content)
        else:
            torch.save(content, path)
        return path

    return save
