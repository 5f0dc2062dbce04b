"""Small models with each kind of head, for tests of the export."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hostile
import torch
from patches import Patches
from torch import Tensor, nn

from mldec.checkpoint import Loaded
from mldec.checkpoint.state import Calibration
from mldec.config.schema import Config
from mldec.data.fingerprint import Fingerprint
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.heads import CSRA, GAP, MLDecoder, Query2Label, WordGAP, WordGroupDecoder
from mldec.model import Classifier
from mldec.tools.export import Program, serialize, to_onnx
from mldec.tools.exported import Metadata

CLASSES = 7
WIDTH = 5  # of word vectors
SIZES: dict[str, Any] = {"embed_dim": 16, "mlp_dim": 16, "num_heads": 2}
WORDS = {"word_dim": WIDTH, "num_groups": None}

HEADS: dict[str, Callable[[int], nn.Module]] = {
    "gap": lambda width: GAP(width, CLASSES),
    "bottleneck": lambda width: GAP(width, CLASSES, bottleneck=4),
    "csra": lambda width: CSRA(width, CLASSES, num_heads=3),
    "groups": lambda width: MLDecoder(width, CLASSES, num_groups=3, **SIZES),
    "full": lambda width: MLDecoder(width, CLASSES, num_groups=None, num_layers=2, **SIZES),
    "transformer": lambda width: MLDecoder(
        width, CLASSES, num_groups=None, init_queries="learned", self_attention=True, **SIZES
    ),
    "query2label": lambda width: Query2Label(width, CLASSES, input_proj=True, **SIZES),
    "words": lambda width: MLDecoder(width, 0, **WORDS, **SIZES),
    "word_gap": lambda width: WordGAP(width, 0, word_dim=WIDTH),
    "word_groups": lambda width: WordGroupDecoder(width, 0, word_dim=WIDTH, group_size=2, **SIZES),
}
OF_WORDS = ("words", "word_gap", "word_groups")

CALIBRATION = Calibration(
    weights="raw",
    objective="f1",
    scope="class",
    thresholds=tuple(0.3 + 0.05 * number for number in range(CLASSES)),
    slopes=tuple(0.5 + 0.1 * number for number in range(CLASSES)),
    offsets=tuple(0.3 - 0.1 * number for number in range(CLASSES)),
    images=20,
    data={},
    fingerprint=Fingerprint(20, "", "", ""),
    date="2026-11-22",
)


def loaded(
    head: str = "groups",
    backbone: nn.Module | None = None,
    *,
    size: int = 32,
    calibration: Calibration | None = None,
    exclusive: bool = False,
    **transform: Any,
) -> Loaded:
    """Return an untrained model with a head of `HEADS` and a backbone of one layer by default."""
    torch.manual_seed(0)
    backbone = Patches() if backbone is None else backbone
    model = Classifier(backbone, HEADS[head](int(backbone.num_features))).eval()  # type: ignore[arg-type]

    word_vectors = None
    if head in OF_WORDS:
        word_vectors = torch.randn(CLASSES, WIDTH)
        calibration = calibration and replace(
            calibration, scope="global", thresholds=(0.45,), slopes=(0.7,), offsets=(0.1,)
        )
    names = tuple(f"thing {number}" for number in range(CLASSES))
    return Loaded(
        model,
        Config(name="x", data={}, backbone={}, head={}, loss={}),
        Classes(names, exclusive=exclusive, word_vectors=word_vectors),
        EvalTransform(image_size=size, **transform),
        metrics={},
        weights="raw",
        path=Path("network.pt"),
        calibration=calibration,
    )


def noise(count: int, height: int = 32, width: int | None = None) -> Tensor:
    """Return images uint8 [count, 3, height, width]."""
    generator = torch.Generator().manual_seed(count)
    shape = (count, 3, height, width or height)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def words_of(head: str, count: int) -> list[Tensor]:
    """Return the word vectors of `count` classes if the head requires them."""
    if head not in OF_WORDS:
        return []
    return [torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))]


def metadata(**settings: Any) -> Metadata:
    """Return the metadata of an exported file of `loaded`."""
    values: dict[str, Any] = {
        "classes": [f"thing {number}" for number in range(CLASSES)],
        "word_dim": None,
        "exclusive": False,
        "calibrated": True,
        "thresholds": [0.5],
        "image_size": 32,
        "crop": None,
        "interpolation": "bilinear",
        "resizes": False,
        "mean": None,
        "std": None,
        "precision": "fp32",
        "versions": {"mldec": "1"},
        "checkpoint": {"file": "best.pt", "sha256": "0" * 64, "weights": "ema"},
        "date": "2026-11-22T00:00:00+00:00",
    }
    return Metadata(**{**values, **settings})


def save_onnx(path: Path, head: str, **facts: Any) -> Path:
    """Export a model of `loaded` and return the path."""
    model = loaded(head)
    program = Program(model, [0.5], takes_word_vectors=head in OF_WORDS)
    known = metadata(word_dim=WIDTH if head in OF_WORDS else None, **facts)
    path.write_bytes(serialize(to_onnx(program, model, "x.pt"), known, path.name))
    return path


def save_calibrated(path: Path) -> Path:
    """Write a checkpoint of three classes with thresholds, and return its path."""
    calibration = {
        **asdict(CALIBRATION),
        "thresholds": (0.2, 0.4, 0.6),
        "slopes": (0.5,),
        "offsets": (0.25,),
    }
    torch.save({**hostile.good(), "calibration": calibration}, path)
    return path
