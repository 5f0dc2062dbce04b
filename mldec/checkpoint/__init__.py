"""Checkpoints: enough by themselves to rebuild the model, its classes and its input transform."""

from mldec.checkpoint.classes import check_classes, check_queries, scoring
from mldec.checkpoint.loading import (
    Loaded,
    initialise,
    load,
    load_model,
    load_newest,
    load_strict,
    saved_config,
    to_store,
)
from mldec.checkpoint.sources import check_start, is_download, is_tower, local
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
    "is_download",
    "is_tower",
    "load",
    "load_model",
    "load_newest",
    "load_strict",
    "local",
    "saved_config",
    "scoring",
    "to_store",
]
