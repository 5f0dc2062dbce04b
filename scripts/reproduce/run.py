"""Train rows of the paper: `python scripts/reproduce/run.py table1 [--data-root DIR] [key=value]`.

There are rows of tables 1, 2, 3, 5 and 6, of figures 5 and 6, and of the results on VOC 2007, Open
Images, ImageNet, Cars and CIFAR-100; not of table 4 and of the tables in the appendix.

It prints the command of each run, trains the runs that are not finished, from where they stopped,
and writes outputs/reproduce/NAME.md with the paper's value, ours, seeds, GPU hours and commit.
Settings such as train.accumulate=8 are added to each run.

A run is known by its name alone: one below outputs/ that has a row's name counts as that row, with
whatever settings and start weights it was trained, so run this in a folder of its own.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rows import SECTIONS, TABLES, Row  # beside this file

ENVIRONMENT = "MLDEC_DATA"  # where the data options look for their folders
HOURS = Path("outputs/reproduce/hours.jsonl")


def name(row: Row, seed: int) -> str:
    """Return the name of a run, and of its folder below outputs/."""
    return row.run if seed == 0 else f"{row.run}_seed{seed}"


def command(row: Row, seed: int, gpus: int, settings: list[str]) -> list[str]:
    """Return the command line that trains a row, as a new run or from where it stopped."""
    launcher = [sys.executable, "-m"]
    if gpus > 1:
        launcher = ["torchrun", "--nproc-per-node", str(gpus), "-m"]

    # A run that goes on takes its weights from its own checkpoint.
    own_settings = [*row.settings, f"name={name(row, seed)}", f"seed={seed}"]
    started = any(Path("outputs", name(row, seed), "checkpoints").glob("last*.pt"))
    if started:
        own_settings = [setting for setting in own_settings if not setting.startswith("init=")]
    if gpus == 0:
        own_settings.append("device=cpu")
    if started:
        own_settings.append("resume=auto")

    # The user's settings come last, so that they count.
    return [*launcher, "mldec.train", *own_settings, *settings]


def missing(row: Row, settings: list[str]) -> str | None:
    """Return one line on the folder of a row's data if it is not there, else None."""
    from mldec import build
    from mldec.config.compose import compose

    # A wrong setting is refused here too, before the first run.
    config = compose([*row.settings, *settings])
    build.check(config)

    root = config.data.get("root")
    if root is None or Path(root).is_dir():
        return None
    section = SECTIONS.get(Path(str(root)).name, "the data set's")
    return f"{root} is not there: pass --data-root, or see DATASETS.md, section {section}"


def train(row: Row, seed: int, gpus: int, settings: list[str]) -> None:
    """Train a row with one seed, and record how long the GPUs were used.

    Raises:
        ConfigError: if it fails.
    """
    from mldec.errors import ConfigError

    began = time.monotonic()
    status = subprocess.run(command(row, seed, gpus, settings)).returncode
    hours = (time.monotonic() - began) * gpus / 3600

    # A run that failed used the GPUs too.
    HOURS.parent.mkdir(parents=True, exist_ok=True)
    with HOURS.open("a") as file:
        file.write(json.dumps({"run": name(row, seed), "gpu_hours": hours}) + "\n")

    if status:
        raise ConfigError(
            f"{name(row, seed)} ended with status {status}: the same command goes on with it"
        )


def result(row: Row, seed: int) -> dict[str, Any] | None:
    """Return the state, commit and metrics of a run; None before its first evaluation."""
    from mldec import checkpoint, summary

    folder = Path("outputs", name(row, seed))
    path = folder / "checkpoints" / "best.pt"
    if not path.exists():
        return None

    saved = checkpoint.load(path).metrics
    state = summary.read(folder, name(row, seed))

    # With a moving average the metrics of the raw weights have names of their own.
    prefix = "val/"
    if state.weights == "raw" and any(key.startswith("val_raw/") for key in saved):
        prefix = "val_raw/"
    metrics = {
        key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)
    }

    return {
        "finished": state.state == "finished",
        "epochs": state.epochs,
        "commit": state.commit,
        "metrics": metrics,
    }


