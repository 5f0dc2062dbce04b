"""The metrics of a model card: from a file of results, else from the run's own evaluation."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldec.checkpoint import Checkpoint
from mldec.data.base import Classes
from mldec.errors import DataError
from mldec.files.text import read_json

log = logging.getLogger("mldec")

_SEE = "pass a file that mldec.report --json or mldec.evaluate --json wrote"
# Validation metrics in a checkpoint; the second is there if the run has a moving average too.
_AVERAGE, _RAW = "val/", "val_raw/"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a model's quality.

    Attributes:
        source: where the numbers are from, a clause such as "from the file results.json".
        images: number of validation images; None if it is not known.
        metrics: percentages by name, and numbers of classes. None is an undefined value.
        intervals: lowest and highest value of some metrics, in percent.
        per_class: values by name of the class and of the value; empty without a table.
    """

    source: str
    images: int | None
    metrics: dict[str, float | None]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    per_class: dict[str, dict[str, float | None]] = field(default_factory=dict)


def of_checkpoint(checkpoint: Checkpoint, weights: str) -> Measured:
    """Return the metrics of the evaluation that a run made before it wrote a checkpoint.

    Args:
        checkpoint: of the run.
        weights: "ema" or "raw": those whose metrics are returned.
    """
    has_both = any(name.startswith(_RAW) for name in checkpoint.metrics)
    prefix = _RAW if weights == "raw" and has_both else _AVERAGE
    return Measured(
        source=f"from the evaluation of the run after epoch {checkpoint.epoch}",
        images=None,
        metrics={
            name.removeprefix(prefix): value
            for name, value in checkpoint.metrics.items()
            if name.startswith(prefix)
        },
    )


def read_results(path: Path, classes: Classes, weights: str, checkpoint: str) -> Measured:
    """Read a file of `mldec.report --json` or `mldec.evaluate --json`.

    A file of a checkpoint of another name is used, with a warning.

    Args:
        path: of the file.
        classes: of the checkpoint.
        weights: "ema" or "raw": those that are published.
        checkpoint: as the user names it.

    Raises:
        DataError: if it cannot be read, is not such a file, or is of another model.
    """
    content = read_json(path, _SEE)
    if not isinstance(content, dict) or not {"metrics", "images", "per_class"} <= content.keys():
        raise DataError(f"--results {path}: it has no metrics, images and per_class; {_SEE}")

    if content.get("weights") != weights:
        raise DataError(
            f"--results {path}: it is of the {content.get('weights')} weights, and the {weights} "
            f"ones are published; choose with --weights"
        )
    per_class = content["per_class"]
    same_classes = isinstance(per_class, dict) and set(per_class) == set(classes.names)
    # A zero-shot model is evaluated on any classes.
    if classes.queries is None and not same_classes:
        raise DataError(f"--results {path}: it is of other classes; evaluate this checkpoint")

    intervals = content.get("intervals", {})
    is_whole = (
        _are_numbers(content["metrics"])
        and type(content["images"]) is int
        and isinstance(per_class, dict)
        and all(map(_are_numbers, per_class.values()))
        and isinstance(intervals, dict)
        and all(isinstance(bounds, list) and len(bounds) == 2 for bounds in intervals.values())
        and all(_is_number(bound) for bounds in intervals.values() for bound in bounds)
    )
    if not is_whole:
        raise DataError(f"--results {path}: a value in it is no number; {_SEE}")

    evaluated = str(content.get("checkpoint"))
    if evaluated != checkpoint:
        log.warning(
            f"--results {path} is of {evaluated}, and {checkpoint} is published: check that they "
            f"are the same model"
        )
    return Measured(
        source=f"from {path.name}",
        images=content["images"],
        metrics=content["metrics"],
        intervals={name: (low, high) for name, (low, high) in intervals.items() if low is not None},
        per_class=per_class,
    )


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number, or null, which stands for an undefined one."""
    return value is None or type(value) in (int, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))
