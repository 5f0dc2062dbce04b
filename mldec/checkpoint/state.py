"""The content of a checkpoint: its type with its calibration, and the only parser of it."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mldec.data.fingerprint import Fingerprint
from mldec.data.table import names_fault
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, VectorOrigin
from mldec.errors import CheckpointError, refusing

SCOPES = ("class", "global")  # of a threshold


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds of K classes, fitted on validation images.

    The calibrated score of a class is sigmoid(slope * logit + offset), or the softmax over the
    classes if an image has one label. A class is present if its score is at least its threshold.

    Attributes:
        weights: "ema" or "raw": the set of weights that was calibrated.
        objective: that chose the thresholds, such as "f1"; None without thresholds.
        scope: "class" or "global"; None without thresholds.
        thresholds: from 0 to 1: K in the order of the classes, one for all of them, or none if an
            image has one label.
        slopes: K, or one for all classes, which is 1 / temperature.
        offsets: as many.
        images: the number of images that it was fitted on.
        data: the node of their data set.
        fingerprint: of these images and their labels.
        date: when it was fitted, in ISO 8601.
    """

    weights: str
    objective: str | None
    scope: str | None
    thresholds: tuple[float, ...]
    slopes: tuple[float, ...]
    offsets: tuple[float, ...]
    images: int
    data: dict[str, Any]
    fingerprint: Fingerprint
    date: str

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the calibrated logits of all classes, in their order: float [B, K] -> [B, K]."""
        slopes = torch.tensor(self.slopes, dtype=logits.dtype, device=logits.device)
        offsets = torch.tensor(self.offsets, dtype=logits.dtype, device=logits.device)
        return logits * slopes + offsets

    def thresholds_of(self, trained: Sequence[str], names: Sequence[str]) -> list[float]:
        """Return the thresholds in the order of other names: one for all classes, or one per name.

        Args:
            trained: the names of the classes of the checkpoint.
            names: the same in any order; if one threshold serves all, of any classes.
        """
        if len(self.thresholds) < 2:
            return list(self.thresholds)

        threshold_of = dict(zip(trained, self.thresholds, strict=True))
        return [threshold_of[name] for name in names]


class Calibrated(nn.Module):
    """A model whose logits are calibrated."""

    def __init__(self, model: nn.Module, calibration: Calibration) -> None:
        super().__init__()
        self.model = model
        self.calibration = calibration

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        """Return the calibrated logits, float32 [B, K], of images [B, 3, H, W]."""
        return self.calibration.scaled(self.model(images, queries).float())


def fits_classes(calibration: Calibration, classes: Classes) -> bool:
    """Tell whether a calibration has as many numbers as the classes of its checkpoint need."""
    # One label per image needs no threshold, and word vectors stand for any classes.
    if classes.exclusive:
        thresholds = 0
    elif classes.queries is not None or calibration.scope == "global":
        thresholds = 1
    else:
        thresholds = len(classes)

    scores = {1} if classes.exclusive or classes.queries is not None else {1, len(classes)}
    return (
        len(calibration.thresholds) == thresholds
        and len(calibration.slopes) in scores
        and len(calibration.offsets) in scores
        and (calibration.objective is None) == (calibration.scope is None) == classes.exclusive
    )


FORMAT = 2


@dataclass(frozen=True)
class Best:
    """The best result of a run so far."""

    metric: str | None = None  # None before the first evaluation
    value: float = -math.inf
    weights: str = "raw"  # or "ema": the set of weights that reached the value
    epoch: int = 0
    evaluations_since: int = 0  # none of which was better


@dataclass(frozen=True)
class LogPosition:
    """The position of a run in its log, and the sums that its next line needs."""

    lines: int = 0  # lines of metrics.jsonl
    loss: float = 0.0  # sum of the losses of the steps since the last line
    steps: int = 0  # steps since the last line
    skipped: int = 0  # steps without an update, in the whole run
    bad_images: int = 0  # unreadable images that were left out, in the whole run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run at a step."""

    config: dict[str, Any]  # as `config.compose.to_dict` returns it; see `saved_config`
    classes: Classes
    transform: EvalTransform
    metrics: dict[str, float]  # of the last evaluation
    best: Best
    epoch: int  # number of finished epochs
    step: int  # number of finished optimiser steps
    steps_per_epoch: int
    model: dict[str, Tensor]  # empty if the moving average alone was published
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    loss: dict[str, Any]
    log: LogPosition
    fingerprint: Fingerprint | None  # of the training data; None in an older file
    versions: dict[str, str]
    git: str | None  # commit of mldec
    calibration: Calibration | None = None  # None unless `mldec.calibrate` wrote the file
    # Names of the classes that training did not have, as zero-shot data does; None if not known.
    unseen: tuple[str, ...] | None = None

    def to_state(self) -> dict[str, Any]:
        """Return the content as plain containers and tensors, for `torch.save`."""
        # Not dataclasses.asdict, which would copy every tensor.
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

        for name in ("transform", "best", "log", "fingerprint", "calibration"):
            if state[name] is not None:
                state[name] = dataclasses.asdict(state[name])
        state["classes"] = {
            "names": list(self.classes.names),
            "exclusive": self.classes.exclusive,
            "queries": self.classes.queries,
            "origin": _origin_state(self.classes.origin),
        }
        if self.unseen is not None:
            state["unseen"] = list(self.unseen)

        return {"format": FORMAT, **state}

    @classmethod
    def from_state(cls, state: dict[str, Any], path: Path) -> "Checkpoint":
        """Return the content of a file as a checkpoint.

        Args:
            state: containers and tensors.
            path: of the file, for messages.

        Raises:
            CheckpointError: if a part is missing or of another type, or the parts do not belong
                together.
        """
        check_format(state, path)
        for name, kind in _KINDS.items():
            if not isinstance(state.get(name), kind):
                what = "whole number" if kind is int else "mapping"
                raise CheckpointError(
                    f"{path} is no whole checkpoint: its '{name}' is missing or no {what}; use "
                    f"another copy"
                )

        with refusing(path):
            values: dict[str, Any] = {
                field.name: state.get(field.name) for field in dataclasses.fields(cls)
            }
            fingerprint, unseen = state.get("fingerprint"), state.get("unseen")
            classes = _classes_of(state["classes"], path)
            if unseen is not None and not set(unseen) <= set(classes.names):
                raise CheckpointError(
                    f"{path} is no whole checkpoint: its 'unseen' has a name that is not of its "
                    f"classes; use another copy"
                )

            values |= {
                "classes": classes,
                "transform": EvalTransform(**state["transform"]),
                "best": Best(**state["best"]),
                "log": LogPosition(**state["log"]),
                "fingerprint": None if fingerprint is None else Fingerprint(**fingerprint),
                "calibration": _calibration_of(state.get("calibration"), classes, path),
                "unseen": None if unseen is None else tuple(unseen),
            }
            return cls(**values)

    def weights(self, name: str | None, path: Path) -> tuple[dict[str, Tensor], str]:
        """Return a set of weights and its name.

        Args:
            name: "ema", "raw", or None for the set that scored best.
            path: of the checkpoint, for messages.

        Raises:
            CheckpointError: if the moving average is wanted and the run kept none, or the raw
                weights and only the average was published.
        """
        chosen = self.best.weights if name is None else name
        tensors = self.model if chosen == "raw" else self.ema

        if tensors is None:
            raise CheckpointError(f"{path} holds no moving average: pass --weights raw")
        if not tensors:
            raise CheckpointError(f"{path} holds the moving average only: pass --weights ema")
        return tensors, chosen


