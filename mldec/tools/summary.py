"""Compare the runs in a folder: `mldec summary outputs/ [--csv FILE] [--plot FILE]`.

`--table FILE` makes one row of the runs that differ in their seed only, as papers do.

A run is a folder with checkpoints/best.pt, or last.pt before its first evaluation; run.json and
metrics.jsonl tell of it. A run that cannot be read is left out with a line that explains why.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mldec.cli import command, require, run_command
from mldec.config.compose import flat
from mldec.errors import CheckpointError, ConfigError, DataError, naming_errors, printable, say
from mldec.files.atomic import STANDARD_OUTPUT, check_targets, csv_lines, write_result
from mldec.files.run_folder import LOG_FILE, RUN_FILE, find_checkpoint, read_facts
from mldec.files.text import read_yaml
from mldec.tools.pages import SMALL, new_figure, save, set_title, shorten
from mldec.training.log import Evaluation, Progress, clock, read_progress

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
    folder: Path = Path()  # nor this
    settings: dict[str, Any] = field(default_factory=dict)  # nor these: config.yaml, by full keys

    def cost(self, kind: str) -> float | None:
        """Return what the run takes, by a key of `COSTS`; None if it is unknown."""
        return self.gmacs if kind == "gmacs" else self.progress.seconds / 3600

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations whose main value is a number."""
        return [done for done in self.progress.evaluations if math.isfinite(done.value)]


COLUMNS = [one.name for one in fields(Run)][: -len(("progress", "folder", "settings"))]
# The other columns are shown where runs differ.
ALWAYS = {"run", "metric", "value", "epochs", "state", "time"}


