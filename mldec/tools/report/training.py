"""Cost and learning curves of the run of a checkpoint."""

from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

from mldec.errors import CheckpointError
from mldec.files.run_folder import LOG_FILE, RUN_FILE, read_facts, read_log
from mldec.training.log import clock, read_progress

# Pairs of the number of epochs and a value.
Curve = list[tuple[float, float]]


def read_training(folder: Path | None) -> tuple[dict[str, str], dict[str, Curve], list[str]]:
    """Return the training cost by heading, the learning curves, and notes on missing files."""
    if folder is None:
        return {}, {}, [f"Training cost and curves are unknown: found no {LOG_FILE} or {RUN_FILE}."]

    cost: dict[str, str] = {}
    curves: dict[str, Curve] = {}
    notes = []
    for name in (RUN_FILE, LOG_FILE):
        if not (folder / name).is_file():
            notes.append(f"{name} of the run is missing.")
    try:
        facts = read_facts(folder)
        if facts is not None:
            macs = "unknown"
            if facts.multiply_accumulates is not None:
                macs = f"{facts.multiply_accumulates / 1e9:,.3f} billion per image"
            versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
            commit = facts.commit or "unknown"
            cost["Trainable parameters"] = f"{facts.parameters:,}"
            cost["Multiply-accumulates"] = f"{macs} at {facts.image_size} pixels"
            cost["Trained by"] = f"{facts.command} ({versions}; commit {commit})"
        curves = learning_curves(read_log(folder / LOG_FILE))
        if curves:
            cost["Training time"] = clock(read_progress(folder / LOG_FILE).seconds)
    except CheckpointError as error:
        notes.append(f"Training cost and curves are incomplete: {error}.")
    return cost, curves, notes


def learning_curves(lines: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the losses and the main metric over the epochs, from the lines of metrics.jsonl."""
    main = "val/loss"
    for key in chain.from_iterable(lines):
        if key.startswith("val/"):
            main = key
            break
    names = {"train/loss", "val/loss", main, main.replace("val/", "val_raw/")}

    # Evaluations are at the end of an epoch. The last one gives the number of steps per epoch.
    steps = 1.0
    for line in lines:
        if main in line and line["epoch"]:
            steps = line["step"] / line["epoch"]

    curves: dict[str, Curve] = defaultdict(list)
    for line in lines:
        for name in names & line.keys():
            if line[name] is not None:
                curves[name].append((line["step"] / steps, line[name]))
    return dict(sorted(curves.items()))
