"""Compare the runs in a folder: `python -m mldec.summary outputs/ [--csv FILE] [--plot FILE]`.

A run is a folder with checkpoints/best.pt, or last.pt before its first evaluation; run.json and
metrics.jsonl tell of it. A run that cannot be read is left out with a line that explains why.
"""

import argparse
import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mldec.errors import CheckpointError, DataError, printable, refusing, say
from mldec.runtime.cli import command, require, run_command
from mldec.runtime.pages import SMALL, new_figure, save, set_title, shorten
from mldec.runtime.results import check_targets, write_result
from mldec.runtime.run_folder import LOG_FILE, RUN_FILE, find_checkpoint, read_facts
from mldec.training.log import Progress, clock, read_progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito, which colour-blind people tell apart. The line styles and markers do not
# repeat in step with them: the first 56 runs differ in more than the colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

LABEL_HEIGHT = 0.15  # inches per run beside the curves
MARKED = 8  # evaluations of a curve that have a marker, about
BELOW = 10.0  # percent below the last values that are shown, or twice their range
MIN_HEIGHT = 3.6  # inches of a panel
WIDTH = 13  # inches of the sheet

# What can be on the horizontal axis of the second panel.
COSTS = {"hours": "training time (hours)", "gmacs": "multiply-accumulates per image (billions)"}


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
    data: str  # the reader, and the folder that it read
    head: str
    loss: str
    lr: str  # the highest one
    fold: str | None  # of a cross-validation, such as 1/5
    epochs: str  # evaluated and planned, as 3/40
    state: str  # finished or unfinished
    time: str  # hours:minutes:seconds of training, the sum over interruptions
    commit: str  # of the code, shortened
    progress: Progress  # no column of the table

    def cost(self, kind: str) -> float | None:
        """Return what the run takes, by a key of `COSTS`; None if it is unknown."""
        return self.gmacs if kind == "gmacs" else self.progress.seconds / 3600

    def curve(self) -> list[tuple[int, float]]:
        """Return epoch and value of each evaluation that is a number."""
        done = self.progress.evaluations
        return [(one.epoch, one.value) for one in done if math.isfinite(one.value)]


COLUMNS = [field.name for field in fields(Run) if field.name != "progress"]
# The other columns are shown where runs differ.
ALWAYS = {"run", "metric", "value", "epochs", "state", "time"}


def read(folder: Path, name: str) -> Run:
    """Read the row of a run from its folder; `name` is for the column `run`."""
    find_checkpoint(folder)
    done = read_progress(folder / LOG_FILE)
    facts = read_facts(folder)
    if facts is None:
        raise CheckpointError(
            f"{folder / RUN_FILE} is missing: resume the run once, which writes it"
        )

    # A run that resumed from another folder's checkpoint has no log of the epochs before.
    best = max(done.best, facts.best, key=lambda best: best.get("value", -math.inf))
    epoch, macs = max(done.epoch, facts.start_epoch), facts.multiply_accumulates

    file = folder / "config.yaml"
    with refusing(file):
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
        parts = []
        for part in ("data", "head", "loss"):
            target = settings.get(part, {}).get("_target_", "-")
            parts.append(str(target).split(".")[-1])
        data, head, loss = parts
        root = settings.get("data", {}).get("root")
        fold = settings.get("data", {}).get("fold")
        lr = settings.get("optim", {}).get("lr", "-")

    # The mark of a changed checkout is kept.
    commit, plus, mark = (facts.commit or "-").partition("+")
    return Run(
        run=name,
        name=facts.name,
        metric=best.get("metric"),
        value=best.get("value"),
        weights=best.get("weights", "raw"),
        params_m=facts.parameters / 1e6,
        gmacs=None if macs is None else macs / 1e9,
        image_size=facts.image_size,
        data=f"{data} {Path(root).name}" if root else data,
        head=head,
        loss=loss,
        lr=str(lr),
        fold=fold,
        epochs=f"{epoch}/{facts.epochs}",
        state="finished" if facts.ended or epoch >= facts.epochs else "unfinished",
        time=clock(done.seconds),
        commit=commit[:10] + plus + mark[:5],
        progress=done,
    )


def gather(root: Path) -> list[Run]:
    """Return the runs in a folder and below it, by metric, and the best one first."""
    folders = sorted({path.parent for path in root.rglob("checkpoints") if path.is_dir()})
    if not folders:
        raise DataError(f"{root} holds no run (a folder with checkpoints/best.pt): check the path")

    runs = []
    for folder in folders:
        name = root.name if folder == root else folder.relative_to(root).as_posix()
        try:
            runs.append(read(folder, name))
        except CheckpointError as error:
            print(printable(f"left out: {error}"))

    # Folds come behind full runs of their metric, and runs without an evaluation last.
    def place(run: Run) -> tuple[Any, ...]:
        return run.metric or "~", run.fold is not None, -(run.value or 0.0), run.run

    return sorted(runs, key=place)