def read(folder: Path, name: str) -> Run:
    """Read the row of a run from its folder; `name` is for the column `run`."""
    find_checkpoint(folder)
    done = read_progress(folder / LOG_FILE)
    facts = read_facts(folder)
    if facts is None:
        raise CheckpointError(f"{folder / RUN_FILE} is missing: resume the run, which writes it")

    # A run that resumed from another folder's checkpoint has no log of the epochs before.
    best = max(done.best, facts.best, key=lambda best: best.get("value", -math.inf))
    epoch, macs = max(done.epoch, facts.start_epoch), facts.multiply_accumulates

    settings = read_settings(folder) if (folder / "config.yaml").exists() else {}
    data, head, loss = (
        str(settings.get(f"{part}._target_", "-")).split(".")[-1]
        for part in ("data", "head", "loss")
    )
    root = settings.get("data.root")

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
        data=f"{data} {Path(str(root)).name}" if root else data,
        head=head,
        loss=loss,
        lr=str(settings.get("optim.lr", "-")),
        fold=settings.get("data.fold"),
        epochs=f"{epoch}/{facts.epochs}",
        state="finished" if facts.ended or epoch >= facts.epochs else "unfinished",
        time=clock(done.seconds),
        commit=commit[:10] + plus + mark[:5],
        progress=done,
        folder=folder,
        settings=settings,
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """Read config.yaml of a run: its settings by their full keys."""
    file = folder / "config.yaml"
    with naming_errors(file, remedy="name the folder of a run"):
        return flat(read_yaml(file))


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

    shown = [[name, *texts] for name, texts in cells.items() if name in ALWAYS or len({*texts}) > 1]
    widths = [max(map(len, column)) for column in shown]
    rows = zip(*shown, strict=True)
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(value: Any) -> str:
    """Return a value as text: two decimals for numbers, - for None."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def to_csv(runs: Sequence[Run]) -> str:
    """Return the content of `--csv`: a heading, and one row per run."""
    rows = ([getattr(run, column) for column in COLUMNS] for run in runs)
    return "".join(csv_lines([COLUMNS, *rows]))


def draw(runs: Sequence[Run], *, cost: str) -> "tuple[Figure, list[str]]":
    """Draw two panels for each metric: the curves of its runs, and their best values and costs.

    At each evaluation the curve shows the better one of the moving average and the raw weights. The
    lines beside the figure name each run that is not in it, or in one panel only.
    """
    by_metric: dict[str, list[Run]] = {}
    messages = []
    for run in runs:
        if run.metric is None or not run.evaluations:
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
        epochs, values = zip(*[(one.epoch, one.value) for one in run.evaluations], strict=True)
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


class Difference(NamedTuple):
    """By how much paired values are higher than others; None where two pairs do not differ."""

    mean: float
    interval: tuple[float, float] | None  # of the mean, at 95 %
    p: float | None  # of no difference, in a paired t-test with two sides
    verdict: str  # better, worse, as good, or open


@dataclass
class Group:
    """Runs that differ in their seed only: a row of a table over seeds."""

    name: str
    runs: dict[int, Run]  # by seed
    values: list[list[float]] = field(default_factory=list)  # of each metric, of each seed
    difference: Difference | None = None  # of the first metric, from the group of --against


class Table(NamedTuple):
    """A table over seeds."""

    metrics: list[str]
    groups: list[Group]
    is_compared: bool  # whether the groups have differences, but for one


LEVEL = 0.05  # of the tests
# Settings that do not change what a run is about.
NO_DIFFERENCE = {"seed", "name", "resume", "data.cache_dir"}
ERRORS = {"ECE"}  # metrics that are better if they are lower
USUAL = ("CF1", "OF1", "CF1@3", "OF1@3")  # metrics that papers show beside the first one


def paired(values: Sequence[float], others: Sequence[float], *, margin: float) -> Difference:
    """Compare paired values, such as those of two groups for the same seeds.

    They are "better" or "worse" if the paired t-test says so, "as good" if it does not and two
    one-sided tests (TOST, Schuirmann 1987) say that the mean difference is above -margin and below
    margin, each at the level of 5 %, and else "open".
    """
    from scipy.stats import ttest_1samp

    differences = np.subtract(values, others)
    mean = float(differences.mean())
    if len(differences) < 2 or np.ptp(differences) == 0:
        return Difference(mean, None, None, "open")

    test = ttest_1samp(differences, 0)
    low, high = test.confidence_interval(1 - LEVEL)
    above = ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = ttest_1samp(differences, margin, alternative="less").pvalue

    verdict = "as good" if max(above, below) < LEVEL else "open"
    if test.pvalue < LEVEL:
        verdict = "better" if mean > 0 else "worse"
    return Difference(mean, (float(low), float(high)), float(test.pvalue), verdict)


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """Return the groups of runs whose settings differ in the seed only, in order of the runs."""
    of_settings: dict[str, dict[int, Run]] = {}
    for run in runs:
        same = {key: run.settings[key] for key in run.settings.keys() - NO_DIFFERENCE}
        seeds = of_settings.setdefault(json.dumps(same, sort_keys=True, default=str), {})
        seed = run.settings.get("seed", 0)
        if seed in seeds:
            raise DataError(
                f"{run.run} and {seeds[seed].run} have the same settings and seed: move one away"
            )
        seeds[seed] = run

    groups: list[Group] = []
    names = group_names(list(of_settings.values()))
    for name, seeds in zip(names, of_settings.values(), strict=True):
        if name in {"", *(group.name for group in groups)}:
            name = next(iter(seeds.values())).run
        groups.append(Group(name, seeds))
    return groups


def group_names(groups: Sequence[dict[int, Run]]) -> list[str]:
    """Name groups, which are runs by seed, by their runs, or by the settings in which they differ.

    `asl_seed0` and `asl_seed1` are the group `asl`. Groups whose runs have the same name or none in
    common, such as those of a sweep, also get the settings that differ between them.
    """
    shared = [shared_name(seeds) for seeds in groups]
    settings = [next(iter(seeds.values())).settings for seeds in groups]
    names = []
    for name, own in zip(shared, settings, strict=True):
        rivals = [other for other, its in zip(settings, shared, strict=True) if its == name]
        words = [name] if len(set(shared)) > 1 and name else []
        if len(rivals) > 1:
            words += differences(own, rivals)
        names.append(", ".join(words) or name)
    return names


def shared_name(seeds: dict[int, Run]) -> str:
    """Return the name that runs, by seed, have without their seeds; an empty one if they differ."""
    names = set()
    for seed, run in seeds.items():
        # A sweep of Hydra appends the number of the job, which is no seed.
        own_name = str(run.settings.get("name", run.name))
        is_job = re.fullmatch(re.escape(own_name) + r"_\d+", Path(run.run).name)
        name = own_name if is_job else run.run
        if len(seeds) > 1:
            name = re.sub(rf"([-_. ](seed|s)?[-_. =]?|seed[-_. =]?|(?<!\d)){seed}$", "", name)
        names.add(name)
    return names.pop() if len(names) == 1 else ""


def differences(own: dict[str, Any], rivals: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings of a group, as key=value, in which it differs from other groups.

    The arguments of a part, such as the loss, are compared between groups with the same part.
    """
    words = []
    for key in sorted(set().union(*rivals)):
        part = key.partition(".")[0]
        target = f"{part}._target_"
        peers = rivals
        if key != target:
            peers = [other for other in rivals if other.get(target) == own.get(target)]
        values = {json.dumps(other.get(key), default=str) for other in peers}
        if key in NO_DIFFERENCE or len(values) < 2:
            continue

        value = own.get(key)
        if key == target:
            words.append(f"{part}={str(value).rpartition('.')[2]}")
        else:
            words.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    return words


