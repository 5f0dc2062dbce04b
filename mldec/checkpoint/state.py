"""The content of a checkpoint, and its conversion to and from plain containers."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mldec.data.fingerprint import Fingerprint
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import DataError, naming_errors
from mldec.words.types import VectorOrigin

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration of K classes, fitted on validation images or read from a file.

    The calibrated score of a class is sigmoid(slope * logit + offset), or the softmax over the
    classes for single-label data. A class is present if its score is at least its threshold.
    """

    weights: str  # "ema" or "raw": the calibrated set of weights
    objective: str | None = None  # such as "f1"; None without or with thresholds from a file
    scope: str | None = None  # "class" or "global"; None without thresholds
    # Values in [0, 1]: K in the order of the classes, one for all classes, or none (single-label).
    thresholds: tuple[float, ...] = ()
    slopes: tuple[float, ...] = (1.0,)  # K, or one for all classes, such as 1 / temperature
    offsets: tuple[float, ...] = (0.0,)  # K, or one for all classes
    images: int = 0  # number of calibration images; 0 for thresholds from a file
    data: dict[str, Any] = field(default_factory=dict)  # data node of the calibration images
    fingerprint: Fingerprint | None = None  # of the calibration images and labels
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    error: float | None = None  # out-of-fold calibration error in percent; None if not measured
    # Out-of-fold metrics in percent at the thresholds; empty for a file and in older checkpoints.
    metrics: dict[str, float] = field(default_factory=dict)
    constant: tuple[str, ...] = ()  # classes with the same logit for nearly all images
    file: str | None = None  # name of the file with the thresholds, see `with_thresholds`
    source: str | None = None  # SHA-256 hash of the calibrated checkpoint file

    @property
    def reason(self) -> str:
        """Objective or file of the thresholds, as a phrase for messages."""
        if self.file is not None:
            return f"from {self.file}"
        return f"for {self.objective}"

    def scaled(self, logits: Tensor) -> Tensor:
        """Calibrate logits float [B, K] of all classes, in their order. Returns [B, K]."""
        to_tensor = _cached_tensor if logits.is_cuda else _tensor
        slopes = to_tensor(self.slopes, logits.dtype, logits.device)
        offsets = to_tensor(self.offsets, logits.dtype, logits.device)
        return logits * slopes + offsets

    def per_class(self, num_classes: int) -> list[float]:
        """Return the thresholds of all classes, with one for all classes repeated."""
        repeats = num_classes if len(self.thresholds) == 1 else 1
        return list(self.thresholds) * repeats

    def thresholds_of(self, trained: Sequence[str], names: Sequence[str]) -> list[float]:
        """Return the thresholds of `names`; `trained` are all classes in the checkpoint's order."""
        return list(in_order(self.thresholds, trained, names))


def _tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# Each copy to a GPU is a host sync, so tensors are cached on CUDA. They are not cached on a CPU,
# because an export traces fake tensors there.
_cached_tensor = lru_cache(maxsize=16)(_tensor)


def in_order(
    values: Sequence[float], names: Sequence[str], wanted: Sequence[str]
) -> tuple[float, ...]:
    """Reorder values from the order of `names` to `wanted`. A single value is for all classes."""
    if len(values) < 2:
        return tuple(values)
    value_of = dict(zip(names, values, strict=True))
    return tuple(value_of[name] for name in wanted)


@dataclass(frozen=True)
class Best:
    """The best result of a run so far."""

    metric: str | None = None  # None before the first evaluation
    value: float = -math.inf
    weights: str = "raw"  # "raw" or "ema": the set of weights with the best value
    epoch: int = 0
    # Evaluations since the last improvement of the best value or of the raw weights.
    evaluations_since: int = 0
    raw: float | None = None  # best value of the raw weights
    average: float | None = None  # best value of the moving average
    falls: bool = True  # whether the last evaluation did not improve the moving average
    loss: float | None = None  # validation loss of the best result; None if not measured


