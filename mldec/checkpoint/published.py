"""The published form of a checkpoint: what inference needs, in safetensors and JSON, and no pickle.

A folder, or a repository on the Hugging Face Hub, holds two files:

- model.safetensors: one set of weights, "ema" or "raw", and the word vectors of the classes;
- config.json: the rest of the checkpoint, which weights they are, and the hash of the other file.

`mldec publish` writes it. There is no training state: a run can start from it, but not go on.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mldec.checkpoint.state import Best, Checkpoint, LogPosition, no_optimizer
from mldec.errors import CheckpointError, refusing
from mldec.files.atomic import to_json, write_file
from mldec.files.torch_files import SUFFIX, sha256_of, write_safetensors

CONFIG, WEIGHTS = "config.json", f"model{SUFFIX}"
LIBRARY, LAYOUT = "mldec", 1
QUERIES = "classes.queries"  # the name of the word vectors among the tensors
# The parts of `Checkpoint.to_state` that inference does not need, or that are tensors.
_TRAINING = ("model", "ema", "optimizer", "scaler", "loss", "log", "val_fingerprint")


def with_weights(checkpoint: Checkpoint, weights: str, path: Path) -> Checkpoint:
    """Return a checkpoint with one set of weights, "ema" or "raw", and no training state.

    What is known of the other set is left out: the best result, and the calibration.
    """
    with refusing(path):
        tensors, _ = checkpoint.weights(weights)
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
        optimizer=no_optimizer(),
        scaler={},
        loss={},
        log=LogPosition(),
    )


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the two files of a checkpoint from `with_weights`, and read them back."""
    weights = checkpoint.best.weights
    tensors, _ = checkpoint.weights(weights)
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
            "best": None if checkpoint.best.metric is None else saved["best"],
        },
    }
    # JSON has no NaN, which a metric may be: it is null there.
    write_file(folder / CONFIG, f"{to_json(content, indent=1)}\n".encode())
    Checkpoint.from_state(read(path), path)


def read(path: Path) -> dict[str, Any]:
    """Read a safetensors file and the config.json beside it: what `Checkpoint.from_state` takes."""
    if not path.is_file():
        raise CheckpointError(f"no file at {path}: check the path")
    config = path.with_name(CONFIG)
    if not config.is_file():
        raise CheckpointError(
            f"{path} lacks the {CONFIG} that mldec publish writes beside it; put it there"
        )
    content = read_config(config)

    with refusing(config):
        expected, weights = content["sha256"][WEIGHTS], content["weights"]
        saved, classes = content["checkpoint"], content["checkpoint"]["classes"]
        best = asdict(Best()) if saved["best"] is None else saved["best"]
        metrics = {
            name: math.nan if value is None else value for name, value in saved["metrics"].items()
        }
        best = {**best, "weights": weights}

    with refusing(path):
        actual = sha256_of(path)
        # The library checks that the tensors fill the file without gaps and overlaps.
        tensors = load_file(path) if actual == expected else {}
    if actual != expected:
        # In the cache of the hub the file is a link: what it leads to must go.
        raise CheckpointError(
            f"{path} is damaged: its sha256 is {actual}, not the {expected} of {CONFIG}; delete "
            f"{path.resolve()}, and fetch it anew"
        )
    queries = tensors.pop(QUERIES, None)
    # Aligned in memory, where the last bit of a product depends on it.
    queries = None if queries is None else queries.clone()

    return {
        **saved,
        "classes": {**classes, "queries": queries},
        "metrics": metrics,
        "best": best,
        "model": tensors if weights == "raw" else {},
        "ema": tensors if weights == "ema" else None,
    }


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json, and check that `write` wrote it."""
    with refusing(path):
        content = json.loads(path.read_bytes())
        library, layout = content.get("library"), content.get("layout")

    if library != LIBRARY:
        raise CheckpointError(f"{path} is not one that mldec publish wrote; use another checkpoint")
    if layout != LAYOUT:
        raise CheckpointError(
            f"{path} has layout {str(layout)[:40]}, this mldec reads {LAYOUT}: use a newer mldec"
        )
    return dict(content)
