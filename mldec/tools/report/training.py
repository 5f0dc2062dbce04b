"""What a report says of the run of a checkpoint: its cost and its learning curves."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from mldec.checkpoint import Loaded
from mldec.errors import CheckpointError
from mldec.files.run_folder import LOG_FILE, RUN_FILE, folder_of_run, read_facts, read_log
from mldec.files.torch_files import recorded_hash
from mldec.training.log import clock, read_progress

# The steps of a learning curve and their values.
Points = list[tuple[int, float]]


def run_folder(loaded: Loaded) -> Path | None:
    """Return the folder of the run that made a checkpoint, or None.

    A calibrated copy may lie elsewhere: its run is outputs/NAME if that holds its original.
    """
    folder = folder_of_run(loaded.path)
    source = loaded.calibration and loaded.calibration.source
    if folder is not None or source is None:
        return folder

    folder = Path("outputs", loaded.config.name)
    original = folder / "checkpoints" / "best.pt"
    return folder if original.is_file() and recorded_hash(original) == source else None


def of_run(folder: Path | None) -> tuple[dict[str, str], dict[str, Points], list[str]]:
    """Return the cost of a run by headings, its learning curves, and what is not known."""
    if folder is None:
        unknown = f"Neither {LOG_FILE} nor {RUN_FILE} lies beside the checkpoint"
        return {}, {}, [f"{unknown}: its learning curves and its cost are not known."]

    cost: dict[str, str] = {}
    curves: dict[str, Points] = {}
    missing = [name for name in (RUN_FILE, LOG_FILE) if not (folder / name).is_file()]
    notes = [f"There is no {name} beside the checkpoint." for name in missing]
    try:
        if facts := read_facts(folder):
            count, commit = facts.multiply_accumulates, facts.commit or "not known"
            macs = "not known" if count is None else f"{count / 1e9:,.3f} billion per image"
            versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
            cost["Trainable parameters"] = f"{facts.parameters:,}"
            cost["Multiply-accumulates"] = f"{macs} at {facts.image_size} pixels"
            cost["Trained by"] = f"{facts.command} ({versions}; commit {commit})"
        if curves := learning_curves(read_log(folder / LOG_FILE)):
            cost["Training time"] = clock(read_progress(folder / LOG_FILE).seconds)
    except CheckpointError as error:
        notes.append(f"Cost and learning curves are not all known: {error}.")
    return cost, curves, notes


def learning_curves(lines: list[dict[str, Any]]) -> dict[str, Points]:
    """Return the losses and the main metric over the steps, from the lines of metrics.jsonl."""
    main = next((key for line in lines for key in line if key.startswith("val/")), "val/loss")
    wanted = {"train/loss", "val/loss", main, main.replace("val/", "val_raw/")}

    curves: dict[str, Points] = defaultdict(list)
    for line in lines:
        for name in wanted & line.keys():
            if line[name] is not None:
                curves[name].append((line["step"], line[name]))
    return dict(sorted(curves.items()))
