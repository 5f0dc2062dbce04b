"""The content of a checkpoint: its type with its calibration, and the only parser of it."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mldec.data.fingerprint import Fingerprint
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import DataError, refusing
from mldec.words.types import VectorOrigin

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds of K classes, fitted on validation images or from a file.

    The calibrated score of a class is sigmoid(slope * logit + offset), or the softmax over the
    classes if an image has one label. A class is present if its score is at least its threshold.
    """

    weights: str  # "ema" or "raw": the set of weights that was calibrated
    objective: str | None  # such as "f1"; None without thresholds, or with those of a file
    scope: str | None  # "class" or "global"; None without thresholds
    # From 0 to 1: K in the order of the classes, one for all, or none if an image has one label.
    thresholds: tuple[float, ...]
    slopes: tuple[float, ...]  # K, or one for all classes, such as 1 / temperature
    offsets: tuple[float, ...]  # as many
    images: int  # that it was fitted on; 0 if there are thresholds of a file alone
    data: dict[str, Any]  # the node of their data set
    fingerprint: Fingerprint | None  # of these images and their labels; None without
    date: str  # in ISO 8601
    error: float | None = None  # of images outside the fit, in percent; None if not measured
    constant: tuple[str, ...] = ()  # classes whose logits were the same for nearly all images
    file: str | None = None  # name of the file that gave the thresholds, see `with_thresholds`
    source: str | None = None  # SHA-256 hash of the checkpoint file that was calibrated

    @property
    def reason(self) -> str:
        """Say what chose the thresholds, a phrase for messages."""
        return f"for {self.objective}" if self.file is None else f"from {self.file}"

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the calibrated logits of all classes, in their order: float [B, K] -> [B, K]."""
        make = _tensor_once if logits.is_cuda else _tensor
        slopes = make(self.slopes, logits.dtype, logits.device)
        offsets = make(self.offsets, logits.dtype, logits.device)
        return logits * slopes + offsets

    def thresholds_of(self, trained: Sequence[str], names: Sequence[str]) -> list[float]:
        """Return the thresholds in the order of `names`, which the checkpoint has as `trained`."""
        return list(in_order(self.thresholds, trained, names))


def _tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# The host waits for each copy to a GPU. Not on a CPU, where an export traces fake tensors.
_tensor_once = lru_cache(maxsize=16)(_tensor)


def in_order(
    values: Sequence[float], names: Sequence[str], wanted: Sequence[str]
) -> tuple[float, ...]:
    """Bring values, one per class unless there are fewer than two, into the order of `wanted`."""
    if len(values) < 2:
        return tuple(values)
    value_of = dict(zip(names, values, strict=True))
    return tuple(value_of[name] for name in wanted)


@dataclass(frozen=True)
class Best:
    """The best result of a run so far."""

    metric: str | None = None  # None before the first evaluation
    value: float = -math.inf
    weights: str = "raw"  # or "ema": the set of weights that reached the value
    epoch: int = 0
    # Since the last one that was better, or in which the raw weights were better than ever.
    evaluations_since: int = 0
    raw: float | None = None  # the best value of the raw weights
    average: float | None = None  # and that of their moving average
    falls: bool = True  # whether the average, if there is one, did not improve in the last one


@dataclass(frozen=True)
class LogPosition:
    """The position of a run in its log, and the sums that its next line needs."""

    lines: int = 0  # lines of metrics.jsonl
    loss: float = 0.0  # sum of the losses of the steps since the last line
    steps: int = 0  # steps since the last line
    skipped: int = 0  # steps without an update, in the whole run
    bad_images: int = 0  # unreadable images that were left out, in the whole run


def no_optimizer() -> dict[str, Any]:
    """Return the state of an optimiser that has done nothing."""
    return {"state": {}, "param_groups": []}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run at a step; of a file of others, the model and no training state."""

    config: dict[str, Any]  # as `config.compose.to_dict` returns it; see `saved_config`
    classes: Classes
    transform: EvalTransform
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: Best = Best()
    epoch: int = 0  # number of finished epochs
    step: int = 0  # number of finished optimiser steps
    steps_per_epoch: int = 1
    model: dict[str, Tensor]  # empty if the moving average alone was published
    ema: dict[str, Tensor] | None = None
    optimizer: dict[str, Any] = field(default_factory=no_optimizer)
    scaler: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    log: LogPosition = LogPosition()
    fingerprint: Fingerprint | None = None  # of the training data; None in a file of others
    val_fingerprint: Fingerprint | None = None  # of the validation data; None in an older file
    versions: dict[str, str] = field(default_factory=dict)
    git: str | None = None  # commit of mldec
    calibration: Calibration | None = None  # None unless `mldec calibrate` wrote the file
    unseen: tuple[str, ...] | None = None  # classes that training did not have; None: unknown

    def to_state(self) -> dict[str, Any]:
        """Return the content as plain containers and tensors, for `torch.save`."""
        # Not dataclasses.asdict of the whole, which would copy every tensor.
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

        for name in ("transform", "best", "log", "fingerprint", "val_fingerprint", "calibration"):
            if state[name] is not None:
                state[name] = asdict(state[name])
        origin = self.classes.origin
        state["classes"] = {
            "names": list(self.classes.names),
            "exclusive": self.classes.exclusive,
            "queries": self.classes.queries,
            "origin": origin and {**asdict(origin), "templates": list(origin.templates)},
        }
        if self.unseen is not None:
            state["unseen"] = list(self.unseen)

        return {"format": FORMAT, **state}

    @classmethod
    def from_state(cls, state: dict[str, Any], path: Path) -> "Checkpoint":
        """Parse the content of a file; a `CheckpointError` names `path` if it is none of ours."""
        with refusing(path):
            _check_format(state)
            values = {name: value for name, value in state.items() if name != "format"}
            values["classes"] = classes = _classes_of(state["classes"])
            values["calibration"] = _calibration_of(state.get("calibration"), classes)

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
        """Return a set of weights and its name, "ema" or "raw"; None is the set that scored best.

        It is a `DataError` if the file does not hold this set.
        """
        chosen = self.best.weights if name is None else name
        tensors = {"raw": self.model, "ema": self.ema}[chosen]
        if not tensors:
            what, other = "no moving average", "raw"
            if chosen == "raw":
                what, other = "the moving average only", "ema"
            raise DataError(f"it holds {what}: pass --weights {other}")
        return tensors, chosen


