"""Print a table of runs: `python -m mldec.summary outputs/ [--csv FILE]`.

A run is a folder with checkpoints/best.pt, or last.pt before its first evaluation. The table comes
from run.json and metrics.jsonl, which are quick to read. A run of an older version has no run.json:
its checkpoint is read instead. A run that cannot be read is left out with a line that explains why.
"""

import argparse
import csv
import io
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from mldec.cli import command, run_command
from mldec.errors import CheckpointError, DataError, printable, say
from mldec.files.results import check_targets, write_result
from mldec.files.run_folder import LOG_FILE, find_checkpoint, read_facts, read_log


@dataclass(frozen=True)
class Run:
    """A row of the table."""

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


@dataclass
class Progress:
    """How far a run is, according to its metrics.jsonl."""

    epoch: int = 0  # the last one with an evaluation
    seconds: float = 0.0  # of training, the sum over interruptions
    # Metric, value and weights; empty before the first evaluation.
    best: dict[str, Any] = field(default_factory=dict)


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
    done = progress(folder / LOG_FILE)

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
    from mldec.runtime.cost import count_parameters, multiply_accumulates

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


def clock(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds, rounded down."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def progress(path: Path) -> Progress:
    """Read metrics.jsonl; a run without the file has no progress.

    Args:
        path: of the file.

    Raises:
        CheckpointError: if a line is not one that a run writes.
    """
    lines = read_log(path)
    done, previous_time = Progress(), 0.0
    try:
        for line in lines:
            # Each process counts from its own start, so a resumed run begins at 0 again.
            time = line["time"]
            is_resumed = time < previous_time
            done.seconds += time if is_resumed else time - previous_time
            previous_time = time

            if any(key.startswith("val/") for key in line):
                done.epoch = int(line["epoch"])
                done.best = _better(done.best, line)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} is not what a run writes: {error}") from error
    return done


def _better(best: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return the best result after one more evaluation, by the first metric.

    The rule is that of `mldec.training.validation.update_best`.

    Args:
        best: metric, value and weights; empty before the first evaluation.
        line: of metrics.jsonl, with keys val/... and, with a moving average, val_raw/...
    """
    metric = next(key for key in line if key.startswith("val/")).removeprefix("val/")
    has_average = f"val_raw/{metric}" in line
    scores = {"ema" if has_average else "raw": line[f"val/{metric}"]}
    if has_average:
        scores["raw"] = line[f"val_raw/{metric}"]

    for weights, value in scores.items():
        if value is not None and float(value) > best.get("value", -math.inf):
            best = {"metric": metric, "value": float(value), "weights": weights}
    return best


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


def table(runs: Sequence[Run]) -> str:
    """Return the runs as lines of text with aligned columns."""
    rows = [[column.name for column in fields(Run)]]
    rows += [[printable(_cell(value)) for value in astuple(run)] for run in runs]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]

    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_csv(runs: Sequence[Run]) -> str:
    """Return the content of `--csv`: a heading, and one row per run."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([column.name for column in fields(Run)])
    writer.writerows([["" if value is None else value for value in astuple(run)] for run in runs])
    return text.getvalue()


def _cell(value: Any) -> str:
    """Return a value as text: two decimals for numbers, - for None."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _short(commit: Any) -> str:
    """Shorten a commit to ten characters; the mark of a changed checkout is kept."""
    name, plus, mark = str(commit or "-").partition("+")
    return name[:10] + plus + mark[:5]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command(
        "summary", "Print a table of the runs in a folder, the best one of each metric first."
    )
    arguments.add_argument("folder", nargs="?", default="outputs", help="default: outputs")
    arguments.add_argument("--csv", metavar="FILE", help="write the table there too")
    arguments.add_argument(
        "--plugin", action="append", default=[], help="a package of yours that may hold parts"
    )
    return arguments


def run(args: argparse.Namespace) -> None:
    """Print the table, and write it if asked to."""
    check_targets(args.csv)
    runs = gather(Path(args.folder), args.plugin)
    say(*table(runs).splitlines())
    if args.csv:
        write_result(args.csv, to_csv(runs))


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, run)


if __name__ == "__main__":
    main()
