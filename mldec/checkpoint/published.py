"""The published format of a checkpoint for inference: safetensors and JSON, without pickle.

A folder, or a repository on the Hugging Face Hub, contains two files:

- model.safetensors: one set of weights, "ema" or "raw", and the word vectors of the classes.
- config.json: the metadata of the checkpoint, and the hash of model.safetensors.

`mldec publish` writes these files. They have no training state, so a run cannot be resumed.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mldec.checkpoint.state import Best, Checkpoint, LogPosition, no_optimizer
from mldec.errors import CheckpointError, naming_errors
from mldec.files.atomic import to_json, write_file
from mldec.files.torch_files import SUFFIX, sha256_of, write_safetensors

CONFIG = "config.json"
WEIGHTS = f"model{SUFFIX}"
LIBRARY = "mldec"
LAYOUT = 1
QUERIES = "classes.queries"  # name of the word vectors in model.safetensors
# Parts of `Checkpoint.to_state` that are tensors or not needed for inference.
_TRAINING = ("model", "ema", "optimizer", "scaler", "loss", "log", "val_fingerprint")


def with_weights(checkpoint: Checkpoint, weights: str, path: Path) -> Checkpoint:
    """Return a checkpoint with one set of weights and no training state.

    The best result and the calibration are dropped if they are of the other set of weights.

    Args:
        checkpoint: Checkpoint to reduce. It is not changed.
        weights: "ema" or "raw".
        path: Path of the checkpoint, for messages.

    Raises:
        CheckpointError: If the checkpoint does not contain these weights.
    """
    with naming_errors(path):
        tensors, _ = checkpoint.weights(weights)
    best = checkpoint.best
    calibration = checkpoint.calibration
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
        optimizer=no_optimizer(),
        scaler={},
        loss={},
        log=LogPosition(),
    )


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the two files of a checkpoint from `with_weights`, and read them back to verify."""
    weights = checkpoint.best.weights
    tensors, _ = checkpoint.weights(weights)
    word_vectors = checkpoint.classes.word_vectors
    if word_vectors is not None:
        tensors = {**tensors, QUERIES: word_vectors}
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
            "best": None if checkpoint.best.metric is None else saved["best"],
        },
    }
    # NaN in a metric is null in JSON.
    write_file(folder / CONFIG, f"{to_json(content, indent=1)}\n".encode())
    Checkpoint.from_state(read(path), path)


def read(path: Path) -> dict[str, Any]:
    """Read a safetensors file and the config.json in the same folder.

    Args:
        path: Path of model.safetensors.

    Returns:
        Content for `Checkpoint.from_state`.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"no file at {path}: check the path")
    config = path.with_name(CONFIG)
    if not config.is_file():
        raise CheckpointError(
            f"{path} lacks the {CONFIG} that mldec publish writes beside it; put it there"
        )
    content = read_config(config)

    with naming_errors(config):
        expected = content["sha256"][WEIGHTS]
        weights = content["weights"]
        saved = content["checkpoint"]
        classes = saved["classes"]
        best = asdict(Best()) if saved["best"] is None else saved["best"]
        best = {**best, "weights": weights}
        metrics = {}
        for name, value in saved["metrics"].items():
            metrics[name] = math.nan if value is None else value

    with naming_errors(path):
        actual = sha256_of(path)
        # safetensors validates that the tensors fill the file without gaps and overlaps.
        tensors = load_file(path) if actual == expected else {}
    if actual != expected:
        # The file is a symbolic link in the Hub cache. Its target must be deleted.
        raise CheckpointError(
            f"{path} is damaged: its sha256 is {actual}, not the {expected} of {CONFIG}; delete "
            f"{path.resolve()}, and fetch it anew"
        )
    # The clone is aligned in memory. The last bit of a product depends on the alignment.
    word_vectors = tensors.pop(QUERIES, None)
    if word_vectors is not None:
        word_vectors = word_vectors.clone()

    return {
        **saved,
        "classes": {**classes, "queries": word_vectors},
        "metrics": metrics,
        "best": best,
        "model": tensors if weights == "raw" else {},
        "ema": tensors if weights == "ema" else None,
    }


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CheckpointError: If the file is invalid, or `write` did not write it.
    """
    with naming_errors(path):
        content = json.loads(path.read_bytes())
        library = content.get("library")
        layout = content.get("layout")

    if library != LIBRARY:
        raise CheckpointError(f"{path} is not one that mldec publish wrote; use another checkpoint")
    if layout != LAYOUT:
        raise CheckpointError(
            f"{path} has layout {str(layout)[:40]}, this mldec reads {LAYOUT}: use a newer mldec"
        )
    return dict(content)