def _check_format(state: dict[str, Any]) -> None:
    if "format" not in state:
        raise DataError("it holds weights but no training state; pass it as init=")
    if state["format"] != FORMAT:
        raise DataError(
            f"it has format {state['format']}, this mldec reads {FORMAT}; use another version of it"
        )
    # OmegaConf would resolve an interpolation, which can read the environment of the user.
    if "${" in repr(state["config"]):
        raise DataError("its config holds an interpolation, and a saved one never does")


def _classes_of(saved: dict[str, Any]) -> Classes:
    names, queries, origin = tuple(saved["names"]), saved["queries"], saved.get("origin")
    if queries is not None and len(queries) != len(names):
        raise DataError(f"it has {len(queries)} word vectors for {len(names)} classes")
    if origin is not None:
        origin = VectorOrigin(**{**origin, "templates": tuple(origin["templates"])})

    # Word queries may be saved in half precision; the model computes in float32.
    queries = None if queries is None else queries.float()
    return Classes(names, exclusive=saved["exclusive"], queries=queries, origin=origin)


def _calibration_of(saved: dict[str, Any] | None, classes: Classes) -> Calibration | None:
    if saved is None:
        return None

    # JSON has lists only.
    numbers = {name: tuple(saved[name]) for name in ("thresholds", "slopes", "offsets")}
    constant = tuple(saved.get("constant", ()))
    fingerprint = saved["fingerprint"] and Fingerprint(**saved["fingerprint"])
    # One number for all classes, one for each, or none.
    if not {len(values) for values in numbers.values()} <= {0, 1, len(classes)}:
        raise DataError("its 'calibration' is of another number of classes; use another copy")
    return Calibration(**{**saved, **numbers, "fingerprint": fingerprint, "constant": constant})