@dataclass(frozen=True)
class LogPosition:
    """Position of a run in its log, and the sums for its next line."""

    lines: int = 0  # lines of metrics.jsonl
    loss: float = 0.0  # sum of the losses of the steps since the last line
    steps: int = 0  # steps since the last line
    skipped: int = 0  # skipped optimizer steps of the whole run
    bad_images: int = 0  # skipped unreadable images of the whole run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run at a step. For third-party files only the model is set."""

    config: dict[str, Any]  # of `config.compose.to_dict`; without a loss for third-party files
    classes: Classes
    transform: EvalTransform
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: Best = Best()
    epoch: int = 0  # number of finished epochs
    step: int = 0  # number of finished optimizer steps
    steps_per_epoch: int = 1
    model: dict[str, Tensor]  # empty if only the moving average was published
    ema: dict[str, Tensor] | None = None
    optimizer: dict[str, Any] = field(default_factory=lambda: {"state": {}, "param_groups": []})
    scaler: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    log: LogPosition = LogPosition()
    fingerprint: Fingerprint | None = None  # of the training data; None in third-party files
    val_fingerprint: Fingerprint | None = None  # of the validation data; None in older files
    versions: dict[str, str] = field(default_factory=dict)
    git: str | None = None  # commit of mldec
    calibration: Calibration | None = None  # None unless `mldec calibrate` wrote the file
    unseen: tuple[str, ...] | None = None  # classes without training images; None: unknown

    def to_state(self) -> dict[str, Any]:
        """Convert the content to plain containers and tensors, for `torch.save`."""
        # dataclasses.asdict(self) would copy every tensor.
        state = dict(vars(self))

        for name in ("transform", "best", "log", "fingerprint", "val_fingerprint", "calibration"):
            if state[name] is not None:
                state[name] = asdict(state[name])

        origin = None
        if self.classes.origin is not None:
            origin = asdict(self.classes.origin)
            origin["templates"] = list(self.classes.origin.templates)
        state["classes"] = {
            "names": list(self.classes.names),
            "exclusive": self.classes.exclusive,
            "queries": self.classes.word_vectors,
            "origin": origin,
        }
        if self.unseen is not None:
            state["unseen"] = list(self.unseen)

        return {"format": FORMAT, **state}

    @classmethod
    def from_state(cls, state: dict[str, Any], path: Path) -> "Checkpoint":
        """Parse the untrusted content of a file. Raises CheckpointError if it is not valid."""
        with naming_errors(path):
            values = dict(state)
            if values.pop("format", None) != FORMAT:
                raise DataError(
                    f"its format is {state.get('format')}, not {FORMAT}; use a checkpoint of this "
                    f"version, or start a training from it with init="
                )

            values["classes"] = _classes_of(state["classes"])
            values["calibration"] = _calibration_of(state.get("calibration"), values["classes"])
            kinds: dict[str, Any] = {
                "transform": EvalTransform,
                "best": Best,
                "log": LogPosition,
                "fingerprint": Fingerprint,
                "val_fingerprint": Fingerprint,
            }
            for name, kind in kinds.items():
                if values.get(name) is not None:
                    values[name] = kind(**values[name])
            if values.get("unseen") is not None:
                values["unseen"] = tuple(values["unseen"])
            return cls(**values)

    def weights(self, name: str | None) -> tuple[dict[str, Tensor], str]:
        """Return a set of weights and its name: "ema", "raw", or None for the set of `best`.

        Raises DataError if the checkpoint does not contain this set.
        """
        chosen = self.best.weights if name is None else name
        tensors = {"raw": self.model, "ema": self.ema}[chosen]
        if not tensors:
            other = {"raw": "ema", "ema": "raw"}[chosen]
            raise DataError(f"it has no {chosen} weights; pass --weights {other}")
        return tensors, chosen


def _classes_of(saved: dict[str, Any]) -> Classes:
    names = tuple(saved["names"])
    word_vectors = saved["queries"]
    origin = saved.get("origin")
    if word_vectors is not None and len(word_vectors) != len(names):
        raise DataError(f"{len(word_vectors)} word vectors for {len(names)} classes")
    if origin is not None:
        origin = VectorOrigin(**{**origin, "templates": tuple(origin["templates"])})

    # Word queries may be saved in half precision, but the model uses float32.
    if word_vectors is not None:
        word_vectors = word_vectors.float()
    return Classes(names, exclusive=saved["exclusive"], word_vectors=word_vectors, origin=origin)


def _calibration_of(saved: dict[str, Any] | None, classes: Classes) -> Calibration | None:
    if saved is None:
        return None

    values = {**saved, "constant": tuple(saved.get("constant", ()))}
    metrics = saved.get("metrics", {})  # missing in older files
    values["metrics"] = {str(name): float(value) for name, value in metrics.items()}
    for name in ("thresholds", "slopes", "offsets"):
        values[name] = tuple(saved[name])
        if len(values[name]) not in (0, 1, len(classes)):
            raise DataError("the calibration has another number of classes; use another copy")

    if saved["fingerprint"]:
        values["fingerprint"] = Fingerprint(**saved["fingerprint"])
    return Calibration(**values)