def table(runs: Sequence[Run]) -> str:
    """Return the runs as lines of text with aligned columns."""
    cells = {name: [printable(_cell(getattr(run, name))) for run in runs] for name in COLUMNS}
    if cells["name"] == cells["run"]:
        del cells["name"]

    shown = []
    for name, texts in cells.items():
        if name in ALWAYS or len({*texts}) > 1:
            shown.append([name, *texts])
    rows = list(zip(*shown, strict=True))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(value: Any) -> str:
    """Return a value as text: two decimals for numbers, - for None."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def to_csv(runs: Sequence[Run]) -> str:
    """Return the content of `--csv`: a heading, and one row per run."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows([[getattr(run, column) for column in COLUMNS] for run in runs])
    return text.getvalue()


def draw(runs: Sequence[Run], *, cost: str) -> "tuple[Figure, list[str]]":
    """Draw two panels for each metric: the curves of its runs, and their best values and costs.

    At each evaluation the curve shows the better one of the moving average and the raw weights. The
    lines beside the figure name each run that is not in it, or in one panel only.
    """
    by_metric: dict[str, list[Run]] = {}
    messages = []
    for run in runs:
        if run.metric is None or not run.curve():
            messages.append(f"left out of the plot: {run.run} has no evaluation in metrics.jsonl")
            continue
        by_metric.setdefault(run.metric, []).append(run)
        if run.cost(cost) is None:
            messages.append(f"left out of the second panel: {run.run}, {COSTS[cost]} is unknown")
    if not by_metric:
        raise DataError("--plot: no run has an evaluation in its metrics.jsonl: nothing to draw")

    heights = [max(MIN_HEIGHT, LABEL_HEIGHT * len(group) + 1) for group in by_metric.values()]
    figure = new_figure(width=WIDTH, height=sum(heights))
    grid = figure.subplots(
        len(by_metric), 2, squeeze=False, height_ratios=heights, width_ratios=(3, 2)
    )
    for (metric, group), (left, right) in zip(by_metric.items(), grid, strict=True):
        _draw_curves(left, metric, group)
        _draw_costs(right, metric, group, cost)
    return figure, messages


def style(number: int) -> dict[str, Any]:
    """Return colour, line style and marker of a run by its number, from 0."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def _draw_curves(axes: "Axes", metric: str, runs: Sequence[Run]) -> None:
    """Draw a metric over the epochs, and beside it the names of the runs, the best one first."""
    from matplotlib.ticker import MaxNLocator

    ends = []
    for number, run in enumerate(runs):
        epochs, values = zip(*run.curve(), strict=True)
        axes.plot(
            epochs,
            values,
            label=f"{shorten(run.run)} {run.value:.2f}",
            linewidth=1.2,
            markersize=4,
            markevery=max(1, len(epochs) // MARKED),
            **style(number),
        )
        ends.append(values[-1])

    # The first epochs may lie far below what the runs differ in at their ends.
    lowest = min(ends) - max(BELOW, 2 * (max(ends) - min(ends)))
    axes.set_ylim(bottom=max(axes.get_ylim()[0], lowest))
    axes.set(xlabel="epoch", ylabel=f"{metric} (percent)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    set_title(axes, f"{metric} after each evaluation")

    look: dict[str, Any] = {"fontsize": SMALL, "handlelength": 4, "frameon": False}
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, **look)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_costs(axes: "Axes", metric: str, runs: Sequence[Run], cost: str) -> None:
    """Draw the best values of runs over their costs, where these are known."""
    for number, run in enumerate(runs):
        spent, best = run.cost(cost), run.value
        if spent is not None and best is not None:
            axes.plot([spent], [best], markersize=6, **style(number))
    axes.margins(0.08)
    axes.set(xlabel=COSTS[cost], ylabel=f"best {metric} (percent)")
    axes.grid(alpha=0.3)
    set_title(axes, f"best {metric} against its cost")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command(
        "summary", "Print a table of the runs in a folder, the best one of each metric first."
    )
    arguments.add_argument("folder", nargs="?", default="outputs", help="default: outputs")
    arguments.add_argument("--csv", metavar="FILE", help="write the table there too")
    arguments.add_argument(
        "--plot",
        metavar="FILE",
        help="draw learning curves, and the metric against its cost: .png, .svg or .pdf "
        "(needs matplotlib)",
    )
    arguments.add_argument(
        "--cost",
        choices=COSTS,
        default="hours",
        help="of the plot: hours of training (the default), or gmacs, billions of "
        "multiply-accumulates per image",
    )
    return arguments


def compare(args: argparse.Namespace) -> None:
    """Print the table, and write it and the plot if asked to."""
    check_targets(args.plot, csv=args.csv)
    if args.plot:
        require("--plot: a chart", "plot", "matplotlib")

    runs = gather(Path(args.folder))
    say(*table(runs).splitlines())
    if args.csv:
        write_result(args.csv, to_csv(runs))
    if args.plot:
        figure, left_out = draw(runs, cost=args.cost)
        say(*left_out)
        save(figure, Path(args.plot))


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, compare)


if __name__ == "__main__":
    main()
