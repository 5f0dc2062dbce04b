"""How far a run is: its evaluations and its training time, from metrics.jsonl."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldec.errors import CheckpointError
from mldec.files.run_folder import read_log


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run, of the weights that reached the better value."""

    epoch: int  # finished ones
    seconds: float  # of training until then, the sum over interruptions
    metric: str  # the first one, which decides which checkpoint is the best
    value: float  # NaN if it is undefined
    weights: str  # raw or ema


@dataclass
class Progress:
    """How far a run is, according to its metrics.jsonl."""

    seconds: float = 0.0  # of training, the sum over interruptions
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """Return the last epoch with an evaluation, or 0."""
        return self.evaluations[-1].epoch if self.evaluations else 0

    @property
    def best(self) -> dict[str, Any]:
        """Return metric, value and weights of the best evaluation; of equal ones the earliest.

        The rule is that of `mldec.training.validation.update_best`. Before the first evaluation the
        dictionary is empty.
        """
        best: dict[str, Any] = {}
        for done in self.evaluations:
            if done.value > best.get("value", -math.inf):
                best = {"metric": done.metric, "value": done.value, "weights": done.weights}
        return best


def clock(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds, rounded down."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def read_progress(path: Path) -> Progress:
    """Read metrics.jsonl; a run without the file has no progress.

    Args:
        path: of the file.

    Raises:
        CheckpointError: if a line is not one that a run writes.
    """
    lines = read_log(path)
    progress, previous_time = Progress(), 0.0
    try:
        for line in lines:
            # Each process counts from its own start, so a resumed run begins at 0 again.
            time = line["time"]
            is_resumed = time < previous_time
            progress.seconds += time if is_resumed else time - previous_time
            previous_time = time

            if any(key.startswith("val/") for key in line):
                progress.evaluations.append(_evaluation(line, progress.seconds))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} is not what a run writes: {error}") from error
    return progress


def _evaluation(line: dict[str, Any], seconds: float) -> Evaluation:
    """Return the evaluation of a line, by its first metric.

    Args:
        line: of metrics.jsonl, with keys val/... and, with a moving average, val_raw/...
        seconds: of training until then.
    """
    metric = next(key for key in line if key.startswith("val/")).removeprefix("val/")
    has_average = f"val_raw/{metric}" in line
    scores = {"ema" if has_average else "raw": line[f"val/{metric}"]}
    if has_average:
        scores["raw"] = line[f"val_raw/{metric}"]

    # Of equal values that of the moving average counts. JSON has no NaN: it is null there.
    value, weights = math.nan, "raw"
    for name, score in scores.items():
        if score is not None and not float(score) <= value:
            value, weights = float(score), name
    return Evaluation(int(line["epoch"]), seconds, metric, value, weights)
