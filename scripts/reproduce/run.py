"""Train rows of the papers: `python scripts/reproduce/run.py table1 [--data-root DIR]`.

There are rows of tables 1, 2, 3, 5 and 6 and of figures 5 and 6 of ML-Decoder, of its results on
VOC 2007, Open Images, ImageNet, Cars and CIFAR-100, of Query2Label and of ASL; not of table 4 and
of the tables in the appendix. The table "recipes" has later networks, with a published value
beside them. `--list` prints every row: the paper's value, the weights that it starts from, the
estimated hours of one GPU and of one H100, what is our choice, and its command.

It prints the command of each run, trains the runs that are not finished, from where they stopped,
and writes outputs/reproduce/NAME.md with the paper's value, ours, seeds, GPU hours and commit.
Settings such as train.epochs=1 are added to each run. Unless train.accumulate is one of them, the
batch is divided into micro-batches that should fit the GPU, by its memory and their
multiply-accumulates; batch norms then see the images of one micro-batch at a time.

A folder below outputs/ that holds a run of other settings or start weights is left alone: the row
says what differs, and gets a folder of its own.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

# Beside this file.
from costs import (
    H100,
    H100_CONVOLUTIONS,
    H100_FP32,
    SUSTAINED,
    accumulation,
    composed,
    dataset,
    gpu_hours,
    h100,
    usable,
)
from rows import TABLES, Row

ENVIRONMENT = "MLDEC_DATA"  # where the data options look for their folders
HOURS = Path("outputs/reproduce/hours.jsonl")


# Settings that may differ between a row and a run that counts as it: where and how it was run.
INDIFFERENT = {
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


def name(row: Row, seed: int) -> str:
    """Return the name of a run unless another run has it, and of its folder below outputs/."""
    return row.run if seed == 0 else f"{row.run}_seed{seed}"


def own_name(row: Row, seed: int, settings: list[str]) -> tuple[str, list[str]]:
    """Return the name of a row's run, and one line for each other run that has a better one.

    Args:
        row: the row.
        seed: of the run.
        settings: of the user, which are added to those of the row.

    Returns:
        The first of NAME, NAME_2, ... whose folder is free or holds this very run, and what differs
        in the folders before.
    """
    first = name(row, seed)
    lines: list[str] = []
    for number in itertools.count(1):
        own = first if number == 1 else f"{first}_{number}"
        changes = differences(Path("outputs", own), row, seed, settings)
        if not changes:
            return own, lines
        lines.append(f"outputs/{own} is another run ({'; '.join(changes)})")
    raise AssertionError("the count has no end")


def differences(folder: Path, row: Row, seed: int, settings: list[str]) -> list[str]:
    """Return `key: there -> here` for each setting in which the run of a folder is not the row's.

    The weights that a run started from are a setting too, `init`.
    """
    from mldec.config.compose import flat, to_dict
    from mldec.errors import ConfigError
    from mldec.runtime.devices import Precision

    recorded = folder / "config.yaml"
    if not recorded.exists():
        # Without checkpoints there is nothing that would be taken for the row's.
        return ["no config.yaml"] if any(folder.glob("checkpoints/*.pt")) else []

    wanted = flat(to_dict(composed((*row.settings, f"seed={seed}", *settings))))
    try:
        there = _flat_file(recorded)
    except (ConfigError, yaml.YAMLError, UnicodeDecodeError) as error:
        return [f"its config.yaml cannot be read: {error}"]

    # A run records the precision that it used on its device.
    used = there["train.precision"]
    if Precision(wanted["train.precision"]).may_fall_back_to(Precision(used)):
        wanted["train.precision"] = used

    return [
        f"{key}: {there.get(key)} -> {wanted.get(key)}"
        for key in sorted({*there, *wanted} - INDIFFERENT)
        if there.get(key) != wanted.get(key)
    ]


def _flat_file(path: Path) -> dict[str, Any]:
    """Return the settings in the config.yaml of a run by their full keys."""
    from mldec.config.compose import flat, parse, to_dict

    return flat(to_dict(parse(yaml.safe_load(path.read_text()))))


def command(row: Row, seed: int, gpus: int, settings: list[str]) -> list[str]:
    """Return the command line that trains a row, as a new run or from where it stopped."""
    # As many of the GPUs as the batch can be divided among, and micro-batches that fit each.
    own_settings = [*row.settings, f"seed={seed}"]
    if gpus > 1:
        gpus = usable(composed((*row.settings, *settings)).train.batch_size, gpus)
    if not any(setting.startswith("train.accumulate=") for setting in settings):
        parts = accumulation((*row.settings, *settings), max(gpus, 1))
        if parts > 1:
            own_settings.append(f"train.accumulate={parts}")

    launcher = [sys.executable, "-m"]
    if gpus > 1:
        launcher = ["torchrun", "--nproc-per-node", str(gpus), "-m"]

    # A run that goes on takes its weights from its own checkpoint.
    own, _ = own_name(row, seed, settings)
    own_settings.append(f"name={own}")
    if any(Path("outputs", own, "checkpoints").glob("last*.pt")):
        own_settings = [setting for setting in own_settings if not setting.startswith("init=")]
        own_settings.append("resume=auto")
    if gpus == 0:
        own_settings.append("device=cpu")

    # The user's settings come last, so that they count.
    return [*launcher, "mldec.train", *own_settings, *settings]


def missing(row: Row, settings: list[str]) -> str | None:
    """Return one line on the folder of a row's data if it is not there, else None."""
    # A wrong setting is refused here too, before the first run.
    config = composed((*row.settings, *settings))

    root = config.data.get("root")
    if root is None or Path(root).is_dir():
        return None
    data = dataset(config)
    section = data.section if data else "the data set's"
    return f"{root} is not there: pass --data-root, or see DATASETS.md, section {section}"


