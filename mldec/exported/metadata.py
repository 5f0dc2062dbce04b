"""What an exported file says of itself, as JSON inside the file."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mldec.errors import CheckpointError, ConfigError

# The names of inputs, of which a file has the first or both, and of outputs.
INPUTS = ("images", "queries")
OUTPUTS = ("probabilities", "decisions")

KEY = "mldec"  # of the entry in an ONNX file
ONNX = ".onnx"
NEEDED = ("onnx", "onnxscript", "onnxruntime")  # the packages of the extra


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a program needs to know of an exported file.

    Attributes:
        classes: names of the outputs; of the classes of its training if `word_dim` is given.
        word_dim: width D of the word vectors that are its second input; None without one.
        exclusive: an image has one label: probabilities are a softmax, and the most probable class
            is the decision. Otherwise they are sigmoids.
        calibrated: the probabilities are calibrated.
        thresholds: from which probability on a class is present: K, one for all classes, or None
            with one label per image.
        image_size: pixels per side S of the network's images.
        crop: see `EvalTransform`.
        interpolation: likewise.
        resize: likewise; "pillow" in older files.
        resizes: the resize is inside, and images of any size are the input. Otherwise images are
            resized outside, see `resize`.
        mean: of the channels of images in [0, 1]; the normalisation is inside.
        std: likewise.
        precision: "fp32", "fp16" or "int8".
        versions: of the packages that wrote the file.
        checkpoint: its file name, the SHA-256 hash of this file, and its weights, "ema" or "raw".
        date: of the export, in ISO 8601.
    """

    classes: list[str]
    word_dim: int | None
    exclusive: bool
    calibrated: bool
    thresholds: list[float] | None
    image_size: int
    crop: float | None
    interpolation: str
    resizes: bool
    mean: list[float] | None
    std: list[float] | None
    precision: str
    versions: dict[str, str]
    checkpoint: dict[str, str]
    date: str
    resize: str = "pillow"

    def to_json(self) -> str:
        """Return the text that the file holds."""
        return json.dumps(asdict(self), allow_nan=False)


def parse(text: str | None, path: Path) -> Metadata:
    """Read the text that an exported file holds.

    Args:
        text: None if the file has none.
        path: of the file, for messages.

    Raises:
        CheckpointError: if it is none of ours.
    """
    try:
        content: dict[str, Any] = json.loads(text or "")
        return Metadata(**content)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not say what its classes are: it lacks the metadata of this version; "
            f"write it with python -m mldec.export"
        ) from error


def require_onnx(path: str | Path, needed: Sequence[str] = NEEDED) -> None:
    """Check that the packages for ONNX files are installed.

    Args:
        path: of the file, for the message.
        needed: the packages.

    Raises:
        ConfigError: if one is not.
    """
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{path}: ONNX files need {name}, which is not installed; "
                f"run pip install 'mldec[export]'"
            )


def read_metadata(path: Path) -> Metadata:
    """Return what an ONNX file says of itself, without loading its network.

    Raises:
        ConfigError: if a package is missing.
        CheckpointError: if the file is missing, damaged, or not exported by this program.
    """
    if not path.is_file():
        raise CheckpointError(f"no file at {path}: check the path")
    require_onnx(path, ["onnx"])
    import onnx

    try:
        # Weights in other files are not looked for.
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        # The parser raises classes of its own for a damaged file.
        raise CheckpointError(f"{path} is damaged, or no {ONNX} file") from error
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), None)
    return parse(text, path)
