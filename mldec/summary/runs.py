"""Read the runs in a folder.

A run is a folder with checkpoints/best.pt, or last.pt before its first evaluation. What is known of
it comes from run.json and metrics.jsonl, which are quick to read. A run of an older version has no
run.json: its checkpoint is read instead. A run that cannot be read is left out with a line that
explains why.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldec.errors import CheckpointError, DataError, printable
from mldec.files.run_folder import LOG_FILE, find_checkpoint, read_facts
from mldec.training.log import Progress, clock, read_progress

# Marks a field that is no column of the table.
NO_COLUMN = {"column": False}


@dataclass(frozen=True)
class Run:
    """A run: a row of the table, and its progress."""

    run: str  # its folder, relative to the folder of the table
    name: str
    metric: str | None  # None before the first evaluation
    value: float | None  # the best value of the metric
    weights: str  # raw or ema: those that reached it
    params_m: float  # trainable parameters in millions
    gmacs: float | None  # billions of multiply-accumulates per image; None if they are unknown
    image_size: int  # pixels per side
    epochs: str  # evaluated and planned, as 3/40
    state: str  # finished or unfinished
    time: str  # hours:minutes:seconds of training, the sum over interruptions
    commit: str  # of the code, shortened
    progress: Progress = field(default_factory=Progress, metadata=NO_COLUMN)


def read(folder: Path, name: str, plugins: Sequence[str] = ()) -> Run:
    """Read the row of a run from its folder.

    Args:
        folder: of the run.
        name: for the column `run`.
        plugins: packages of the user's that may define its parts; for runs without run.json.

    Raises:
        CheckpointError: if there is no checkpoint, or it cannot be used.
    """
    path = find_checkpoint(folder)
    done = read_progress(folder / LOG_FILE)

    facts = read_facts(folder)
    if facts is None:
        return _from_checkpoint(path, name, done, plugins)

    # A run that resumed from another folder's checkpoint has no log of the epochs before.
    best = max(done.best, facts.best, key=lambda best: best.get("value", -math.inf))
    macs = facts.multiply_accumulates
    return Run(
        run=name,
        name=facts.name,
        metric=best.get("metric"),
        value=best.get("value"),
        weights=best.get("weights", "raw"),
        params_m=facts.parameters / 1e6,
        gmacs=None if macs is None else macs / 1e9,
        image_size=facts.image_size,
        commit=_short(facts.commit),
        progress=done,
        **_state(
            max(done.epoch, facts.start_epoch), facts.epochs, done.seconds, ended=bool(facts.ended)
        ),
    )


def _from_checkpoint(path: Path, name: str, done: Progress, plugins: Sequence[str]) -> Run:
    """Read the row of a run from its checkpoint: slow, for runs without run.json.

    The whole file is read, and the model is built to count its parameters.
    """
    # Imported late: a table of runs with run.json need not wait for torch.
    from mldec import checkpoint
    from mldec.runtime.facts import count_parameters, multiply_accumulates

    saved, config, model = checkpoint.outline(path, plugins)
    classes, size = saved.classes, saved.transform.image_size
    queries = None if classes.queries is None else (len(classes), classes.queries.shape[1])
    try:
        gmacs = multiply_accumulates(model, size, queries) / 1e9
    except Exception as error:
        # A model may raise anything for numbers that its constructor allows.
        raise CheckpointError(f"the model in {path} cannot be run: {error}") from error

    best = saved.best
    return Run(
        run=name,
        name=config.name,
        metric=best.metric,
        value=None if best.metric is None else float(best.value),
        weights=best.weights,
        params_m=count_parameters(model)[0] / 1e6,
        gmacs=gmacs,
        image_size=size,
        commit=_short(saved.git),
        progress=done,
        **_state(max(done.epoch, saved.epoch), config.train.epochs, done.seconds),
    )


def _state(epoch: int, epochs: int, seconds: float, *, ended: bool = False) -> dict[str, str]:
    """Return the columns epochs, state and time.

    Args:
        epoch: the last one with an evaluation.
        epochs: planned.
        seconds: of training.
        ended: the run has ended, before its planned epochs or with them.
    """
    return {
        "epochs": f"{epoch}/{epochs}",
        "state": "finished" if ended or epoch >= epochs else "unfinished",
        "time": clock(seconds),
    }


def gather(root: Path, plugins: Sequence[str] = ()) -> list[Run]:
    """Return the runs in a folder and below it, and print a line for each that cannot be read.

    Args:
        root: the folder.
        plugins: see `read`.

    Returns:
        The runs, sorted by metric, and the best one first.

    Raises:
        DataError: if there is no such folder, or no run in it.
    """
    folders = sorted({path.parent for path in root.rglob("checkpoints") if path.is_dir()})
    if not folders:
        raise DataError(f"{root} holds no run (a folder with checkpoints/best.pt): check the path")

    runs = []
    for folder in folders:
        name = folder.relative_to(root).as_posix()
        if folder == root:
            name = root.name
        try:
            runs.append(read(folder, name, plugins))
        except CheckpointError as error:
            print(printable(f"left out: {error}"))

    # Runs without an evaluation come last.
    return sorted(
        runs, key=lambda run: (run.metric is None, run.metric or "", -(run.value or 0.0), run.run)
    )


def _short(commit: Any) -> str:
    """Shorten a commit to ten characters; the mark of a changed checkout is kept."""
    name, plus, mark = str(commit or "-").partition("+")
    return name[:10] + plus + mark[:5]