def train(row: Row, seed: int, gpus: int, settings: list[str]) -> None:
    """Train a row with one seed, and record how long the GPUs were used.

    Raises:
        ConfigError: if it fails.
    """
    from mldec.errors import ConfigError

    own, _ = own_name(row, seed, settings)
    began = time.monotonic()
    status = subprocess.run(command(row, seed, gpus, settings)).returncode
    hours = (time.monotonic() - began) * gpus / 3600

    # A run that failed used the GPUs too.
    HOURS.parent.mkdir(parents=True, exist_ok=True)
    with HOURS.open("a") as file:
        file.write(json.dumps({"run": own, "gpu_hours": hours}) + "\n")

    if status:
        raise ConfigError(f"{own} ended with status {status}: the same command goes on with it")


def result(row: Row, seed: int, settings: list[str]) -> dict[str, Any] | None:
    """Return the state, commit and metrics of a run; None before its first evaluation."""
    from mldec.checkpoint import loading
    from mldec.tools.summary import read

    own, _ = own_name(row, seed, settings)
    folder = Path("outputs", own)
    path = folder / "checkpoints" / "best.pt"
    if not path.exists():
        return None

    saved = loading.load(path).metrics
    state = read(folder, own)

    # With a moving average the metrics of the raw weights have names of their own.
    prefix = "val/"
    if state.weights == "raw" and any(key.startswith("val_raw/") for key in saved):
        prefix = "val_raw/"
    metrics = {
        key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)
    }

    return {
        "run": own,
        "finished": state.state == "finished",
        "epochs": state.epochs,
        "commit": state.commit,
        "metrics": metrics,
    }


