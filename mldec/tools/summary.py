"""Compare training runs: `mldec summary outputs/ [--csv FILE] [--table FILE]`.

A run is a folder with checkpoints/best.pt, or last.pt before its first evaluation. Its row comes
from run.json, config.yaml and metrics.jsonl. Unreadable runs are skipped with a message.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mldec.cli import command, run_command
from mldec.config.compose import flat, option, options
from mldec.config.schema import PARTS
from mldec.errors import CheckpointError, ConfigError, DataError, naming_errors, say, visible
from mldec.files.atomic import STANDARD_OUTPUT, check_targets, csv_lines, write_result
from mldec.files.run_folder import LOG_FILE, RUN_FILE, find_checkpoint, read_facts
from mldec.files.text import read_yaml
from mldec.training.log import clock, read_progress

ALWAYS = {"run", "metric", "value", "epochs", "state", "time"}  # printed even if all are equal
IGNORED = {"seed", "name", "resume", "data.cache_dir"}  # settings that may differ within a group

# Settings that the other columns show.
SHOWN = {"optim.lr", "data.fold", "data.root", "data.image_size"}
SHOWN |= {f"{part}._target_" for part in PARTS}


@dataclass(frozen=True)
class Run:
    """A run: its row of the table, best evaluation and settings."""

    row: dict[str, Any]  # by column
    metrics: dict[str, float]  # of the evaluation with the best first metric
    settings: dict[str, Any]  # of config.yaml, by full key


def read_run(folder: Path, name: str) -> Run:
    """Read a run from its folder. `name` is the value of the column `run`."""
    find_checkpoint(folder)
    progress = read_progress(folder / LOG_FILE)
    facts = read_facts(folder)
    if facts is None:
        raise CheckpointError(f"{folder / RUN_FILE}: file not found; resume the run to write it")
    with naming_errors(folder):
        settings = flat(read_yaml(folder / "config.yaml"))

    # If the run was resumed from another folder, its log does not contain the earlier epochs.
    best = facts.best
    epoch = max(progress.epoch, facts.start_epoch)
    metrics: dict[str, float] = {}
    logged = progress.best
    if logged is not None:
        metrics = {key: value for key, value in logged.metrics.items() if value is not None}
        if logged.value >= best.get("value", -math.inf):
            best = {"metric": logged.metric, "value": logged.value, "weights": logged.weights}

    def name_of(part: str) -> str:
        return str(settings.get(f"{part}._target_", "-")).rpartition(".")[2]

    folder_name = Path(str(settings.get("data.root") or "")).name

    macs = facts.multiply_accumulates
    commit, plus, dirty = (facts.commit or "-").partition("+")
    row = {
        "run": name,
        "name": facts.name,
        "metric": best.get("metric"),  # None before the first evaluation
        "value": best.get("value"),  # best value of the metric
        "weights": best.get("weights", "raw"),  # raw or ema: weights with the best value
        "params_m": facts.parameters / 1e6,  # trainable parameters in millions
        "gmacs": None if macs is None else macs / 1e9,  # per image
        "image_size": facts.image_size,  # pixels per side
        "data": f"{name_of('data')} {folder_name}".strip(),  # reader, and name of its folder
        "head": name_of("head"),
        "loss": name_of("loss"),
        "lr": str(settings.get("optim.lr", "-")),  # peak learning rate
        "fold": settings.get("data.fold"),  # of a cross-validation, such as 1/5
        "seed": settings.get("seed", 0),
        "epochs": f"{epoch}/{facts.epochs}",  # evaluated and planned
        "state": "finished" if facts.ended or epoch >= facts.epochs else "unfinished",
        "time": clock(progress.seconds),  # with tokens and evaluations, without interruptions
        "commit": commit[:10] + plus + dirty[:5],
    }
    return Run(row, metrics, settings)


def find_runs(root: Path) -> list[Run]:
    """Return the runs below a folder, sorted by metric, full runs before folds, and value."""
    folders = sorted({path.parent for path in root.rglob("checkpoints") if path.is_dir()})
    runs = []
    for folder in folders:
        name = root.name if folder == root else folder.relative_to(root).as_posix()
        try:
            runs.append(read_run(folder, name))
        except CheckpointError as error:
            say(f"skipped: {error}")
    if not runs:
        raise DataError(f"{root}: no run found (a folder with checkpoints/best.pt); check the path")

    def order(run: Run) -> tuple[Any, ...]:
        row = run.row
        metric = row["metric"] or "~"  # "~" sorts runs without a metric last
        return metric, row["fold"] is not None, -(row["value"] or 0.0), row["run"]

    for key in _differing(runs):
        if key not in SHOWN | IGNORED:
            for run in runs:
                run.row[key] = run.settings.get(key)
    return sorted(runs, key=order)


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings with several values among the runs that have them, sorted.

    A setting that only some runs have, such as an argument of one loss, does not count as a
    difference.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.settings.items():
            values.setdefault(key, set()).add(json.dumps(value, default=str))
    return sorted(key for key, found in values.items() if len(found) > 1)


def _text(value: Any, form: str = ".2f") -> str:
    if value is None:
        return "-"
    return format(value, form) if isinstance(value, float) else str(value)


def _format_runs(runs: Sequence[Run]) -> list[str]:
    """Return a heading and a line per run, without columns of equal values."""
    lines = [""] * (len(runs) + 1)
    for name in runs[0].row:
        cells = [_text(run.row[name]) for run in runs]
        # The column `name` is skipped, because it usually equals the column `run`.
        if name in ALWAYS or (len(set(cells)) > 1 and name != "name"):
            cells.insert(0, name)
            width = max(map(len, cells)) + 2
            for number, cell in enumerate(cells):
                lines[number] += cell.ljust(width)
    return lines


def paired_difference(values: Sequence[float], others: Sequence[float]) -> dict[str, float | None]:
    """Compare paired values by a two-sided paired t-test. Undefined results are None."""
    from scipy.stats import ttest_1samp

    result: dict[str, float | None] = dict.fromkeys(("difference", "low", "high", "p"))
    differences = np.subtract(values, others)
    if len(differences) > 0:
        result["difference"] = float(differences.mean())
    if len(differences) > 1 and np.ptp(differences) > 0:
        test = ttest_1samp(differences, 0)
        result["low"], result["high"] = map(float, test.confidence_interval(0.95))
        result["p"] = float(test.pvalue)
    return result


def _option(part: str, settings: Mapping[str, Any]) -> str:
    """Return the option of a part, such as asl, or its class if no option has this class.

    If several options have the class, the one is returned of which the run changed the fewest
    arguments, and among equal ones the one with the most arguments.
    """
    target = str(settings.get(f"{part}._target_"))
    class_name = target.rpartition(".")[2]
    scores = {class_name: (-math.inf, 0)}
    for name in options(part):
        node = flat(option(part, name))
        if node["_target_"] == target:
            equal = sum(settings.get(f"{part}.{key}") == value for key, value in node.items())
            scores[name] = (equal - len(node), equal)
    return max(scores, key=lambda name: scores[name])


def _describe(settings: Mapping[str, Any], differing: Sequence[str]) -> str:
    """Return the settings that differ from other runs, such as "loss=asl optim.lr=0.001"."""
    words = []
    for key in differing:
        part, _, argument = key.partition(".")
        if argument == "_target_":
            words.append(f"{part}={_option(part, settings)}")
        elif key not in IGNORED and key in settings:
            words.append(f"{key}={settings[key]}")
    return " ".join(words)


def _group_by_seed(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Group runs whose settings differ only in the seed. Keys are the name of a group and seeds.

    A group has the name of its first run, without the seed. Jobs of --multirun only have numbers:
    their groups are named by the settings that differ.
    """
    differing = _differing(runs)
    names: dict[str, str] = {}  # by settings
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        own_name = run.row["run"]
        shared = {key: run.settings[key] for key in run.settings.keys() - IGNORED}
        settings = json.dumps(shared, sort_keys=True, default=str)
        if settings not in names:
            # The group of `asl_seed0` is `asl`.
            name = re.sub(r"[-_ ]?seed[-_=]?\d+$", "", own_name)
            if re.fullmatch(re.escape(run.row["name"]) + r"_\d+", Path(own_name).name):
                name = _describe(run.settings, differing) or name
            names[settings] = own_name if name in groups else name
            groups[names[settings]] = {}

        group = groups[names[settings]]
        seed = run.settings.get("seed", 0)
        if seed in group:
            other = group[seed].row["run"]
            raise DataError(f"{own_name}: same settings and seed as {other}; move one run")
        group[seed] = run
    return groups


