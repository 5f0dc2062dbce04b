"""The portable form of a checkpoint: what inference needs, in safetensors and JSON, and no pickle.

A folder, or a repository on the Hugging Face Hub, holds two files:

- model.safetensors: one set of weights, "ema" or "raw", and the word vectors of the classes;
- config.json: the rest of the checkpoint, which weights they are, and the hash of the other file.

`mldec.publish` writes it. There is no training state: a run can start from it, but not go on.
"""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mldec.checkpoint.state import Best, Checkpoint, LogPosition
from mldec.errors import CheckpointError, DataError
from mldec.files.plain import plain
from mldec.files.results import write_file
from mldec.files.safetensors_file import SUFFIX, read_safetensors, write_safetensors
from mldec.files.text import open_binary, parse_json
from mldec.files.torch_files import sha256_of

CONFIG, WEIGHTS = "config.json", f"model{SUFFIX}"
LIBRARY, LAYOUT = "mldec", 1
MAX_CONFIG = 2**24  # bytes; ImageNet-21K needs two megabytes
QUERIES = "classes.queries"  # the name of the word vectors among the tensors
# The parts of `Checkpoint.to_state` that inference does not need, or that are tensors.
_TRAINING = ("model", "ema", "optimizer", "scaler", "loss", "log")
_TUPLES = ("thresholds", "slopes", "offsets")  # of a calibration; JSON has lists only
_HASH = re.compile("[0-9a-f]{64}")


