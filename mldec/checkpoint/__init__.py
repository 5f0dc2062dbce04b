"""Checkpoints: enough by themselves to rebuild the model, its classes and its input transform."""

from mldec.checkpoint.calibration import Calibrated, Calibration
from mldec.checkpoint.classes import check_classes, check_queries, check_vectors, scoring
from mldec.checkpoint.fitting import load_strict
from mldec.checkpoint.loading import (
    Loaded,
    initialise,
    is_download,
    load,
    load_model,
    load_newest,
    local,
    outline,
    saved_config,
    to_store,
)
from mldec.checkpoint.state import FORMAT, Best, Checkpoint, LogPosition

__all__ = [
    "FORMAT",
    "Best",
    "Calibrated",
    "Calibration",
    "Checkpoint",
    "Loaded",
    "LogPosition",
    "check_classes",
    "check_queries",
    "check_vectors",
    "initialise",
    "is_download",
    "load",
    "load_model",
    "load_newest",
    "load_strict",
    "local",
    "outline",
    "saved_config",
    "scoring",
    "to_store",
]
