import io
from collections.abc import Callable
from pathlib import Path

import hostile
import networks
import pytest
import torch
from pictures import picture
from PIL import Image

from mldec.demo.answering import Photo
from mldec.inference.engine import ExportedEngine, TorchEngine


def jpeg(seed: int = 0, width: int = 40, height: int = 30, name: str = "") -> Photo:
    """A photo of its own content; the names count up."""
    content = io.BytesIO()
    picture(width, height, seed).save(content, "PNG")
    return Photo(name or f"{seed}.png", content.getvalue())


@pytest.fixture
def photo() -> Callable[..., Photo]:
    return jpeg


@pytest.fixture
def bad_files() -> dict[str, bytes]:
    """Files that are no photos, and what is said of each."""
    good = jpeg(1).content
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    too_long = io.BytesIO()
    Image.new("1", (7100, 7100)).save(too_long, "PNG")
    return {
        "an empty file (0 bytes)": b"",
        "not an image, or none of": b"just text",
        "not an image, or none of JPEG": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "image file is truncated": good[: len(good) // 2],
        "too large an image": bomb.getvalue(),
        "7,100 x 7,100 pixels, above 50 million": too_long.getvalue(),
    }


@pytest.fixture(scope="session")
def engine() -> TorchEngine:
    """An engine with thresholds of its own for 7 classes."""
    return TorchEngine(networks.loaded("full", calibration=networks.CALIBRATION))


@pytest.fixture(scope="session")
def zero_shot() -> TorchEngine:
    return TorchEngine(networks.loaded("words"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportedEngine:
    """The engine of an exported file without thresholds of its own."""
    pytest.importorskip("onnx")
    return ExportedEngine(networks.save_onnx(tmp_path_factory.mktemp("demo") / "x.onnx", "groups"))


@pytest.fixture
def vectors(tmp_path: Path) -> str:
    """A file of word vectors of as many numbers as those of `zero_shot`."""
    path = tmp_path / "vectors.txt"
    path.write_text("zebra 1 0 0 0 0\numbrella 0 1 0 1 0\nred_<i> 1 0 1 0 1\n")
    return str(path)


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three classes with thresholds."""
    return networks.save_calibrated(tmp_path_factory.mktemp("demo") / "calibrated.pt")


@pytest.fixture(scope="session")
def words_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that knows its classes by their word vectors, of five numbers."""
    words = [word for word in hostile.WORDS if not word.startswith("head.")]
    path = tmp_path_factory.mktemp("demo") / "words.pt"
    generator = torch.Generator().manual_seed(0)
    state = hostile.good(
        [*words, "head=gap_words", "head.word_dim=5"], torch.randn(3, 5, generator=generator)
    )
    torch.save(state, path)
    return path
