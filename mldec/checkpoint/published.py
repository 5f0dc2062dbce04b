"""The published format of a checkpoint for inference: safetensors and JSON, without pickle.

A folder, or a repository on the Hugging Face Hub, contains two files:

- model.safetensors: one set of weights, "ema" or "raw", and the word vectors of the classes.
- config.json: the metadata of the checkpoint, and the hash of model.safetensors.

`mldec publish` writes these files, which have no training state, so that no run can be resumed from
them.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mldec.checkpoint.state import Best, Checkpoint, LogPosition
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

    The best result and the calibration of the other set of weights are dropped. `weights` is "ema"
    or "raw". Raises CheckpointError if the checkpoint at `path` does not contain them.
    """
    with naming_errors(path):
        tensors, _ = checkpoint.weights(weights)
    # The model card would show a result of other weights than the published weights.
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
        optimizer={"state": {}, "param_groups": []},
        scaler={},
        loss={},
        log=LogPosition(),
        **_one_set(weights, tensors),
    )


def _one_set(weights: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if weights == "raw":
        return {"model": tensors, "ema": None}
    return {"model": {}, "ema": tensors}


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the two files of a checkpoint from `with_weights`, and read them back to verify."""
    weights = checkpoint.best.weights
    tensors, _ = checkpoint.weights(weights)
    word_vectors = checkpoint.classes.word_vectors
    if word_vectors is not None:
        tensors = {**tensors, QUERIES: word_vectors}
    path = folder / WEIGHTS
    write_safetensors(path, tensors)

    saved = checkpoint.to_state()
    names = saved["classes"]
    classes = {name: names[name] for name in ("names", "exclusive", "origin")}
    for name in _TRAINING:
        del saved[name]
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
    # config.json is last, because it has the hash of the weights. NaN in a metric is null in JSON.
    write_file(folder / CONFIG, f"{to_json(content, indent=1)}\n".encode())
    Checkpoint.from_state(read(path), path)


def read(path: Path) -> dict[str, Any]:
    """Read model.safetensors, and config.json in the same folder, for `Checkpoint.from_state`."""
    if not path.is_file():
        raise CheckpointError(f"{path}: file not found; check the path")
    config = path.with_name(CONFIG)
    if not config.is_file():
        raise CheckpointError(f"{path}: {CONFIG} of mldec publish is missing in its folder; add it")
    content = read_config(config)

    with naming_errors(config):
        expected = content["sha256"][WEIGHTS]
        weights = content["weights"]
        saved = content["checkpoint"]
        classes = saved["classes"]
        # NaN and infinity are null in JSON, and the value of `Best()` is -infinity.
        best = asdict(Best()) if saved["best"] is None else saved["best"]
        best = {**best, "weights": weights}
        metrics = {}
        for name, value in saved["metrics"].items():
            metrics[name] = math.nan if value is None else value

    # The two files may be of different commits, for example after a download by hand.
    if sha256_of(path) != expected:
        # The file is a symbolic link in the Hub cache. Its target must be deleted.
        raise CheckpointError(
            f"{path} is damaged: its sha256 is not the one in {CONFIG}; delete {path.resolve()}, "
            f"and download it again"
        )
    with naming_errors(path):
        tensors = load_file(path)
    # The clone is aligned in memory. The last bit of a product depends on the alignment.
    word_vectors = tensors.pop(QUERIES, None)
    if word_vectors is not None:
        word_vectors = word_vectors.clone()

    return {
        **saved,
        "classes": {**classes, "queries": word_vectors},
        "metrics": metrics,
        "best": best,
        **_one_set(weights, tensors),
    }


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json. Raises CheckpointError unless `write` wrote it."""
    with naming_errors(path):
        content = json.loads(path.read_bytes())
        library = content.get("library")
        layout = content.get("layout")

    if library != LIBRARY:
        raise CheckpointError(f"{path}: mldec publish did not write it; use another checkpoint")
    if layout != LAYOUT:
        raise CheckpointError(f"{path}: layout {layout} is not {LAYOUT}; use a newer mldec")
    return dict(content)
