#!/usr/bin/env python
"""Train rows of the papers: `python scripts/reproduce/run.py table1 [--data-root DIR]`.

Available are tables 1, 2, 3, 5 and 6 and figures 5 and 6 of ML-Decoder, its results on VOC 2007,
Open Images, ImageNet, Cars and CIFAR-100, and results of Query2Label and ASL. The table "recipes"
has later networks. `--list` prints all rows: published value, initial weights, estimated hours of
one GPU and of one H100, unpublished parts of the recipe, and the command.

The script prints the command of each run, trains or resumes unfinished runs, and writes
outputs/reproduce/NAME.md with published values, our values, seeds, GPU hours and commit. Settings
such as train.epochs=1 are added to each run. Unless train.accumulate is set, the batch is divided
into micro-batches that should fit the GPU memory. Batch norms then use statistics of a micro-batch.

If a folder in outputs/ contains a run with other settings or initial weights, the script prints the
differences and uses another folder.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

# In the same folder.
from costs import (
    H100,
    H100_CONVOLUTIONS,
    H100_FP32,
    SUSTAINED,
    accumulation,
    composed,
    dataset,
    divisible_gpus,
    gpu_hours,
    h100,
)
from rows import TABLES, Row

from mldec.checkpoint import loading
from mldec.config.compose import flat, parse, to_dict
from mldec.errors import ConfigError, DataError, one_line
from mldec.runtime.devices import Precision
from mldec.tools.summary import read_run

ENVIRONMENT = "MLDEC_DATA"  # root of all data folders in the data options
HOURS = Path("outputs/reproduce/hours.jsonl")
# Settings that may differ between a row and its run.
IGNORED = {
    "name",
    "device",
    "resume",
    "plugins",
    "data.root",
    "data.cache_dir",
    "train.workers",
    "train.log_every",
    "train.eval_batch_size",
    "train.accumulate",
}


def folder_name(row: Row, seed: int, settings: list[str]) -> tuple[str, list[str]]:
    """Return the folder of a row's run in outputs/, and a message for each skipped folder.

    Args:
        row: The row.
        seed: Seed of the run.
        settings: Additional settings from the command line.

    Returns:
        The first of NAME, NAME_2, ... that is free or contains this run, and the differences of
        the folders before it.
    """
    first = row.run if seed == 0 else f"{row.run}_seed{seed}"
    messages: list[str] = []
    for number in itertools.count(1):
        name = first if number == 1 else f"{first}_{number}"
        changes = differences(Path("outputs", name), row, seed, settings)
        if not changes:
            break
        messages.append(f"outputs/{name} is another run ({'; '.join(changes)})")
    return name, messages


def differences(folder: Path, row: Row, seed: int, settings: list[str]) -> list[str]:
    """Return `key: value -> value` for each setting that differs between a run and a row.

    The initial weights are the setting `init`.
    """
    recorded = folder / "config.yaml"
    if not recorded.exists():
        return ["no config.yaml"] if any(folder.glob("checkpoints/*.pt")) else []
    try:
        found = flat(to_dict(parse(yaml.safe_load(recorded.read_text()))))
    except (ConfigError, yaml.YAMLError, UnicodeDecodeError) as error:
        return [f"its config.yaml cannot be read: {error}"]

    # A run records the precision that its device supports.
    wanted = flat(to_dict(composed(tuple(row.settings + [f"seed={seed}"] + settings))))
    precision = found["train.precision"]
    if Precision(wanted["train.precision"]).may_fall_back_to(Precision(precision)):
        wanted["train.precision"] = precision

    changes = []
    for key in sorted((found.keys() | wanted.keys()) - IGNORED):
        if found.get(key) != wanted.get(key):
            changes.append(f"{key}: {found.get(key)} -> {wanted.get(key)}")
    return changes


def command(row: Row, seed: int, gpus: int, settings: list[str]) -> list[str]:
    """Return the command line that trains or resumes a row."""
    own_settings = row.settings + [f"seed={seed}"]
    all_settings = tuple(row.settings + settings)
    if gpus > 1:
        gpus = divisible_gpus(composed(all_settings).train.batch_size, gpus)
    if not any(setting.startswith("train.accumulate=") for setting in settings):
        parts = accumulation(all_settings, max(gpus, 1))
        if parts > 1:
            own_settings.append(f"train.accumulate={parts}")

    launcher = [sys.executable, "-m"]
    if gpus > 1:
        launcher = ["torchrun", "--nproc-per-node", str(gpus), "-m"]

    # A resumed run loads its weights from its checkpoint.
    name, _ = folder_name(row, seed, settings)
    own_settings.append(f"name={name}")
    if any(Path("outputs", name, "checkpoints").glob("last*.pt")):
        own_settings = [setting for setting in own_settings if not setting.startswith("init=")]
        own_settings.append("resume=auto")
    if gpus == 0:
        own_settings.append("device=cpu")

    # The last setting of a key takes precedence.
    return launcher + ["mldec.train"] + own_settings + settings


def check_data(row: Row, settings: list[str]) -> None:
    """Raise an error for wrong settings or missing data."""
    config = composed(tuple(row.settings + settings))
    root = config.data.get("root")
    if root is not None and not Path(root).is_dir():
        data = dataset(config)
        section = data.section if data else "of the data set"
        raise DataError(f"{root}: folder not found; pass --data-root, see DATASETS.md, {section}")


def train(row: Row, seed: int, gpus: int, settings: list[str]) -> None:
    """Train a row with one seed, and record the GPU hours, even if the run fails."""
    name, _ = folder_name(row, seed, settings)
    start = time.monotonic()
    status = subprocess.run(command(row, seed, gpus, settings)).returncode
    hours = (time.monotonic() - start) * gpus / 3600

    HOURS.parent.mkdir(parents=True, exist_ok=True)
    with HOURS.open("a") as file:
        file.write(json.dumps({"run": name, "gpu_hours": hours}) + "\n")
    if status:
        raise ConfigError(f"{name}: exit status {status}; run the same command to resume")


def result(row: Row, seed: int, settings: list[str]) -> dict[str, Any] | None:
    """Return state, commit and metrics of a run, or None before its first evaluation."""
    name, _ = folder_name(row, seed, settings)
    folder = Path("outputs", name)
    path = folder / "checkpoints" / "best.pt"
    if not path.exists():
        return None
    saved = loading.load(path).metrics
    state = read_run(folder, name).row

    # Metrics of the raw weights have another prefix if there is a moving average.
    prefix = "val/"
    if state["weights"] == "raw" and any(key.startswith("val_raw/") for key in saved):
        prefix = "val_raw/"
    metrics = {}
    for key, value in saved.items():
        if key.startswith(prefix):
            metrics[key.removeprefix(prefix)] = value

    return {
        "run": name,
        "finished": state["state"] == "finished",
        "epochs": state["epochs"],
        "commit": state["commit"],
        "metrics": metrics,
    }


def table(title: str, rows: list[Row], seeds: range, settings: list[str]) -> str:
    """Return a table in Markdown, with one line per metric of each row."""
    hours = spent_hours()
    lines = [
        f"# {title}",
        "",
        "| model | metric | paper | ours | seeds | GPU hours | commit | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        results = []
        spent = 0.0
        for seed in seeds:
            found = result(row, seed, settings) if row.runs else None
            if found is not None:
                results.append(found)
            spent += hours.get(folder_name(row, seed, settings)[0], 0.0)

        finished = [run for run in results if run["finished"]]
        commits = sorted({run["commit"] for run in finished})
        notes = [row.note]
        if row.runs and not finished:
            notes.insert(0, f"at {results[0]['epochs']} epochs" if results else "not run")
        if row.choice:
            notes.append(f"our choice: {row.choice}")

        published: dict[str, float | None] = dict(row.paper) or {"-": None}
        for metric, paper in published.items():
            values = [run["metrics"][metric] for run in finished if metric in run["metrics"]]
            cells = [
                row.label,
                metric,
                "n/a" if paper is None else f"{paper}",
                mean_and_deviation(values),
                str(len(finished)),
                f"{spent:.1f}",
                ", ".join(commits) or "-",
                "; ".join(filter(None, notes)),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spent_hours() -> dict[str, float]:
    """Return the GPU hours of each run, over all of its starts."""
    hours: dict[str, float] = {}
    if HOURS.exists():
        for line in HOURS.read_text().splitlines():
            start = json.loads(line)
            hours[start["run"]] = hours.get(start["run"], 0.0) + start["gpu_hours"]
    return hours


def mean_and_deviation(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.2f}"


def initial_weights(row: Row) -> str:
    """Return the initial weights of a row."""
    config = composed(tuple(row.settings))
    if config.init:
        return f"init={config.start.path}"
    weights = config.backbone.get("pretrained", True)
    if weights is True:
        return str(config.backbone.get("name"))
    return str(weights) if weights else "random weights"


def overview() -> Iterator[str]:
    """Yield a heading, and one line per row of all tables."""
    of_gpu = f"GPU hours at an assumed {SUSTAINED / 1e12:.0f} TFLOP/s"
    of_h100 = (
        f"H100 hours at an assumed {H100 / 1e12:.0f} TFLOP/s, in fp32 {H100_FP32 / 1e12:.0f}, "
        f"convolutional networks {H100_CONVOLUTIONS / 1e12:.0f}"
    )
    yield f"table | model | paper | starts from | {of_gpu} | {of_h100} | our choice | command"

    for name, (_, rows) in TABLES.items():
        for row in rows:
            paper = ", ".join(f"{metric} {value}" for metric, value in row.paper.items())
            words = shlex.join(["python", "-m", "mldec.train"] + row.settings + [f"name={row.run}"])
            cells = [
                name,
                row.label,
                "; ".join(filter(None, (paper or "-", row.note))),
                initial_weights(row),
                estimate(row, SUSTAINED),
                estimate(row, h100(tuple(row.settings))),
                row.choice or "-",
                words if row.runs else "not run",
            ]
            yield " | ".join(cells)


def estimate(row: Row, sustained: float) -> str:
    """Return the estimated hours of one GPU as text; `sustained` as for `gpu_hours`."""
    try:
        hours = gpu_hours(tuple(row.settings), sustained)
    except ConfigError:
        # CvT needs transformers, which is optional.
        hours = None
    return "unknown" if hours is None else f"{hours:,.1f}"


def reproduce(name: str, *, seeds: range, gpus: int, dry: bool, settings: list[str]) -> None:
    """Print the commands of a table, train unfinished runs, and write the table."""
    title, rows = TABLES[name]

    # 1. Print the commands.
    print(f"{title}:")
    runs = [(row, seed) for seed in seeds for row in rows if row.runs]
    for row, seed in runs:
        folder, messages = folder_name(row, seed, settings)
        for message in messages:
            print(f"  {message}: this row runs as {folder}")
    root = f"{ENVIRONMENT}={os.environ[ENVIRONMENT]} " if ENVIRONMENT in os.environ else ""
    for row, seed in runs:
        words = shlex.join(command(row, seed, max(gpus, 1), settings))
        print(f"  {root}{words.replace(sys.executable, 'python', 1)}", flush=True)

    out = Path("outputs", "reproduce", f"{name}.md")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if dry:
            return

        # 2. Check everything before the first run, which may take days.
        for row, _ in runs:
            check_data(row, settings)
        if gpus < 0:
            raise ConfigError("no CUDA device found; pass --gpus 0 to run on the CPU")

        # 3. Train unfinished runs.
        for row, seed in runs:
            earlier = result(row, seed, settings)
            if earlier is None or not earlier["finished"]:
                train(row, seed, gpus, settings)
    finally:
        # 4. Write the table of finished runs, also after an error.
        text = table(title, rows, seeds, settings)
        out.write_text(text)
        print(f"\n{text}\nwritten: {out}", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES, nargs="?")
    parser.add_argument("--list", action="store_true", help="print all rows")
    parser.add_argument(
        "--data-root",
        metavar="FOLDER",
        help=f"folder with coco/, voc/ and so on; default: {ENVIRONMENT}, else data",
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    parser.add_argument("--gpus", type=int, help="default: all; 0: run on the CPU")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    args, settings = parser.parse_known_args()
    if args.table is None and not args.list:
        parser.error(f"pass --list or a table: {', '.join(TABLES)}")

    # The data options read this variable.
    if args.data_root:
        os.environ[ENVIRONMENT] = args.data_root

    with one_line():
        if args.list:
            for line in overview():
                print(line, flush=True)
            return

        gpus = args.gpus
        if gpus is None:
            gpus = torch.cuda.device_count() or -1
        seeds = range(args.seeds)
        reproduce(args.table, seeds=seeds, gpus=gpus, dry=args.dry_run, settings=settings)


if __name__ == "__main__":
    main()
