"""One table of many runs: `python -m mldec.summary outputs/ [--csv FILE]`.

A run is a folder with checkpoints/best.pt, or last.pt before its first evaluation. The table comes from run.json and
metrics.jsonl, which take no time to read; for a run of an older version, without run.json, from the checkpoint. What
cannot be read is left out with a line that says why.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from mldec.cli import command
from mldec.errors import CheckpointError, DataError, one_line, printable, say
from mldec.files.results import check_targets, write_result
from mldec.files.run_folder import find_checkpoint, read_facts


@dataclass(frozen=True)
class Run:
    """What the table says of a run."""

    run: str  # its folder, below the one that was asked for
    name: str
    metric: str | None  # None before the first evaluation
    value: float | None  # the best one
    weights: str  # raw, or ema: those that reached it
    params_m: float  # trainable parameters, million
    gmacs: float | None  # of one image; None if they cannot be counted
    image_size: int  # pixels a side
    epochs: str  # evaluated of planned, as 3/40
    state: str  # finished or unfinished
    time: str  # spent, in hours, minutes and seconds; over all its processes, one after the other
    commit: str


@dataclass
class Progress:
    """What metrics.jsonl says of a run."""

    epoch: int = 0  # the last one with an evaluation
    seconds: float = 0.0  # that the run took, over all its processes
    best: dict[str, Any] = field(
        default_factory=dict
    )  # metric, value and weights; empty before an evaluation


def read(folder: Path, name: str, plugins: Sequence[str] = ()) -> Run:
    """Return what a run's folder says of it.

    Args:
        folder: of the run.
        name: for the column `run`.
        plugins: packages of the caller's that may hold its parts; for runs without run.json.

    Raises:
        CheckpointError: if there is no checkpoint, or it cannot be used.
    """
    path = find_checkpoint(folder)
    done = progress(folder / "metrics.jsonl")
    facts = read_facts(folder)
    if facts is None:
        return _from_checkpoint(path, name, done, plugins)

    # The log of a run that goes on from another folder's checkpoint does not have the epochs before.
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
        **_state(max(done.epoch, facts.start_epoch), facts.epochs, done.seconds),
    )


def _from_checkpoint(path: Path, name: str, done: Progress, plugins: Sequence[str]) -> Run:
    """Return what a checkpoint says of its run: the whole file is read and the model built."""
    import torch  # slow, as is what follows: only for runs without run.json

    from mldec import build, checkpoint
    from mldec.checkpoint.loading import MODEL_PARTS
    from mldec.runtime.cost import count_parameters, multiply_accumulates

    saved = checkpoint.load(path)
    config = checkpoint.saved_config(saved, path, plugins, kinds=MODEL_PARTS)
    classes, size = saved.classes, saved.transform.image_size
    try:
        with torch.device("meta"):
            model = build.model(build.check(config, MODEL_PARTS), classes, pretrained=False)
        queries = None if classes.queries is None else (len(classes), classes.queries.shape[1])
        gmacs = multiply_accumulates(model, size, queries) / 1e9
    except (
        Exception
    ) as error:  # a constructor may raise anything on numbers that its signature allows
        raise CheckpointError(f"the model in {path} cannot be built: {error}") from error

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


def _state(epoch: int, epochs: int, seconds: float) -> dict[str, str]:
    """Return the columns on how far a run is."""
    whole = int(seconds)
    return {
        "epochs": f"{epoch}/{epochs}",
        "state": "finished" if epoch >= epochs else "unfinished",
        "time": f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}",
    }


def progress(path: Path) -> Progress:
    """Read metrics.jsonl; a run without the file has done nothing.

    The clock of a line starts with its process, so that it goes back where a run was resumed.

    Raises:
        CheckpointError: if a line is not what a run writes.
    """
    done, before = Progress(), 0.0
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            time = line["time"]
            done.seconds += time - before if time >= before else time
            before = time
            if any(key.startswith("val/") for key in line):
                done.epoch = int(line["epoch"])
                done.best = _better(done.best, line)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{path} is not what a run writes: {error or 'a line of it'}"
        ) from error
    return done


def _better(best: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return the best result so far, after one more evaluation: of the first metric, as `Trainer.evaluate` does."""
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
            found.append(
                read(
                    folder,
                    folder.relative_to(root).as_posix() if folder != root else root.name,
                    plugins,
                )
            )
        except CheckpointError as error:
            print(printable(f"left out: {error}"))
    return sorted(
        found, key=lambda run: (run.metric is None, run.metric or "", -(run.value or 0.0), run.run)
    )


def table(runs: Sequence[Run]) -> str:
    """Set the runs out in columns."""
    rows = [[column.name for column in fields(Run)]]
    rows += [[printable(_cell(value)) for value in astuple(run)] for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def to_csv(runs: Sequence[Run]) -> str:
    """Return what `--csv` writes: one row per run."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([column.name for column in fields(Run)])
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
    arguments = command(
        "summary", "Set out the runs of a folder in a table, the best one of each metric first."
    )
    arguments.add_argument("folder", nargs="?", default="outputs", help="default: outputs")
    arguments.add_argument("--csv", metavar="FILE", help="write the table there too")
    arguments.add_argument(
        "--plugin", action="append", default=[], help="a package of yours that may hold parts"
    )
    words = arguments.parse_args()
    with one_line():
        check_targets(words.csv)
        runs = gather(Path(words.folder), words.plugin)
        say(*table(runs).splitlines())
        if words.csv:
            write_result(words.csv, to_csv(runs))


if __name__ == "__main__":
    main()
