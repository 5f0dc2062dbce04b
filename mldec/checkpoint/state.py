"""What a checkpoint holds, as a type; `Checkpoint.from_state` is the one parser of such content, whoever wrote it."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mldec.config import moved
from mldec.config.schema import PARTS
from mldec.data.base import Classes
from mldec.data.fingerprint import Fingerprint
from mldec.data.names import names_fault
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError, ConfigError

FORMAT = 2  # 1: of version 0.1, whose config lacks the arguments that had their defaults
FORMATS = (1, 2)


@dataclass(frozen=True)
class Best:
    """The best result of a run so far."""

    metric: str | None = None  # None before the first evaluation
    value: float = -math.inf
    weights: str = "raw"  # or "ema": those that reached it
    epoch: int = 0


@dataclass(frozen=True)
class LogPosition:
    """Where a run was in its log."""

    lines: int = 0  # of metrics.jsonl
    loss: float = 0.0  # sum over the steps since the last line
    steps: int = 0  # since the last line
    skipped: int = 0  # steps without effect, in the whole run
    bad_images: int = 0  # left out, in the whole run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run at a step."""

    config: dict[str, Any]  # as `config.compose.to_dict` returns it; see `loading.saved_config`
    classes: Classes
    transform: EvalTransform
    metrics: dict[str, float]  # of the last evaluation
    best: Best
    epoch: int  # finished ones
    step: int
    steps_per_epoch: int
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    loss: dict[str, Any]
    log: LogPosition
    fingerprint: Fingerprint | None  # of the training data; None in a file of version 0.1
    versions: dict[str, str]
    git: str | None  # commit of the program

    def to_state(self) -> dict[str, Any]:
        """Return plain containers and tensors, for `torch.save`."""
        # Not dataclasses.asdict, which would copy every tensor.
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("transform", "best", "log", "fingerprint"):
            state[name] = dataclasses.asdict(state[name])
        state["classes"] = {
            "names": list(self.classes.names),
            "exclusive": self.classes.exclusive,
            "queries": self.classes.queries,
        }
        return {"format": FORMAT, **state}

    @classmethod
    def from_state(cls, state: dict[str, Any], path: Path) -> "Checkpoint":
        """Return the checkpoint in a file's content, after holding each part of it to what it must be.

        Args:
            state: plain containers and tensors, see `files.plain`.
            path: of the file, for messages.

        Raises:
            CheckpointError: that names the first part that is missing or something else.
        """
        check_format(state, path)
        for name, (fits, what) in _PARTS.items():
            if name not in state or not fits(state[name]):
                raise CheckpointError(
                    f"{path} is no whole checkpoint: its '{name}' is missing or not {what}"
                )
        for name, (fits, what) in _OPTIONAL_PARTS.items():
            if name in state and not fits(state[name]):
                raise CheckpointError(f"{path} is no whole checkpoint: its '{name}' is not {what}")
        _check_step(state, path)

        best = {name: state["best"][name] for name in ("metric", "value", "weights", "epoch")}
        log = {field.name: state["log"][field.name] for field in dataclasses.fields(LogPosition)}
        fingerprint = state.get("fingerprint")
        return cls(
            config=_config(state),
            classes=_classes_of(state["classes"]),
            transform=_transform_of(state["transform"], path),
            best=Best(**best),
            log=LogPosition(**log),
            fingerprint=None if fingerprint is None else Fingerprint(**fingerprint),
            versions=state.get("versions", {}),
            git=state.get("git"),
            **{
                name: state[name]
                for name in ("metrics", "epoch", "step", "steps_per_epoch", "model", "ema")
            },
            **{name: state[name] for name in ("optimizer", "scaler", "loss")},
        )

    def weights(self, name: str | None, path: Path) -> tuple[dict[str, Tensor], str]:
        """Return a set of weights and its name: the wanted one, or for None those that scored best.

        Raises:
            CheckpointError: if there is no moving average.
        """
        chosen = self.best.weights if name is None else name
        tensors = self.model if chosen == "raw" else self.ema
        if tensors is None:
            raise CheckpointError(f"{path} holds no moving average: pass --weights raw")
        return tensors, chosen


