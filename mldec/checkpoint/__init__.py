"""Checkpoints: enough by themselves to rebuild the model, its classes and its input transform."""

from mldec.checkpoint.loading import (
    Loaded,
    initialise,
    load,
    load_model,
    load_newest,
    load_strict,
    local,
    saved_config,
)
from mldec.checkpoint.provenance import git_commit, installed
from mldec.checkpoint.state import FORMAT, Best, Checkpoint, LogPosition

__all__ = [
    "FORMAT",
    "Best",
    "Checkpoint",
    "Loaded",
    "LogPosition",
    "git_commit",
    "initialise",
    "installed",
    "load",
    "load_model",
    "load_newest",
    "load_strict",
    "local",
    "saved_config",
]