def _table_over_seeds(runs: Sequence[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per group of finished runs that differ only in their seed."""
    main_metric = runs[0].row["metric"]
    used = []
    for run in sorted(runs, key=lambda run: run.row["run"]):
        if run.row["state"] == "finished" and run.row["metric"] == main_metric and run.metrics:
            used.append(run)
        else:
            say(f"skipped: {run.row['run']} is unfinished, or its metric is not {main_metric}")
    metrics = [main_metric] + args.metrics
    for metric in metrics:
        if not any(metric in run.metrics for run in used):
            raise DataError(f"{metric}: no finished run has this metric; see {LOG_FILE}")
    groups = _group_by_seed(used)
    if args.against is not None and args.against not in groups:
        raise DataError(f"--against {args.against}: unknown group; use {', '.join(groups)}")

    rows = []
    for name, group in groups.items():
        row: dict[str, Any] = {"group": name, "seeds": len(group)}
        for metric in metrics:
            values = [run.metrics[metric] for run in group.values() if metric in run.metrics]
            row[metric] = statistics.fmean(values) if values else None
            row[f"{metric} deviation"] = statistics.stdev(values) if len(values) > 1 else None
            row[f"{metric} seeds"] = len(values)
        if args.against is not None:
            base = groups[args.against]
            seeds = sorted(group.keys() & base.keys())
            values = [group[seed].metrics[main_metric] for seed in seeds]
            others = [base[seed].metrics[main_metric] for seed in seeds]
            row |= paired_difference(values, others)
        rows.append(row)
    return rows


def _text_rows(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    metrics = [key.removesuffix(" seeds") for key in rows[0] if key.endswith(" seeds")]
    table = [["group", "seeds"] + metrics]
    for row in rows:
        cells = [visible(row["group"]), str(row["seeds"])]
        for metric in metrics:
            text = f"{_text(row[metric])} ± {_text(row[f'{metric} deviation'])}"
            if row[f"{metric} seeds"] < row["seeds"]:
                text += f" (n={row[f'{metric} seeds']})"
            cells.append(text)
        if "p" in row:
            interval = f"{_text(row['low'], '+.2f')} to {_text(row['high'], '+.2f')}"
            cells += [_text(row["difference"], "+.2f"), interval, _text(row["p"], ".3f")]
        table.append(cells)
    if "p" in rows[0]:
        table[0] += [f"difference in {metrics[0]}", "95 % interval", "p"]
    return table


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    table = _text_rows(rows)
    table.insert(1, ["---"] * len(table[0]))
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    return re.sub(r"[*_]", r"\\\g<0>", text)


def _latex(rows: Sequence[dict[str, Any]]) -> str:
    import pandas as pd  # slow to import

    header, *cells = _text_rows(rows)
    columns = "l" + "r" * (len(header) - 1)
    frame = pd.DataFrame(cells, columns=header)
    text: str = frame.to_latex(index=False, escape=True, column_format=columns)
    text = re.sub(r"(?<!\S)-(?=\d)", "$-$", text)  # minus signs
    return text.replace("±", r"$\pm$")


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(csv_lines([list(rows[0])] + [list(row.values()) for row in rows]))


FORMATS = {"": _markdown, ".md": _markdown, ".tex": _latex, ".csv": _csv}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command("summary", "Print a table of the runs in a folder, best run first.")
    option = arguments.add_argument
    option("folder", nargs="?", default="outputs", help="default: outputs")
    option("--csv", metavar="FILE", help="write the table of runs with all columns")
    option("--table", metavar="FILE", help="mean and deviation over seeds: .md, .tex, .csv or -")
    option("--metrics", nargs="+", default=[], metavar="METRIC", help="further metrics of --table")
    option("--against", metavar="GROUP", help="group of --table to compare the others with")
    return arguments


def print_runs(args: argparse.Namespace) -> None:
    """Print the table of runs, and write the files of the options."""
    check_targets(args.table, csv=args.csv)
    suffix = Path(args.table or "").suffix
    if suffix not in FORMATS:
        raise ConfigError(f"--table {args.table}: unknown format; use .md, .tex or .csv")

    runs = find_runs(Path(args.folder))
    if args.table != STANDARD_OUTPUT:
        say(*_format_runs(runs))
    if args.table:
        write_result(args.table, FORMATS[suffix](_table_over_seeds(runs, args)))
    if args.csv:
        write_result(args.csv, _csv([run.row for run in runs]))


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, print_runs)
