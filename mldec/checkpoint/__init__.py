"""Checkpoints: enough by themselves to rebuild the model, its classes and its input transform."""

from mldec.checkpoint.classes import check_classes, check_queries, scoring
from mldec.checkpoint.loading import (
    Loaded,
    check_start,
    initialise,
    load,
    load_model,
    load_newest,
    load_strict,
    saved_config,
    to_store,
)
from mldec.checkpoint.state import FORMAT, Best, Calibrated, Calibration, Checkpoint, LogPosition

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
    "check_start",
    "initialise",
    "load",
    "load_model",
    "load_newest",
    "load_strict",
    "saved_config",
    "scoring",
    "to_store",
]
