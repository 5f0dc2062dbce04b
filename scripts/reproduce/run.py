"""Train rows of the paper: `python scripts/reproduce/run.py table1 [--data-root /data] [key=value ...]`.

There are rows of tables 1, 2, 3, 5 and 6, of figures 5 and 6, and of the results on VOC 2007, Open
Images, ImageNet, Cars and CIFAR-100; not of table 4 and of the tables in the appendix.

Prints the command of each run; runs what is not finished, going on where it stopped; writes outputs/reproduce/NAME.md
with the paper's value, ours, seeds, GPU hours and commit. Settings such as train.accumulate=8 are added to each run.

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
    """Return the name of a run, which is its folder's below outputs/."""
    return row.run if seed == 0 else f"{row.run}_seed{seed}"


def command(row: Row, seed: int, gpus: int, settings: list[str]) -> list[str]:
    """Return what trains a row: as a new run, or on from where it stopped."""
    started = any(Path("outputs", name(row, seed), "checkpoints").glob("last*.pt"))
    words = [word for word in row.words if not (started and word.startswith("init="))]
    launcher = [sys.executable, "-m"]
    if gpus > 1:
        launcher = ["torchrun", "--nproc-per-node", str(gpus), "-m"]
    device = ["device=cpu"] if gpus == 0 else []
    resume = ["resume=auto"] if started else []
    return [
        *launcher,
        "mldec.train",
        *words,
        f"name={name(row, seed)}",
        f"seed={seed}",
        *device,
        *resume,
        *settings,
    ]


def missing(row: Row, settings: list[str]) -> str | None:
    """Return what is wrong with the place of a row's data, in one line."""
    from mldec import build
    from mldec.config.compose import compose

    config = compose([*row.words, *settings])
    build.check(config)
    root = config.data.get("root")
    if root is None or Path(root).is_dir():
        return None
    section = SECTIONS.get(Path(str(root)).name, "the data set's")
    return f"{root} is not there: pass --data-root, or see DATASETS.md, section {section}"


def train(row: Row, seed: int, gpus: int, settings: list[str]) -> None:
    """Do a run, and note how long the GPUs were used.

    Raises:
        ConfigError: if it fails.
    """
    from mldec.errors import ConfigError

    began = time.monotonic()
    status = subprocess.run(command(row, seed, gpus, settings)).returncode
    HOURS.parent.mkdir(parents=True, exist_ok=True)
    with HOURS.open("a") as file:
        hours = (time.monotonic() - began) * gpus / 3600
        file.write(json.dumps({"run": name(row, seed), "gpu_hours": hours}) + "\n")
    if status:
        raise ConfigError(
            f"{name(row, seed)} ended with status {status}: the same command goes on with it"
        )


def result(row: Row, seed: int) -> dict[str, Any] | None:
    """Return the state, commit and metrics of a run's best weights; None before its first evaluation."""
    from mldec import checkpoint, summary

    folder = Path("outputs", name(row, seed))
    path = folder / "checkpoints" / "best.pt"
    if not path.exists():
        return None
    metrics, found = checkpoint.load(path).metrics, summary.read(folder, name(row, seed))
    # With a moving average the raw weights' metrics have a name of their own.
    raw = found.weights == "raw" and any(key.startswith("val_raw/") for key in metrics)
    prefix = "val_raw/" if raw else "val/"
    metrics = {
        key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)
    }
    return {
        "finished": found.state == "finished",
        "epochs": found.epochs,
        "commit": found.commit,
        "metrics": metrics,
    }


def table(title: str, rows: list[Row], seeds: range) -> str:
    """Return the table as Markdown: one line for each metric of each row."""
    hours = gpu_hours()
    lines = [
        f"# {title}",
        "",
        "| model | metric | paper | ours | seeds | GPU hours | commit | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        results = [one for seed in seeds if row.runs and (one := result(row, seed)) is not None]
        finished = [one for one in results if one["finished"]]
        spent = sum(hours.get(name(row, seed), 0.0) for seed in seeds)

        for metric, paper in (row.paper or {"-": None}).items():
            values = [one["metrics"][metric] for one in finished if metric in one["metrics"]]
            cells = [
                row.label,
                metric,
                "n/a" if paper is None else f"{paper}",
                mean_and_deviation(values),
                str(len(finished)),
                f"{spent:.1f}",
                ", ".join(sorted({one["commit"] for one in finished})) or "-",
                "; ".join(filter(None, (progress(row, results), row.note))),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def gpu_hours() -> dict[str, float]:
    """Return the GPU hours that each run has taken so far, over all of its starts."""
    hours: dict[str, float] = {}
    if HOURS.exists():
        for line in HOURS.read_text().splitlines():
            start = json.loads(line)
            hours[start["run"]] = hours.get(start["run"], 0.0) + start["gpu_hours"]
    return hours


def progress(row: Row, results: list[dict[str, Any]]) -> str:
    """Say how far a row is; empty for a row with a finished run, and for one that cannot run."""
    if not row.runs or any(one["finished"] for one in results):
        return ""
    if results:
        return f"at {results[0]['epochs']} epochs"
    return "not run"


def mean_and_deviation(values: list[float]) -> str:
    """Return the mean of some values, with their standard deviation where there are several."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.2f}"


def reproduce(chosen: str, *, seeds: range, gpus: int, dry: bool, settings: list[str]) -> None:
    """Print, run and tabulate a table.

    Raises:
        UserError: if data or a GPU is missing, or a run fails.
    """
    from mldec.errors import ConfigError, DataError

    title, rows = TABLES[chosen]
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
        for row, _ in runs:
            if fault := missing(row, settings):
                raise DataError(fault)
        if gpus < 0:
            raise ConfigError(
                "there is no CUDA device: run this where there is one, or with --gpus 0, on the CPU"
            )
        for row, seed in runs:
            found = result(row, seed)
            if not (found and found["finished"]):
                train(row, seed, gpus, settings)
    finally:
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
    words, settings = parser.parse_known_args()
    if words.data_root:
        os.environ[ENVIRONMENT] = words.data_root
    from mldec.errors import one_line

    with one_line():
        gpus = words.gpus
        if gpus is None:
            import torch

            gpus = torch.cuda.device_count() or -1
        reproduce(
            words.table, seeds=range(words.seeds), gpus=gpus, dry=words.dry_run, settings=settings
        )


if __name__ == "__main__":
    main()