def value_at(run: Run, metric: str, at: str) -> float | None:
    """Return a metric of a run in percent: of its best or its last evaluation, or of a class.

    `AP(NAME)` is the average precision of a class in evaluation.json, which `evaluate` writes.
    """
    if chosen := re.fullmatch(r"AP\((.*)\)", metric):
        path = run.folder / "evaluation.json"
        remedy = f"mldec evaluate {run.folder} --json {path} writes it"
        with naming_errors(path, DataError, remedy=remedy):
            found = json.loads(path.read_text(encoding="utf-8"))["per_class"][chosen[1]]["AP"]
        return found if found is None else float(found)

    evaluations = run.evaluations
    if not evaluations:
        return None
    best = max(evaluations, key=lambda evaluation: evaluation.value)
    return (evaluations[-1] if at == "last" else best).metrics.get(metric)


def as_markdown(made: Table) -> str:
    """Return the table in Markdown, the best mean of each metric in bold."""
    heading, *rows = _text_rows(made, bold="**{}**", sign="±", special=r"[|*_]")
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def as_latex(made: Table) -> str:
    """Return the table as a tabular of LaTeX with booktabs, the best mean in bold."""
    rows = _text_rows(made, bold=r"\textbf{{{}}}", sign=r"$\pm$", special=r"[&%$#_{}]")
    heading, *body = (
        " & ".join(re.sub(r"(?<!\S)-(?=\d)", "$-$", cell) for cell in row) + r" \\" for row in rows
    )
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", heading, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def as_csv(made: Table) -> str:
    """Return the table as CSV, with numbers in columns of their own."""
    heading = ["group", "seeds"]
    for metric in made.metrics:
        heading += [metric, f"{metric} deviation", f"{metric} seeds"]
    if made.is_compared:
        heading += ["difference", "low", "high", "p", "verdict"]

    rows = [heading]
    for group in made.groups:
        cells: list[Any] = [group.name, len(group.runs)]
        for values in group.values:
            cells.append(statistics.fmean(values) if values else None)
            cells.append(statistics.stdev(values) if len(values) > 1 else None)
            cells.append(len(values))
        if found := group.difference:
            cells += [found.mean, *(found.interval or (None, None)), found.p, found.verdict]
        rows.append(cells + [None] * (len(heading) - len(cells)))
    return "".join(csv_lines(rows))


FORMS = {".md": as_markdown, ".tex": as_latex, ".csv": as_csv}


def _text_rows(made: Table, *, bold: str, sign: str, special: str) -> list[list[str]]:
    """Return the heading, and the cells of each group; names are escaped."""
    heading = ["", "seeds", *made.metrics]
    if made.is_compared:
        heading += [f"difference in {made.metrics[0]}", "95 % interval", "p", "verdict"]
    means = [[statistics.fmean(values or [math.nan]) for values in g.values] for g in made.groups]
    columns = zip(made.metrics, np.transpose(means), strict=True)
    best = [
        np.nanmin(column) if metric in ERRORS else np.nanmax(column) for metric, column in columns
    ]

    rows = [[re.sub(special, r"\\\g<0>", cell) for cell in heading]]
    for group in made.groups:
        cells = [re.sub(special, r"\\\g<0>", printable(group.name)), str(len(group.runs))]
        for column, values in enumerate(group.values):
            text = "-"
            if values:
                mean = statistics.fmean(values)
                text = f"{mean:.2f}"
                if len(values) > 1:
                    text += f" {sign} {statistics.stdev(values):.2f}"
                if len(values) < len(group.runs):
                    text += f" (n={len(values)})"
                if mean == best[column]:
                    text = bold.format(text)
            cells.append(text)

        if made.is_compared:
            cells += _difference_cells(group.difference)
        rows.append(cells)
    return rows