def with_weights(checkpoint: Checkpoint, weights: str, path: Path) -> Checkpoint:
    """Return a checkpoint that holds one set of weights, and no training state.

    What is known of the other set is left out: the best result, and the calibration.

    Args:
        checkpoint: of a run.
        weights: "ema" or "raw".
        path: of its file, for messages.

    Raises:
        CheckpointError: if it has no such weights.
    """
    tensors, _ = checkpoint.weights(weights, path)
    best, calibration = checkpoint.best, checkpoint.calibration
    if best.metric is None or best.weights != weights:
        best = Best(weights=weights)
    if calibration is not None and calibration.weights != weights:
        calibration = None

    return replace(
        checkpoint,
        best=best,
        calibration=calibration,
        model=tensors if weights == "raw" else {},
        ema=tensors if weights == "ema" else None,
        optimizer={"state": {}, "param_groups": []},
        scaler={},
        loss={},
        log=LogPosition(),
    )


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the two files of a checkpoint, and read them back.

    Args:
        folder: for the files; it is created.
        checkpoint: from `with_weights`.

    Raises:
        DataError: if a file cannot be written.
        CheckpointError: if a value cannot be written as JSON, or would be refused when it is read.
    """
    weights = checkpoint.best.weights
    tensors, _ = checkpoint.weights(weights, folder)
    queries = checkpoint.classes.queries
    if queries is not None:
        tensors = {**tensors, QUERIES: queries}
    path = folder / WEIGHTS
    write_safetensors(path, tensors)

    state = checkpoint.to_state()
    saved = {name: value for name, value in state.items() if name not in _TRAINING}
    classes = {name: state["classes"][name] for name in ("names", "exclusive", "origin")}
    content = {
        "library": LIBRARY,
        "layout": LAYOUT,
        "weights": weights,
        "sha256": {WEIGHTS: sha256_of(path)},
        "checkpoint": {
            **saved,
            "classes": classes,
            # JSON has no NaN, which a metric may be, and no infinity, the value of no result yet.
            "metrics": {
                name: value if math.isfinite(value) else None
                for name, value in checkpoint.metrics.items()
            },
            "best": None if checkpoint.best.metric is None else saved["best"],
        },
    }

    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        raise CheckpointError(
            f"{folder / CONFIG} cannot be written: a setting of the run is no finite number"
        ) from error
    write_file(folder / CONFIG, f"{text}\n".encode())
    Checkpoint.from_state(read(path), path)


def read(path: Path) -> dict[str, Any]:
    """Read the untrusted files of a checkpoint in the portable form.

    Args:
        path: of the safetensors file; config.json is beside it.

    Returns:
        What `Checkpoint.from_state` takes.

    Raises:
        CheckpointError: if a file is missing, damaged, or not one that `write` wrote.
    """
    if not path.is_file():
        raise CheckpointError(f"no file at {path}: check the path")
    if not path.with_name(CONFIG).exists():
        raise CheckpointError(
            f"{path} lacks the {CONFIG} that mldec.publish writes beside it; put it there"
        )
    content = read_config(path.with_name(CONFIG))

    expected = content["sha256"][WEIGHTS]
    try:
        actual = sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if actual != expected:
        # In the cache of the hub the file is a link: what it leads to must go.
        raise CheckpointError(
            f"{path} is damaged: its sha256 is {actual}, not the {expected} of {CONFIG}; delete "
            f"{path.resolve()}, and fetch it anew"
        )

    tensors = read_safetensors(path)
    return _state(content, tensors, path)


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json, and check what `read` needs of it beside the checkpoint.

    Raises:
        CheckpointError: if it is not what `write` wrote.
    """
    try:
        with open_binary(path) as file:
            text = file.read(MAX_CONFIG + 1)
        if len(text) > MAX_CONFIG:
            raise CheckpointError(f"{path} is refused: it has more than {MAX_CONFIG:,} bytes")
        content = parse_json(text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except DataError as error:
        raise CheckpointError(f"{path} {error}") from error

    if not isinstance(content, dict) or content.get("library") != LIBRARY:
        raise CheckpointError(f"{path} is not one that mldec.publish wrote; use another checkpoint")
    layout = content.get("layout")
    if type(layout) is not int or layout != LAYOUT:
        raise CheckpointError(
            f"{path} has layout {str(layout)[:40]}, this mldec reads {LAYOUT}: use a newer mldec"
        )

    hashes, saved = content.get("sha256"), content.get("checkpoint")
    expected = hashes.get(WEIGHTS) if isinstance(hashes, dict) else None
    is_whole = (
        isinstance(expected, str)
        and _HASH.fullmatch(expected) is not None
        and content.get("weights") in ("ema", "raw")
        and isinstance(saved, dict)
    )
    if not is_whole:
        raise CheckpointError(
            f"{path} is not whole: it must hold the sha256 of {WEIGHTS}, its weights (ema or raw) "
            f"and the checkpoint"
        )
    return content


def _state(content: dict[str, Any], tensors: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return both files as the content of one checkpoint, whose parts are not checked yet."""
    weights = content["weights"]
    # Rebuilt with the limits that hold for a file of torch.save.
    saved = plain(content["checkpoint"], path)

    queries = tensors.pop(QUERIES, None)
    classes, calibration, metrics = (
        saved.get(name) for name in ("classes", "calibration", "metrics")
    )
    if isinstance(classes, dict):
        classes = {**classes, "queries": queries}
    if isinstance(calibration, dict):
        calibration = {
            name: tuple(value) if name in _TUPLES and isinstance(value, list) else value
            for name, value in calibration.items()
        }
    if isinstance(metrics, dict):
        metrics = {name: math.nan if value is None else value for name, value in metrics.items()}

    best = saved.get("best")
    if best is None:
        best = asdict(Best(weights=weights))
    return {
        # Without a format it would pass for a file of the authors.
        "format": None,
        **saved,
        "classes": classes,
        "calibration": calibration,
        "metrics": metrics,
        "best": {**best, "weights": weights} if isinstance(best, dict) else best,
        "model": tensors if weights == "raw" else {},
        "ema": tensors if weights == "ema" else None,
        "optimizer": {"state": {}, "param_groups": []},
        "scaler": {},
        "loss": {},
        "log": asdict(LogPosition()),
    }