def check_format(state: dict[str, Any], path: Path) -> None:
    """Check that this version of mldec can read the format of a file's content.

    Raises:
        CheckpointError: if it cannot.
    """
    if "format" not in state:
        raise CheckpointError(
            f"{path} holds weights but is no checkpoint of mldec, which resume needs: "
            f"pass init={path}"
        )

    # The type comes first: comparing a tensor yields a tensor, which may have no truth value.
    saved = state["format"]
    if type(saved) is not int or saved != FORMAT:
        raise CheckpointError(
            f"{path} has format {str(saved)[:40]}, this mldec reads {FORMAT}: use another "
            f"version of mldec"
        )


def _classes_of(saved: dict[str, Any], path: Path) -> Classes:
    names, queries, origin = tuple(saved["names"]), saved["queries"], saved.get("origin")
    fault = names_fault(names) if names else "it has no classes"
    if queries is not None and fault is None and len(queries) != len(names):
        fault = f"it has {len(queries)} word vectors for {len(names)} classes"
    if origin is not None:
        origin = VectorOrigin(origin["source"], origin["sha256"], tuple(origin["templates"]))
        fault = fault or origin.fault()
    if fault is not None:
        raise CheckpointError(f"{path} is refused: {fault}; use another copy")

    # Word queries may be saved in half precision; the model computes in float32.
    queries = None if queries is None else queries.float()
    return Classes(names, exclusive=saved["exclusive"], queries=queries, origin=origin)


def _calibration_of(
    saved: dict[str, Any] | None, classes: Classes, path: Path
) -> Calibration | None:
    if saved is None:
        return None

    # JSON has lists only.
    numbers = {name: tuple(saved[name]) for name in ("thresholds", "slopes", "offsets")}
    fingerprint = Fingerprint(**saved["fingerprint"])
    calibration = Calibration(**{**saved, **numbers, "fingerprint": fingerprint})
    if not fits_classes(calibration, classes):
        raise CheckpointError(
            f"{path} is no whole checkpoint: its 'calibration' is of another number of classes; "
            f"use another copy"
        )
    return calibration


def _origin_state(origin: VectorOrigin | None) -> dict[str, Any] | None:
    """Return how word vectors were made as JSON can hold it."""
    if origin is None:
        return None
    return {**dataclasses.asdict(origin), "templates": list(origin.templates)}


# The parts that every checkpoint has, and their types.
_KINDS = {
    **dict.fromkeys(("config", "classes", "transform", "metrics", "best", "model"), dict),
    **dict.fromkeys(("optimizer", "scaler", "loss", "log"), dict),
    **dict.fromkeys(("epoch", "step", "steps_per_epoch"), int),
    "ema": dict | None,
}
