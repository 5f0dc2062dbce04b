"""The type of a checkpoint's content, and the only parser of it.

`Checkpoint.from_state` checks every part, because the content may come from an untrusted file.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mldec.checkpoint.calibration import SCOPES, Calibration, fits_classes
from mldec.config import moved
from mldec.config.schema import PARTS
from mldec.data.base import Classes
from mldec.data.fingerprint import Fingerprint
from mldec.data.names import names_fault
from mldec.data.transforms import EvalTransform
from mldec.data.vector_origin import VectorOrigin
from mldec.errors import CheckpointError, ConfigError

# Format 1 is that of version 0.1, whose config lacks the arguments that were left at their
# defaults.
FORMAT = 2
FORMATS = (1, 2)
DATE = re.compile(r"[0-9T:+-]{10,40}")  # in ISO 8601


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

    config: dict[str, Any]  # as `config.compose.to_dict` returns it; see `loading.saved_config`
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
    fingerprint: Fingerprint | None  # of the training data; None in a file of version 0.1
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
        """Check each part of a file's content and return it as a checkpoint.

        Args:
            state: plain containers and tensors, see `files.plain`.
            path: of the file, for messages.

        Raises:
            CheckpointError: if a part is missing or malformed; it names the first such part.
        """
        check_format(state, path)
        for name, (fits, description) in _PARTS.items():
            if name not in state or not fits(state[name]):
                raise CheckpointError(
                    f"{path} is no whole checkpoint: its '{name}' is missing or not {description}"
                )
        for name, (fits, description) in _OPTIONAL_PARTS.items():
            if state.get(name) is not None and not fits(state[name]):
                raise CheckpointError(
                    f"{path} is no whole checkpoint: its '{name}' is not {description}"
                )
        _check_step(state, path)

        # Take the known keys only: a mapping in the file may hold more, which the classes would
        # refuse.
        best = {
            field.name: state["best"].get(field.name, field.default)
            for field in dataclasses.fields(Best)
        }
        log = {field.name: state["log"][field.name] for field in dataclasses.fields(LogPosition)}
        fingerprint = state.get("fingerprint")
        classes = _classes_of(state["classes"])

        return cls(
            config=_config(state),
            classes=classes,
            transform=_transform_of(state["transform"], path),
            best=Best(**best),
            log=LogPosition(**log),
            fingerprint=None if fingerprint is None else Fingerprint(**fingerprint),
            versions=state.get("versions", {}),
            git=state.get("git"),
            calibration=_calibration_of(state.get("calibration"), classes, path),
            unseen=_unseen_of(state.get("unseen"), classes, path),
            **{
                name: state[name]
                for name in ("metrics", "epoch", "step", "steps_per_epoch", "model", "ema")
            },
            **{name: state[name] for name in ("optimizer", "scaler", "loss")},
        )

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
    if type(saved) is not int or saved not in FORMATS:
        raise CheckpointError(
            f"{path} has format {str(saved)[:40]}, this mldec reads "
            f"{FORMATS[0]} to {FORMATS[-1]}: use a newer mldec"
        )


def _check_step(state: dict[str, Any], path: Path) -> None:
    """Check that the number of steps belongs to the epoch."""
    epoch, step, steps_per_epoch = state["epoch"], state["step"], state["steps_per_epoch"]
    first, last = epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch

    if not first <= step <= last:
        raise CheckpointError(
            f"{path} is no whole checkpoint: its 'step' is {step}, and after {epoch} epochs "
            f"of {steps_per_epoch} steps it must be from {first} to {last}"
        )


def _config(state: dict[str, Any]) -> dict[str, Any]:
    """Return the config with every argument of its parts.

    Version 0.1 (format 1) did not save the arguments that were left at their defaults.
    """
    config = dict(state["config"])

    if state["format"] == 1:
        for kind in PARTS:
            if isinstance(config.get(kind), dict):
                config[kind] = moved.completed(config[kind])
    return config


def _classes_of(saved: dict[str, Any]) -> Classes:
    # Word queries may be saved in half precision; the model computes in float32.
    queries = saved["queries"]
    return Classes(
        names=tuple(saved["names"]),
        exclusive=saved["exclusive"],
        queries=None if queries is None else queries.float(),
        origin=_origin_of(saved.get("origin")),
    )


def _origin_state(origin: VectorOrigin | None) -> dict[str, Any] | None:
    """Return how word vectors were made as JSON can hold it."""
    if origin is None:
        return None
    return {**dataclasses.asdict(origin), "templates": list(origin.templates)}


def _origin_of(saved: dict[str, Any] | None) -> VectorOrigin | None:
    if saved is None:
        return None
    return VectorOrigin(saved["source"], saved["sha256"], tuple(saved["templates"]))


def _transform_of(saved: dict[str, Any], path: Path) -> EvalTransform:
    try:
        return EvalTransform(**saved)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"the transform in {path} cannot be used: {error}") from error


def _calibration_of(
    saved: dict[str, Any] | None, classes: Classes, path: Path
) -> Calibration | None:
    if saved is None:
        return None

    calibration = Calibration(**{**saved, "fingerprint": Fingerprint(**saved["fingerprint"])})
    if not fits_classes(calibration, classes):
        raise CheckpointError(
            f"{path} is no whole checkpoint: its 'calibration' is of another number of classes"
        )
    return calibration


def _mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _settings(value: Any) -> bool:
    """Tell whether a value is a tree of mappings, lists and scalars, as YAML can hold it."""
    if isinstance(value, dict):
        return _mapping(value) and all(map(_settings, value.values()))
    if isinstance(value, list):
        return all(map(_settings, value))

    # `files.plain` has left only scalars, tensors and tuples.
    return not isinstance(value, Tensor | tuple)


def _tensors(value: Any) -> bool:
    return _mapping(value) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _number(value: Any) -> bool:
    """Tell whether a value is a number, which may be infinite or NaN."""
    return type(value) in (int, float)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _unseen_of(saved: list[str] | None, classes: Classes, path: Path) -> tuple[str, ...] | None:
    if saved is None:
        return None

    if not set(saved) <= set(classes.names):
        raise CheckpointError(
            f"{path} is no whole checkpoint: its 'unseen' has a name that is not of its classes"
        )
    return tuple(saved)


def _count(value: Any) -> bool:
    """Tell whether a value is a whole number from 0, small enough to be exact as a float."""
    return type(value) is int and 0 <= value < 2**53


def _classes(value: Any) -> bool:
    if (
        not _mapping(value)
        or {"names", "exclusive", "queries"} - value.keys()
        or type(value["exclusive"]) is not bool
    ):
        return False

    names, queries = value["names"], value["queries"]
    if not _origin(value.get("origin")):
        return False
    if not isinstance(names, list) or not names or names_fault(names):
        return False

    # Word queries are [K, D_w], one row per class.
    row_per_class = isinstance(queries, Tensor) and queries.ndim == 2 and len(queries) == len(names)
    return queries is None or (row_per_class and queries.is_floating_point())


def _origin(value: Any) -> bool:
    """Tell whether a value says how word vectors were made, or nothing, as in older versions."""
    if value is None:
        return True

    keys = {field.name for field in dataclasses.fields(VectorOrigin)}
    if not _mapping(value) or value.keys() != keys or not isinstance(value["templates"], list):
        return False
    origin = _origin_of(value)
    return origin is not None and origin.fault() is None


def _names(value: Any) -> bool:
    return isinstance(value, list) and names_fault(value) is None


def _best(value: Any) -> bool:
    if not _mapping(value):
        return False

    # Before the first evaluation there is no metric, and the value is minus infinity.
    none_yet = value.get("metric") is None and value.get("value") == -math.inf
    return (
        (none_yet or (isinstance(value.get("metric"), str) and _finite(value.get("value"))))
        and value.get("weights") in ("ema", "raw")
        and _count(value.get("epoch"))
        # Checkpoints of older versions do not have it.
        and _count(value.get("evaluations_since", 0))
    )


def _optimizer(value: Any) -> bool:
    if not _mapping(value) or not isinstance(value.get("state"), dict):
        return False

    groups = value.get("param_groups")
    return (
        all(map(_mapping, value["state"].values()))
        and isinstance(groups, list)
        and all(_mapping(group) and isinstance(group.get("params"), list) for group in groups)
    )


def _log(value: Any) -> bool:
    counts = ("lines", "steps", "skipped", "bad_images")
    if not _mapping(value) or not all(_count(value.get(name)) for name in counts):
        return False

    # The sum includes the losses of skipped steps, which may be infinite or NaN.
    return _finite(value.get("loss")) or (_number(value.get("loss")) and value["skipped"] > 0)


def _fingerprint(value: Any) -> bool:
    texts = ("files", "labels", "classes")
    return (
        _mapping(value)
        and value.keys() == {"images", *texts}
        and _count(value["images"])
        and all(isinstance(value[name], str) for name in texts)
    )


def _calibration(value: Any) -> bool:
    names = {field.name for field in dataclasses.fields(Calibration)}
    if not _mapping(value) or value.keys() != names:
        return False

    objective, scope = value["objective"], value["scope"]
    thresholds, slopes, offsets = value["thresholds"], value["slopes"], value["offsets"]
    return (
        (objective is None or isinstance(objective, str))
        and (scope is None or (isinstance(scope, str) and scope in SCOPES))
        and (_finite_numbers(thresholds) and all(0 <= value <= 1 for value in thresholds))
        and (_finite_numbers(slopes) and all(value >= 0 for value in slopes))
        and (_finite_numbers(offsets) and len(offsets) == len(slopes))
        and (isinstance(value["weights"], str) and value["weights"] in ("ema", "raw"))
        and _count(value["images"])
        and (isinstance(value["data"], dict) and _settings(value["data"]))
        and _fingerprint(value["fingerprint"])
        and (isinstance(value["date"], str) and DATE.fullmatch(value["date"]) is not None)
    )


def _finite_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_finite, value))


_Check = tuple[Callable[[Any], bool], str]
# Name of each part -> its check, and what messages say the part must be.
_PARTS: dict[str, _Check] = {
    "config": (
        lambda value: isinstance(value, dict) and _settings(value),
        "a mapping of plain settings",
    ),
    "classes": (
        _classes,
        "different class names, whether one excludes another, their word vectors or none, and how "
        "these were made",
    ),
    "transform": (
        lambda value: _mapping(value) and _settings(value),
        "a mapping of plain settings",
    ),
    "metrics": (
        lambda value: _mapping(value) and all(map(_number, value.values())),
        "numbers by name",
    ),
    "best": (_best, "a metric, its value, its weights and its epoch"),
    "epoch": (_count, "a whole number from 0 on"),
    "step": (_count, "a whole number from 0 on"),
    "steps_per_epoch": (lambda value: _count(value) and value > 0, "a whole number from 1 on"),
    "model": (_tensors, "tensors by name"),
    "ema": (lambda value: value is None or _tensors(value), "tensors by name, or none"),
    "optimizer": (_optimizer, "the state and the groups of an optimiser"),
    "scaler": (_mapping, "a mapping"),
    "loss": (_mapping, "a mapping"),
    "log": (_log, "the place in metrics.jsonl and the sums since the last line of it"),
}
# Parts that may be None, and that checkpoints of older versions do not have.
_OPTIONAL_PARTS: dict[str, _Check] = {
    "fingerprint": (_fingerprint, "the number of training images and the hashes of their table"),
    "calibration": (_calibration, "thresholds from 0 to 1, slopes, offsets and their origin"),
    "unseen": (_names, "a list of different class names"),
}