def _difference_cells(found: Difference | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    interval = "-" if found.interval is None else "{:+.2f} to {:+.2f}".format(*found.interval)
    p = "-" if found.p is None else f"{found.p:.3f}"
    return [f"{found.mean:+.2f}", interval, p, found.verdict]


def diff_of_runs(one: Path, other: Path) -> list[str]:
    """Return `key: value -> value` for each setting that differs between two runs."""
    before, after = read_settings(one), read_settings(other)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys if key != "name"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command(
        "summary", "Print a table of the runs in a folder, the best one of each metric first."
    )
    arguments.add_argument("folder", nargs="?", default="outputs", help="default: outputs")
    arguments.add_argument("--csv", metavar="FILE", help="write the table there too")
    arguments.add_argument(
        "--plot", metavar="FILE", help="draw curves, and the metric against its cost: .png or .svg"
    )
    arguments.add_argument(
        "--cost", choices=COSTS, default="hours", help="of the plot; default: hours of training"
    )
    arguments.add_argument(
        "--table",
        metavar="FILE",
        help="one row for the finished runs that differ in their seed only: mean and standard "
        "deviation; .md, .tex (booktabs) or .csv, or - for Markdown on standard output",
    )
    arguments.add_argument(
        "--metrics",
        help="of --table, beside the first one: names of metrics.jsonl, or AP(CLASS) of "
        f"RUN/evaluation.json; default: {','.join(USUAL)}",
    )
    arguments.add_argument(
        "--at", choices=("best", "last"), default="best", help="of --table: the evaluation"
    )
    arguments.add_argument(
        "--against", metavar="GROUP", help="of --table: compare the other groups with this one"
    )
    arguments.add_argument(
        "--margin", type=float, default=0.5, help='of --against, for "as good"; default: 0.5 points'
    )
    arguments.add_argument(
        "--diff", nargs=2, metavar="RUN", help="print the settings that differ, and nothing else"
    )
    return arguments


def compare(args: argparse.Namespace) -> None:
    """Print the table, and write it and the plot if asked to."""
    if args.diff:
        say(*(diff_of_runs(*map(Path, args.diff)) or ["no setting differs"]))
        return

    check_targets(args.plot, args.table, csv=args.csv)
    if args.plot:
        require("--plot: a chart", "plot", "matplotlib")
    form = ".md" if args.table in (None, STANDARD_OUTPUT) else Path(args.table).suffix
    if form not in FORMS:
        raise ConfigError(f"--table {args.table}: name a file that ends in {', '.join(FORMS)}")

    runs = gather(Path(args.folder))
    if args.table != STANDARD_OUTPUT:
        say(*table(runs).splitlines())
    if args.table:
        write_result(args.table, FORMS[form](table_of_runs(runs, args)))
    if args.csv:
        write_result(args.csv, to_csv(runs))
    if args.plot:
        figure, left_out = draw(runs, cost=args.cost)
        say(*left_out)
        save(figure, Path(args.plot))


def table_of_runs(runs: Sequence[Run], args: argparse.Namespace) -> Table:
    """Return the table over seeds of the finished runs of the first metric; name the others."""
    first = runs[0].metric
    used = [run for run in runs if run.state == "finished" and run.metric == first]
    reason = f"is not finished, or is not judged by {first}"
    say(*(f"left out of the table: {run.run} {reason}" for run in runs if run not in used))
    if first is None or not used:
        raise DataError("--table: no run is finished: nothing to compare")

    # A metric that was asked for must be there; of the usual ones, those that are there are shown.
    metrics = [first]
    for metric in USUAL if args.metrics is None else args.metrics.split(","):
        is_there = any(value_at(run, metric, args.at) is not None for run in used)
        if args.metrics is not None and not is_there:
            raise DataError(f"--metrics {metric}: no run has it; see val/... in metrics.jsonl")
        if is_there and metric not in metrics:
            metrics.append(metric)

    groups = group_by_seed(used)
    for group in groups:
        for metric in metrics:
            values = [value_at(run, metric, args.at) for run in group.runs.values()]
            group.values.append([value for value in values if value is not None])
    if args.against is not None:
        compare_groups(groups, first, args)
    return Table(metrics, groups, args.against is not None)


def compare_groups(groups: Sequence[Group], metric: str, args: argparse.Namespace) -> None:
    """Compare the groups with the one of --against, for the seeds that they share."""
    base = next((group for group in groups if group.name == args.against), None)
    if base is None:
        names = ", ".join(group.name for group in groups)
        raise DataError(f"--against {args.against}: there is no such group; choose one of {names}")

    for group in groups:
        pairs = []
        for seed in sorted(base.runs.keys() & group.runs.keys()):
            value, other = (value_at(one.runs[seed], metric, args.at) for one in (group, base))
            if value is not None and other is not None:
                pairs.append((value, other))
        if not pairs:
            seeds = (", ".join(map(str, sorted(one.runs))) for one in (group, base))
            raise DataError(
                f"--against {args.against}: {group.name} has no seed in common with it "
                f"({' and '.join(seeds)}); train both with the same seeds"
            )
        if group is not base:
            group.difference = paired(*zip(*pairs, strict=True), margin=args.margin)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, compare)


if __name__ == "__main__":
    main()
