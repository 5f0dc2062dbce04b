import io
from collections.abc import Callable
from pathlib import Path

import pytest
from pictures import picture


@pytest.fixture
def photo() -> Callable[..., bytes]:
    """The bytes of a photo of its own content."""

    def png(seed: int = 0, width: int = 40, height: int = 30) -> bytes:
        content = io.BytesIO()
        picture(width, height, seed).save(content, "PNG")
        return content.getvalue()

    return png


@pytest.fixture
def vectors(tmp_path: Path) -> str:
    """A file of word vectors of as many numbers as those of the zero-shot models here."""
    path = tmp_path / "vectors.txt"
    path.write_text("zebra 1 0 0 0 0\numbrella 0 1 0 1 0\nred_<i> 1 0 1 0 1\n")
    return str(path)