def table(title: str, rows: list[Row], seeds: range) -> str:
    """Return the table as Markdown: one line per metric of each row."""
    hours = gpu_hours()
    lines = [
        f"# {title}",
        "",
        "| model | metric | paper | ours | seeds | GPU hours | commit | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        results = row_results(row, seeds)

        # Only finished runs count; the others are mentioned in the note.
        finished = [run for run in results if run["finished"]]
        spent = sum(hours.get(name(row, seed), 0.0) for seed in seeds)

        for metric, paper in (row.paper or {"-": None}).items():
            values = [run["metrics"][metric] for run in finished if metric in run["metrics"]]
            cells = [
                row.label,
                metric,
                "n/a" if paper is None else f"{paper}",
                mean_and_deviation(values),
                str(len(finished)),
                f"{spent:.1f}",
                ", ".join(sorted({run["commit"] for run in finished})) or "-",
                "; ".join(filter(None, (progress(row, results), row.note))),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def row_results(row: Row, seeds: range) -> list[dict[str, Any]]:
    """Return the results of a row's runs that have been evaluated."""
    if not row.runs:
        return []
    results = [result(row, seed) for seed in seeds]
    return [evaluated for evaluated in results if evaluated is not None]


def gpu_hours() -> dict[str, float]:
    """Return the GPU hours that each run has taken so far, over all of its starts."""
    hours: dict[str, float] = {}
    if HOURS.exists():
        for line in HOURS.read_text().splitlines():
            start = json.loads(line)
            hours[start["run"]] = hours.get(start["run"], 0.0) + start["gpu_hours"]
    return hours


def progress(row: Row, results: list[dict[str, Any]]) -> str:
    """Describe how far a row is; "" for a row with a finished run, and for one that cannot run."""
    if not row.runs or any(run["finished"] for run in results):
        return ""
    if results:
        return f"at {results[0]['epochs']} epochs"
    return "not run"


def mean_and_deviation(values: list[float]) -> str:
    """Return the mean of the seeds' values, with their standard deviation if there are several."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.2f}"


def reproduce(chosen: str, *, seeds: range, gpus: int, dry: bool, settings: list[str]) -> None:
    """Print the commands of a table, train what is not finished, and write the table.

    Raises:
        UserError: if data or a GPU is missing, or a run fails.
    """
    from mldec.errors import ConfigError, DataError

    title, rows = TABLES[chosen]

    # 1. Print the commands, as a user could type them.
    print(f"{title}:")
    runs = [(row, seed) for seed in seeds for row in rows if row.runs]
    root = f"{ENVIRONMENT}={os.environ[ENVIRONMENT]} " if ENVIRONMENT in os.environ else ""
    for row, seed in runs:
        printed = shlex.join(command(row, seed, max(gpus, 1), settings)).replace(
            sys.executable, "python", 1
        )
        print(f"  {root}{printed}", flush=True)

    out = Path("outputs", "reproduce", f"{chosen}.md")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if dry:
            return

        # 2. Refuse what would fail, before the first run takes days.
        for row, _ in runs:
            fault = missing(row, settings)
            if fault:
                raise DataError(fault)
        if gpus < 0:
            raise ConfigError(
                "there is no CUDA device: run this where there is one, or with --gpus 0, on the CPU"
            )

        # 3. Train what is not finished.
        for row, seed in runs:
            earlier = result(row, seed)
            if earlier is None or not earlier["finished"]:
                train(row, seed, gpus, settings)
    finally:
        # 4. Write the table, of what there is.
        text = table(title, rows, seeds)
        out.write_text(text)
        print(f"\n{text}\nwritten: {out}", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES, help="what to reproduce")
    parser.add_argument(
        "--data-root",
        metavar="FOLDER",
        help=f"holds coco/, voc/ ...; default: {ENVIRONMENT}, else data",
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many: 0, 1, ... (default: one)")
    parser.add_argument("--gpus", type=int, help="default: all of this machine; 0: run on the CPU")
    parser.add_argument("--dry-run", action="store_true", help="run nothing")
    args, settings = parser.parse_known_args()

    # The option files read it when the package composes them.
    if args.data_root:
        os.environ[ENVIRONMENT] = args.data_root

    from mldec.errors import one_line

    with one_line():
        gpus = args.gpus
        if gpus is None:
            import torch

            gpus = torch.cuda.device_count() or -1

        seeds = range(args.seeds)
        reproduce(args.table, seeds=seeds, gpus=gpus, dry=args.dry_run, settings=settings)


if __name__ == "__main__":
    main()
