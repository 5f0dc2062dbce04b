"""One table of many runs: `python -m mldec.summary outputs/ [--csv FILE]`.

A run is a folder with checkpoints/best.pt, or last.pt before its first evaluation. What no checkpoint can be read from
is left out with a line that says why.
"""

import argparse
import csv
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mldec import build, checkpoint
from mldec.cost import count_parameters, multiply_accumulates
from mldec.errors import CheckpointError, DataError, one_line, printable, say
from mldec.results import check_targets, write_result
from mldec.runlog import to_console

log = logging.getLogger("mldec")


@dataclass(frozen=True)
class Run:
    """What the table says of a run."""

    run: str  # its folder, below the one that was asked for
    name: str
    metric: str | None  # None before the first evaluation
    value: float | None  # the best one
    weights: str  # raw, or ema: those that reached it
    params_m: float  # trainable parameters, million
    gmacs: float  # of one image
    image_size: int  # pixels a side
    epochs: str  # evaluated of planned, as 3/40
    state: str  # finished or unfinished
    time: str  # spent, in hours, minutes and seconds; over all its processes, one after the other
    commit: str


def read(folder: Path, name: str, plugins: Sequence[str] = ()) -> Run:
    """Return what a run's folder says of it.

    Args:
        folder: of the run.
        name: for the column `run`.
        plugins: packages of the caller's that may hold its parts.

    Raises:
        CheckpointError: if there is no checkpoint, or it cannot be used.
    """
    paths = [folder / "checkpoints" / file for file in ("best.pt", "last.pt")]
    path = next((path for path in paths if path.exists()), paths[0])
    state = checkpoint.load(path)
    config, classes = checkpoint.saved_config(state, path, plugins), checkpoint.saved_classes(state)
    size = checkpoint.saved_transform(state, path).image_size
    try:
        with torch.device("meta"):
            model = build.model(config, classes, pretrained=False)
        queries = None if classes.queries is None else (len(classes), classes.queries.shape[1])
        gmacs = multiply_accumulates(model, size, queries) / 1e9
    except Exception as error:  # a constructor may raise anything on numbers that its signature allows
        raise CheckpointError(f"the model in {path} cannot be built: {error}") from error
    best, (epoch, seconds) = state["best"], progress(folder / "metrics.jsonl")
    epoch = max(epoch, state["epoch"])
    return Run(
        run=name,
        name=config.name,
        metric=best["metric"],
        value=None if best["metric"] is None else float(best["value"]),
        weights=best["weights"],
        params_m=count_parameters(model)[0] / 1e6,
        gmacs=gmacs,
        image_size=size,
        epochs=f"{epoch}/{config.train.epochs}",
        state="finished" if epoch >= config.train.epochs else "unfinished",
        time=f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}",
        commit=_short(state["git"]),
    )


def progress(path: Path) -> tuple[int, float]:
    """Return the last epoch that metrics.jsonl has an evaluation of, and the seconds that the run took.

    The clock of a line starts with its process, so that it goes back where a run was resumed; a run without the file
    counts as 0 epochs and 0 seconds.

    Raises:
        CheckpointError: if a line is not what a run writes.
    """
    epoch, seconds, before = 0, 0.0, 0.0
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            seconds, before = (
                seconds + (line["time"] - before if line["time"] >= before else line["time"]),
                line["time"],
            )
            if any(key.startswith("val/") for key in line):
                epoch = int(line["epoch"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is not what a run writes: {error or 'a line of it'}") from error
    return epoch, seconds


def gather(root: Path, plugins: Sequence[str] = ()) -> list[Run]:
    """Return the runs in a folder and below it: metric by metric, the best one first; warn of what cannot be read.

    Raises:
        DataError: if there is no such folder, or no run in it.
    """
    folders = sorted({path.parent for path in root.rglob("checkpoints") if path.is_dir()})
    if not folders:
        raise DataError(f"{root} holds no run (a folder with checkpoints/best.pt): check the path")
    found = []
    for folder in folders:
        try:
            found.append(read(folder, folder.relative_to(root).as_posix() if folder != root else root.name, plugins))
        except CheckpointError as error:
            log.warning(printable(f"left out: {error}"))
    return sorted(found, key=lambda run: (run.metric is None, run.metric or "", -(run.value or 0.0), run.run))


def table(runs: Sequence[Run]) -> str:
    """Set the runs out in columns."""
    rows = [[field.name for field in fields(Run)]]
    rows += [[printable(_cell(value)) for value in astuple(run)] for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def to_csv(runs: Sequence[Run]) -> str:
    """Return what `--csv` writes: one row per run."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([field.name for field in fields(Run)])
    writer.writerows([["" if value is None else value for value in astuple(run)] for run in runs])
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _short(commit: Any) -> str:
    """Shorten a commit to ten letters; a checkout that was changed keeps its mark."""
    name, plus, mark = str(commit or "-").partition("+")
    return name[:10] + plus + mark[:5]


def main() -> None:
    """Run the command."""
    arguments = argparse.ArgumentParser(prog="python -m mldec.summary", description="Set out the runs of a folder.")
    arguments.add_argument("folder", nargs="?", default="outputs", help="default: outputs")
    arguments.add_argument("--csv", metavar="FILE", help="write the table there too")
    arguments.add_argument("--plugin", action="append", default=[], help="a package of yours that may hold parts")
    words = arguments.parse_args()
    with one_line():
        to_console()
        check_targets(words.csv)
        runs = gather(Path(words.folder), words.plugin)
        say(*table(runs).splitlines())
        if words.csv:
            write_result(words.csv, to_csv(runs))


if __name__ == "__main__":
    main()
