"""ONNX files of `mldec export`: their metadata, and their execution in ONNX Runtime on the CPU."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import torch
from torch import Tensor

from mldec.cli import require
from mldec.config.schema import describe, matches
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import naming_errors

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