def table(title: str, rows: list[Row], seeds: range, settings: list[str]) -> str:
    """Return the table as Markdown: one line per metric of each row."""
    hours = spent_hours()
    lines = [
        f"# {title}",
        "",
        "| model | metric | paper | ours | seeds | GPU hours | commit | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        results = row_results(row, seeds, settings)

        # Only finished runs count; the others are mentioned in the note.
        finished = [run for run in results if run["finished"]]
        spent = sum(hours.get(own_name(row, seed, settings)[0], 0.0) for seed in seeds)

        published: Mapping[str, float | None] = row.paper or {"-": None}
        for metric, paper in published.items():
            values = [run["metrics"][metric] for run in finished if metric in run["metrics"]]
            cells = [
                row.label,
                metric,
                "n/a" if paper is None else f"{paper}",
                mean_and_deviation(values),
                str(len(finished)),
                f"{spent:.1f}",
                ", ".join(sorted({run["commit"] for run in finished})) or "-",
                "; ".join(filter(None, (progress(row, results), row.note, ours(row)))),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def ours(row: Row) -> str:
    """Describe what of the recipe is our choice; "" for a recipe that is published whole."""
    return f"our choice: {row.choice}" if row.choice else ""


def row_results(row: Row, seeds: range, settings: list[str]) -> list[dict[str, Any]]:
    """Return the results of a row's runs that have been evaluated."""
    if not row.runs:
        return []
    results = [result(row, seed, settings) for seed in seeds]
    return [evaluated for evaluated in results if evaluated is not None]


def spent_hours() -> dict[str, float]:
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


def start(row: Row) -> str:
    """Return the weights that a row starts from, as its settings choose them."""
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

    for chosen, (_, rows) in TABLES.items():
        for row in rows:
            paper = ", ".join(f"{metric} {value}" for metric, value in row.paper.items())
            words = shlex.join(["python", "-m", "mldec.train", *row.settings, f"name={row.run}"])
            cells = [
                chosen,
                row.label,
                "; ".join(filter(None, (paper or "-", row.note))),
                start(row),
                estimate(row, SUSTAINED),
                estimate(row, h100(tuple(row.settings))),
                row.choice or "-",
                words if row.runs else "not run",
            ]
            yield " | ".join(cells)


def estimate(row: Row, sustained: float) -> str:
    """Return the hours of one GPU as text; a backbone of transformers is not estimated.

    Args:
        row: the row.
        sustained: see `gpu_hours`.
    """
    from mldec.errors import ConfigError

    try:
        hours = gpu_hours(tuple(row.settings), sustained)
    except ConfigError:
        # Its architecture is on the hub.
        hours = None
    return "unknown" if hours is None else f"{hours:,.1f}"


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
    for row, seed in runs:
        own, others = own_name(row, seed, settings)
        for line in others:
            print(f"  {line}: this row runs as {own}")
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
            earlier = result(row, seed, settings)
            if earlier is None or not earlier["finished"]:
                train(row, seed, gpus, settings)
    finally:
        # 4. Write the table, of what there is.
        text = table(title, rows, seeds, settings)
        out.write_text(text)
        print(f"\n{text}\nwritten: {out}", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES, nargs="?", help="what to reproduce")
    parser.add_argument("--list", action="store_true", help="print every row and do nothing")
    parser.add_argument(
        "--data-root",
        metavar="FOLDER",
        help=f"holds coco/, voc/ ...; default: {ENVIRONMENT}, else data",
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many: 0, 1, ... (default: one)")
    parser.add_argument("--gpus", type=int, help="default: all of this machine; 0: run on the CPU")
    parser.add_argument("--dry-run", action="store_true", help="run nothing")
    args, settings = parser.parse_known_args()
    if args.table is None and not args.list:
        parser.error(f"name a table, one of {', '.join(TABLES)}, or pass --list")

    # The option files read it when the package composes them.
    if args.data_root:
        os.environ[ENVIRONMENT] = args.data_root

    from mldec.errors import one_line

    with one_line():
        if args.list:
            for line in overview():
                print(line, flush=True)
            return

        gpus = args.gpus
        if gpus is None:
            import torch

            gpus = torch.cuda.device_count() or -1

        seeds = range(args.seeds)
        reproduce(args.table, seeds=seeds, gpus=gpus, dry=args.dry_run, settings=settings)


if __name__ == "__main__":
    main()
