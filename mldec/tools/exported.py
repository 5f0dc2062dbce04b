"""ONNX files of `mldec export`: their metadata, and an engine in ONNX Runtime on the CPU."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from mldec.cli import require
from mldec.config.schema import describe, matches
from mldec.data.transforms import EvalTransform, Picture, to_tensor
from mldec.data.types import Classes
from mldec.errors import CheckpointError, naming_errors
from mldec.runtime.environment import explain_out_of_memory

# Names in ONNX files: inputs (zero-shot files have both), outputs, and the key of the metadata.
INPUTS = ("images", "queries")
OUTPUTS = ("probabilities", "decisions")
KEY = "mldec"

SILENT = 4  # log level of ONNX Runtime: only fatal errors, which are also raised

# ONNX Runtime reads this at its import. Its telemetry sends an identifier of the machine.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The metadata of an exported file."""

    classes: list[str]  # names of the outputs; of the training classes for zero-shot files
    word_dim: int | None  # width D of the word vectors of a zero-shot file
    exclusive: bool  # whether an image has one label; the scores are then a softmax
    calibrated: bool  # whether the probabilities are calibrated
    thresholds: list[float] | None  # K, one for all classes, or None with one label per image
    image_size: int  # pixels per side S of the network's input
    crop: float | None  # see `EvalTransform`
    interpolation: str  # see `EvalTransform`
    resizes: bool  # whether the file resizes the images itself
    mean: list[float] | None  # per channel, for images in [0, 1]; the file normalizes itself
    std: list[float] | None  # per channel
    precision: str  # "fp32", "fp16" or "int8"
    versions: dict[str, str]  # of the packages that wrote the file
    checkpoint: dict[str, str]  # its file name, its SHA-256 hash, and its weights, "ema" or "raw"
    date: str  # of the export, in ISO 8601
    resize: str = "pillow"  # see `EvalTransform`; missing in older files
    draft: int | None = None  # see `EvalTransform`; missing in older files

    @property
    def transform(self) -> EvalTransform:
        """The input transform of the network."""
        return EvalTransform(
            image_size=self.image_size,
            crop=self.crop,
            interpolation=self.interpolation,
            resize=self.resize,
            draft=self.draft,
        )


def parse(text: str | None, path: Path) -> Metadata:
    """Parse the metadata of an exported file. None and invalid text raise CheckpointError."""
    with naming_errors(path, remedy="write it with mldec export of this version"):
        metadata = Metadata(**json.loads(text or "null"))
        for name, hint in get_type_hints(Metadata).items():
            value = getattr(metadata, name)
            if not matches(value, hint):
                raise ValueError(f"{name} is {str(value)[:40]!r}, not {describe(hint)}")
        thresholds = metadata.thresholds
        if thresholds is not None and len(thresholds) not in (1, len(metadata.classes)):
            raise ValueError(f"{len(thresholds)} thresholds for {len(metadata.classes)} classes")
        Classes(tuple(metadata.classes))  # raises an error for duplicate names
        return metadata


class OnnxFile:
    """An exported ONNX file in ONNX Runtime, on the CPU."""

    def __init__(self, path: Path) -> None:
        require(str(path), "export", "onnxruntime")
        import onnxruntime

        self.path = path
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()  # from OMP_NUM_THREADS
        options.log_severity_level = SILENT
        providers = ["CPUExecutionProvider"]
        with naming_errors(path, remedy="ONNX Runtime does not load it"):
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        self.metadata = parse(self._session.get_modelmeta().custom_metadata_map.get(KEY), path)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [B, K] and decisions bool [B, K].

        The inputs are images uint8 [B, 3, H, W], and word vectors [K, D] of a zero-shot file.
        """
        with naming_errors(self.path, remedy="ONNX Runtime fails at these images"):
            arrays = {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=False)}
            scores, decisions = self._session.run(OUTPUTS, arrays)
        return torch.from_numpy(scores), torch.from_numpy(decisions)


class Answers(NamedTuple):
    """The scores of B images, on the device of the engine."""

    scores: Tensor  # float32 [B, K], in [0, 1]
    features: Tensor | None  # float32 [B, C]: the mean over the tokens of the backbone


def to_batch(images: Sequence[Tensor] | Tensor) -> Tensor:
    """Stack images of one size [3, S, S], unless they are stacked already."""
    return images if isinstance(images, Tensor) else torch.stack(list(images))


def memory_hint(engine: Any, images: int) -> str:
    """Return the error message of an engine whose memory is too small for a batch."""
    return (
        f"out of memory on {engine.device} with batches of {images} images of "
        f"{engine.image_size} pixels; pass a smaller --batch-size"
    )


class ExportedEngine:
    """An ONNX file of `mldec export` on the CPU; see `TorchEngine`."""

    def __init__(self, exported: OnnxFile, classes: Classes | None = None) -> None:
        metadata = exported.metadata
        self.path = exported.path
        self.device = torch.device("cpu")
        self.zero_shot = metadata.word_dim is not None
        self._exported = exported
        self._word_vectors: list[Tensor] = []
        if classes is None:
            classes = Classes(tuple(metadata.classes))
        elif not self.zero_shot:
            raise CheckpointError(f"{self.path}: the classes are fixed; export it with --classes")
        if self.zero_shot:
            if classes.word_vectors is None:
                raise CheckpointError(
                    f"{self.path}: no word vectors; pass --vectors, and --classes for predict"
                )
            self._word_vectors = [classes.word_vectors]
        self.classes = replace(classes, exclusive=metadata.exclusive)
        self.thresholds: Sequence[float] | None = metadata.thresholds
        if self.thresholds is not None and len(self.thresholds) == 1:
            self.thresholds = [self.thresholds[0]] * len(self.classes)

        self.image_size = metadata.image_size
        self.precision = metadata.precision
        self.program = "ONNX Runtime"
        self.decoder = metadata.transform.decoder
        self.shorter_side = metadata.transform.shorter_side
        self.min_side = metadata.transform.min_side
        self._resizes = metadata.resizes
        self.transform: Callable[[Picture], Tensor] = metadata.transform
        if metadata.resizes:
            self.transform = to_tensor

    def answer(
        self, images: Sequence[Tensor] | Tensor, *, features: bool = False, size: int = 0
    ) -> Answers:
        """Score B images; see `TorchEngine`. There are no features, and no padding."""
        # Images of different sizes cannot be in one batch.
        batches = [image[None] for image in images] if self._resizes else [to_batch(images)]
        with explain_out_of_memory(lambda: memory_hint(self, len(images))):
            scores = [self._exported(batch, *self._word_vectors)[0] for batch in batches]
        return Answers(torch.cat(scores), None)

    def for_classes(self, classes: Classes) -> "ExportedEngine":
        """Return an engine of the same zero-shot file for other classes."""
        return ExportedEngine(self._exported, classes)