def check_format(state: dict[str, Any], path: Path) -> None:
    """Raise a `CheckpointError` for what no version up to this one wrote."""
    if "format" not in state:
        raise CheckpointError(
            f"{path} holds weights but is no checkpoint of mldec, which resume needs: pass init={path}"
        )
    saved = state["format"]
    if (
        type(saved) is not int or saved not in FORMATS
    ):  # the comparison of a tensor has no one answer
        raise CheckpointError(
            f"{path} has format {str(saved)[:40]}, this mldec reads {FORMATS[0]} to {FORMATS[-1]}: use a newer mldec"
        )


def _check_step(state: dict[str, Any], path: Path) -> None:
    epoch, step, steps_per_epoch = state["epoch"], state["step"], state["steps_per_epoch"]
    first, last = epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch
    if not first <= step <= last:
        raise CheckpointError(
            f"{path} is no whole checkpoint: its 'step' is {step}, and after {epoch} epochs of {steps_per_epoch} "
            f"steps it must be from {first} to {last}"
        )


def _config(state: dict[str, Any]) -> dict[str, Any]:
    """Return the config with every argument of its parts, also those that version 0.1 left to its defaults."""
    config = dict(state["config"])
    if state["format"] == 1:
        for kind in PARTS:
            if isinstance(config.get(kind), dict):
                config[kind] = moved.completed(config[kind])
    return config


def _classes_of(saved: dict[str, Any]) -> Classes:
    queries = saved["queries"]
    return Classes(
        names=tuple(saved["names"]),
        exclusive=saved["exclusive"],
        queries=None if queries is None else queries.float(),
    )


def _transform_of(saved: dict[str, Any], path: Path) -> EvalTransform:
    try:
        return EvalTransform(**saved)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"the transform in {path} cannot be used: {error}") from error


def _mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _settings(value: Any) -> bool:
    """Tell whether a value is a tree of what YAML can hold."""
    if isinstance(value, dict):
        return _mapping(value) and all(map(_settings, value.values()))
    if isinstance(value, list):
        return all(map(_settings, value))
    return not isinstance(value, Tensor | tuple)


def _tensors(value: Any) -> bool:
    return _mapping(value) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _number(value: Any) -> bool:
    """Tell whether a value is a number, which may be infinite or NaN."""
    return type(value) in (int, float)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _classes(value: Any) -> bool:
    if (
        not _mapping(value)
        or {"names", "exclusive", "queries"} - value.keys()
        or type(value["exclusive"]) is not bool
    ):
        return False
    names, queries = value["names"], value["queries"]
    if not isinstance(names, list) or not names or names_fault(names):
        return False
    rows = isinstance(queries, Tensor) and queries.ndim == 2 and len(queries) == len(names)
    return queries is None or (rows and queries.is_floating_point())


def _best(value: Any) -> bool:
    if not _mapping(value):
        return False
    none_yet = value.get("metric") is None and value.get("value") == -math.inf
    return (
        (none_yet or (isinstance(value.get("metric"), str) and _finite(value.get("value"))))
        and value.get("weights") in ("ema", "raw")
        and _count(value.get("epoch"))
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
    # A loss that was not finite, in a step that was skipped, is in the sum.
    return _finite(value.get("loss")) or (_number(value.get("loss")) and value["skipped"] > 0)


def _fingerprint(value: Any) -> bool:
    texts = ("files", "labels", "classes")
    return (
        _mapping(value)
        and value.keys() == {"images", *texts}
        and _count(value["images"])
        and all(isinstance(value[name], str) for name in texts)
    )


_Check = tuple[Callable[[Any], bool], str]
_PARTS: dict[str, _Check] = {
    "config": (
        lambda value: isinstance(value, dict) and _settings(value),
        "a mapping of plain settings",
    ),
    "classes": (
        _classes,
        "different class names, whether one excludes another, and their word vectors or none",
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
# What checkpoints of older versions do not have.
_OPTIONAL_PARTS: dict[str, _Check] = {
    "fingerprint": (_fingerprint, "the number of training images and the hashes of their table"),
}
